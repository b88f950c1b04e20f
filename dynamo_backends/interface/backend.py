"""The one interface of a backend.

A backend author writes one `Backend` subclass: what is needed to run here (`availability`), which
ATen calls it takes (`supports`), and how a graph of such calls is compiled (`compile`). Training,
mutation, views, dynamic shapes, partitioning, fallback, frozen weights, verification, caching and
reports come from the pipeline.
"""

import dataclasses
import difflib
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from dynamo_backends.interface.errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor, fx

    from dynamo_backends._torch_private import OpOverload
    from dynamo_backends.aot.step.programs import StepProgram
    from dynamo_backends.graph.graph import Graph
    from dynamo_backends.interface.report import GraphReport


@dataclass(frozen=True)
class Availability:
    """Whether a backend can run here.

    Attributes:
        usable: It can.
        reason: If not, why; if so, what it will run on.
        remedy: A command that mends it, or an empty string.
        devices: torch device types that it can compile for here.
    """

    usable: bool
    reason: str
    remedy: str = ""
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Support:
    """Whether a backend takes one ATen call; a "no" carries its reason."""

    yes: bool
    reason: str = ""

    def __bool__(self) -> bool:
        """True when the call is supported."""
        return self.yes


SUPPORTED = Support(True)


Ranges = Mapping[str, tuple[int, int | None]]
"""Least and largest value of options; None: there is no largest."""


@dataclass(frozen=True)
class Options:
    """The options that every backend has. A backend adds its own fields in a subclass.

    `RANGES` has the valid values of numbers; those of a subclass are checked as well.

    Attributes:
        fallback: "eager" runs what the backend cannot do in eager and reports it; "error" raises
            `FallbackRefusedError` instead.
        verify: Which calls of compiled code are compared with eager by `torch._dynamo.utils.same`,
            against a float64 reference where they are not close: "first": the first call of each
            program and shape; "always": every call; "off": none. What is wrong is replaced by
            eager, or raises `VerificationError` with `fallback="error"`. True means "first" and
            False "off", as in former versions.
        freezing: For inference. "probe" prepares weights once and checks before each call whether
            they changed (identity, version, address, a sample of their contents); "strict"
            compares whole contents; "off" treats weights as ordinary inputs.
        cache: Keep compiled executables on disk (`DYNAMO_BACKENDS_CACHE`).
        min_block_size: Parts of the graph with fewer operators than this are left to eager when
            the graph has to be split.
        keep_in_eager: Names of operators that are to run in eager although the backend could run
            them: "aten.softmax.int", "aten.softmax" or "softmax".
        fragmented: What to do with a graph that falls into many tiny blocks, which would cost more
            than they save (see `graph.fragments`): run all of it in eager, compile it with
            Inductor, or keep the blocks.
        max_executables: With dynamic shapes: how many concrete shapes stay compiled; the one
            used least recently leaves.
        partitioner: For training. "default" saves what the backward graph reads of the forward;
            "min_cut" saves less and computes cheap values again, as Inductor does.
    """

    fallback: Literal["eager", "error"] = "eager"
    verify: Literal["first", "always", "off"] | bool = "first"
    freezing: Literal["probe", "strict", "off"] = "probe"
    cache: bool = True
    min_block_size: int = 3
    keep_in_eager: tuple[str, ...] = ()
    fragmented: Literal["eager", "inductor", "keep"] = "eager"
    max_executables: int = 16
    partitioner: Literal["default", "min_cut"] = "default"

    RANGES: ClassVar[Ranges] = {"min_block_size": (1, None), "max_executables": (1, None)}

    def __post_init__(self) -> None:
        """Takes the values of former versions."""
        if isinstance(self.verify, bool):
            object.__setattr__(self, "verify", "first" if self.verify else "off")

    @property
    def is_reduced(self) -> bool:
        """Whether results may be less precise than their dtypes, because the user asked for it."""
        return getattr(self, "precision", "float32") not in ("float32", "fp32")

    def check(self, graph: "Graph", backend: str) -> None:
        """Checks that a captured graph can be compiled as these options ask.

        Args:
            graph: The graph.
            backend: The backend's name.

        Raises:
            DynamoBackendsError: It cannot, and the user has to change something.
        """

    def wrapped(self, executable: "Executable", graph: "Graph", backend: str) -> "Executable":
        """What runs in place of an executable, if these options ask for something around it.

        Args:
            executable: Compiled from the graph.
            graph: With static shapes.
            backend: The backend's name.
        """
        return executable

    @classmethod
    def parse(cls, given: Mapping[str, Any], backend: str) -> Self:
        """Options from the dict that a user passes to `torch.compile(options=...)`.

        Args:
            given: Option names and values.
            backend: The backend's name, for error messages.

        Raises:
            OptionError: A name is unknown (the message has the valid ones and the nearest), or a
                value has the wrong type or is not among the allowed ones.
        """
        hints = typing.get_type_hints(cls)
        valid = [field.name for field in dataclasses.fields(cls)]
        for name, value in given.items():
            if name not in valid:
                near = difflib.get_close_matches(str(name), valid, 1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise OptionError(
                    f"{backend} has no option {name!r}.{hint} Valid options: "
                    f"{', '.join(sorted(valid))}."
                )
            if not _matches(value, hints[name]):
                raise OptionError(
                    f"option {name!r} of {backend} must be {_describe(hints[name])}, "
                    f"not {value!r} ({type(value).__name__})."
                )
        options = cls(**given)
        options.validate(backend)
        return options

    def validate(self, backend: str) -> None:
        """Checks ranges and combinations.

        Raises:
            OptionError: A value is out of range.
        """
        for cls in type(self).__mro__:
            for name, (least, most) in vars(cls).get("RANGES", {}).items():
                value = getattr(self, name)
                if value < least or (most is not None and value > most):
                    valid = f"at least {least}" if most is None else f"{least} to {most}"
                    raise OptionError(f"option {name!r} of {backend} must be {valid}, not {value}.")
        if self.keep_in_eager:
            from dynamo_backends.interface.operator_names import check_names

            check_names(self.keep_in_eager, "keep_in_eager", backend)


def _matches(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return any(value is a or (type(value) is type(a) and value == a) for a in hint.__args__)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, h) for h in hint.__args__)
    if origin is tuple:
        return isinstance(value, tuple) and _elements_match(value, hint.__args__)
    if hint is type(None):
        return value is None
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def _elements_match(value: tuple[Any, ...], hints: tuple[Any, ...]) -> bool:
    if len(hints) == 2 and hints[1] is Ellipsis:
        return all(_matches(v, hints[0]) for v in value)
    return len(value) == len(hints) and all(map(_matches, value, hints))


def _describe(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is tuple:
        kinds = [_describe(h) for h in hint.__args__ if h is not Ellipsis]
        return f"a tuple of {kinds[0]}" if Ellipsis in hint.__args__ else f"({', '.join(kinds)})"
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in hint.__args__)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(h) for h in hint.__args__)
    return "None" if hint is type(None) else getattr(hint, "__name__", str(hint))


Bound = Callable[[list["Tensor"]], list["Tensor"]]


class Executable(ABC):
    """One compiled graph.

    A graph's inputs are of two kinds (`Graph.weights` and `Graph.activations`). Weights are bound
    once and again whenever they changed; activations come with every call.
    """

    @abstractmethod
    def bind(self, weights: Sequence["Tensor"]) -> tuple[Bound, Collection[int]]:
        """Prepares the weights.

        Args:
            weights: The tensors of `Graph.weights`, in order.

        Returns:
            A function from the list of activations to the list of outputs, and the positions of
            the weights whose contents it copied. Those are watched for changes of content; the
            others must share memory with the given tensors, and are watched for a new address.
        """

    def bind_live(self, weights: Sequence["Tensor"]) -> tuple[Bound, Collection[int]] | None:
        """As `bind`, for weights that keep changing: without preparing what takes long.

        `binding` decides on it. By default there is no such form (None), and `bind` is called.
        """
        return None

    def report_to(self, report: "GraphReport") -> None:  # noqa: B027 - has a default
        """Gives it the report of its graph, for what turns out only when it is called."""

    def dump(self) -> dict[str, bytes] | None:
        """What must be kept on disk to `Backend.load` it in another process; None: cannot be."""
        return None


class Backend(ABC):
    """A compiler for functional ATen graphs.

    Attributes:
        name: What users pass to `torch.compile(backend=...)`.
        summary: One line for `dynamo-backends list`.
        Options: The frozen dataclass of its options.
        trains: Forward and backward graphs can be compiled, not only inference graphs.
        dynamic_shapes: How graphs with symbolic shapes are run, for `dynamo-backends list`. The
            pipeline compiles them once per concrete shape.
        serves_ranges: One program can serve several shapes, so that graphs with symbolic shapes are
            handed over with sizes that know where they come from (see `graph.sizes`).
        is_verified: It compares what it runs with eager itself.
        packages: The modules that it needs, each with the package on the index that has it.
        optional_packages: Packages that its code depends on where they are installed, such as a
            vendor's build for GPUs; "nvfuser-*" stands for all whose names begin so.
        install: The command that installs `packages`.
        same_as: Name of the backend that runs the same code, of which this is a variant; autotune
            tries one of them.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    Options: ClassVar[type[Options]] = Options
    trains: ClassVar[bool] = True
    dynamic_shapes: ClassVar[str] = "one executable per shape"
    serves_ranges: ClassVar[bool] = False
    is_verified: ClassVar[bool] = False
    packages: ClassVar[Mapping[str, str]] = {}
    optional_packages: ClassVar[tuple[str, ...]] = ()
    install: ClassVar[str] = ""
    same_as: ClassVar[str] = ""

    @abstractmethod
    def availability(self) -> Availability:
        """Whether it can run here; if not, why and what mends it. Must not raise."""

    @abstractmethod
    def supports(self, node: "fx.Node", options: Any) -> Support:
        """Whether one ATen call (`node.op == "call_function"`, `meta["val"]` set) is taken."""

    @abstractmethod
    def compile(self, graph: "Graph", options: Any) -> Executable:
        """Compiles a graph of supported calls with static shapes.

        Raises:
            LoweringError: One node cannot be lowered after all; it will run in eager.
            CompileError: The whole graph cannot be compiled; all of it will run in eager.
        """

    def lacks(self) -> Availability | None:
        """A "no" that names the missing ones of `packages`; None: none is missing."""
        from dynamo_backends.interface.packages import missing

        reason = missing(self.packages)
        return Availability(False, reason, self.install) if reason else None

    def versions(self) -> dict[str, str]:
        """The installed packages that its code depends on, with versions, for `cache_key`."""
        from dynamo_backends.interface.packages import versions

        return versions((*self.packages.values(), *self.optional_packages))

    def take(
        self, captured: "fx.GraphModule", example_inputs: Sequence[Any], options: Any, number: int
    ) -> Callable[..., Any] | None:
        """Compiles what Dynamo captured without the pipeline; None: leaves it to the pipeline.

        Args:
            captured: Dynamo's torch-level graph.
            example_inputs: Its inputs, real tensors.
            options: An instance of `Options`.
            number: Of the captured graph, for reports.
        """
        return None

    def compile_step(self, graph: "Graph", options: Any) -> "StepProgram | None":
        """Compiles a whole training step, all of whose calls are supported (see `compile_step`).

        A backend that can write over its inputs does that here. None: what the step updates is
        computed by an executable (see `compile`) and copied to where it belongs.

        Raises:
            LoweringError: One node cannot be lowered after all.
            CompileError: The graph cannot be compiled.
        """
        return None

    def load_step(self, parts: Mapping[str, bytes], graph: "Graph", options: Any) -> "StepProgram":
        """Recreates a compiled step from `StepProgram.dump`.

        Raises:
            CompileError: The parts are damaged or from another version; they will be dropped.
        """
        raise NotImplementedError(f"{self.name} does not keep steps on disk")

    def keeps(self, options: Any) -> Collection["OpOverload"]:
        """Composite operators to be handed over whole instead of decomposed."""
        return ()

    def prepare(self, graph: "Graph", options: Any) -> None:  # noqa: B027 - has a default
        """Checks, once per captured graph, that it can be compiled for the tensors' devices.

        Raises:
            DynamoBackendsError: It cannot, and the user has to change something.
        """

    def cache_key(self, options: Any) -> str | None:
        """Versions and processor features that compiled code depends on; None: never cached."""
        return None

    def load(self, parts: Mapping[str, bytes], graph: "Graph", options: Any) -> Executable:
        """Recreates an executable from `Executable.dump`.

        Raises:
            CompileError: The parts are damaged or from another version; they will be dropped.
        """
        raise NotImplementedError(f"{self.name} does not keep executables on disk")
