"""Defines options common to all backends, and parses and checks them."""

import dataclasses
import math
import types
import typing
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from dynamo_backends.interface.errors import OptionError, did_you_mean

if TYPE_CHECKING:
    from dynamo_backends.graph.graph import Graph
    from dynamo_backends.interface.executable import Executable

Limits = Mapping[str, tuple[int, int | None]]
"""Least and largest value of options; None: there is no largest."""


@dataclass(frozen=True)
class Options:
    """The options that every backend has. A backend adds its own fields in a subclass.

    `LIMITS` has the valid values of numbers; those of a subclass are checked as well.

    Attributes:
        fallback: "eager" runs in eager what the backend cannot run or Dynamo does not capture, and
            reports it; "error" raises `FallbackRefusedError` instead.
        verify: Which calls of compiled code are compared with eager, by `torch._dynamo.utils.same`
            against a float64 reference where results are not close: "first": the first call of
            each program and shape; "always": every call; "off": none. Wrong code is replaced by
            eager, or raises `VerificationError` with `fallback="error"`. True means "first" and
            False means "off".
        slow: What to do with compiled code that is significantly slower than eager, as measured on
            the first calls: "eager" runs it in eager from then on, with a warning; "report" only
            warns; "off" disables the measurement (see docs/options.md).
        freezing: For inference. "probe" prepares weights once, and checks before each call whether
            identity, version, address or a sample of the contents changed; "strict" compares the
            whole contents; "off" treats weights as ordinary inputs.
        cache: Keep compiled executables on disk (`DYNAMO_BACKENDS_CACHE`).
        min_block_size: If a graph has to be partitioned, blocks with fewer operators run in eager.
        keep_in_eager: Names of operators to run in eager although the backend supports them:
            "aten.softmax.int", "aten.softmax" or "softmax".
        fragmented: What to do with a graph that is split into so many small blocks that their call
            overhead exceeds the gain: run it in eager, compile it with Inductor, or keep the
            blocks.
        max_executables: With dynamic shapes: how many concrete shapes stay compiled; the least
            recently used one is evicted.
        ranges: With dynamic shapes: one executable serves all sizes, if the backend can compile
            one. False: every set of concrete shapes is compiled separately.
        while_compiling: What a call does if there is no program for its sizes yet. "wait" compiles
            one first; "eager" runs in eager while one is compiled in the background, for later
            calls (see docs/shapes.md). `autotune` and `compile_step` refuse "eager".
        partitioner: For training. "default" saves all activations that the backward graph reads;
            "min_cut" saves fewer and recomputes cheap ones, as Inductor does.
    """

    fallback: Literal["eager", "error"] = "eager"
    verify: Literal["first", "always", "off"] | bool = "first"
    slow: Literal["eager", "report", "off"] = "eager"
    freezing: Literal["probe", "strict", "off"] = "probe"
    cache: bool = True
    min_block_size: int = 3
    keep_in_eager: tuple[str, ...] = ()
    fragmented: Literal["eager", "inductor", "keep"] = "eager"
    max_executables: int = 16
    ranges: bool = True
    while_compiling: Literal["wait", "eager"] = "wait"
    partitioner: Literal["default", "min_cut"] = "default"

    LIMITS: ClassVar[Limits] = {"min_block_size": (1, None), "max_executables": (1, None)}

    def __post_init__(self) -> None:
        """Translates values of former versions."""
        if isinstance(self.verify, bool):
            object.__setattr__(self, "verify", "first" if self.verify else "off")

    def refuse_background_compile(self, who: str) -> None:
        """Raises `OptionError` if `while_compiling="eager"` is set.

        Args:
            who: Name of what cannot compile in the background, for the text of the error.

        Raises:
            OptionError: It was asked for.
        """
        if self.while_compiling != "wait":
            raise OptionError(
                f"{who} compiles synchronously; while_compiling must be 'wait', not "
                f"{self.while_compiling!r}."
            )

    @property
    def compiles_in_background(self) -> bool:
        """Whether `while_compiling="eager"` compiles graphs in the background."""
        return self.while_compiling == "eager"

    @property
    def allows_reduced_precision(self) -> bool:
        """Whether the option `precision` allows less precision than the dtypes have."""
        return getattr(self, "precision", "float32") not in ("float32", "fp32")

    @property
    def verifies_whole_graph(self) -> bool:
        """Whether verification compares whole captured graphs instead of blocks."""
        return False

    @property
    def keeps_scalars_on_device(self) -> bool:
        """Whether a step's scalars, such as learning rates, are kept on the device.

        Numbers are learning rates and floats among the arguments; they are passed at each call.
        """
        return False

    def require_dynamo_capture(self, who: str) -> None:
        """Raises `OptionError` if these options need graphs captured by Dynamo.

        Args:
            who: Name of what compiles such graphs (steps, packages), for the text of the error.

        Raises:
            OptionError: They are not.
        """

    def validate_graph(self, graph: "Graph", backend: str) -> None:
        """Raises an error if a captured graph cannot be compiled with these options.

        Args:
            graph: The graph.
            backend: The backend's name.

        Raises:
            DynamoBackendsError: It cannot, and the user has to change something.
        """

    def wrap_executable(
        self, executable: "Executable", graph: "Graph", backend: str
    ) -> "Executable":
        """Returns an executable, wrapped where options such as `cudagraphs` require it.

        Args:
            executable: Compiled from the graph.
            graph: With static shapes.
            backend: The backend's name.
        """
        return executable

    @classmethod
    def parse(cls, given: Mapping[str, Any], backend: str) -> Self:
        """Creates options from `torch.compile(options=...)`; raises `OptionError` if wrong.

        Args:
            given: Option names and values.
            backend: The backend's name, for error messages.

        Raises:
            OptionError: A name is unknown (the message has the valid ones and the nearest), or a
                value has the wrong type or is not among the allowed ones.
        """
        hints = typing.get_type_hints(cls)
        valid = [field.name for field in dataclasses.fields(cls)]
        given = _without_former(given, backend)
        for name, value in given.items():
            if name not in valid:
                hint = did_you_mean(str(name), valid)
                raise OptionError(
                    f"{backend} has no option {name!r}.{hint} Valid options: "
                    f"{', '.join(sorted(valid))}."
                )
            if not _matches(value, hints[name]):
                words = [w for w in _allowed(hints[name]) if isinstance(w, str)]
                hint = did_you_mean(value, words) if isinstance(value, str) else ""
                raise OptionError(
                    f"option {name!r} of {backend} must be {_describe(hints[name])}, "
                    f"not {value!r} ({type(value).__name__}).{hint}"
                )
        options = cls(**given)
        options.validate(backend)
        return options

    def validate(self, backend: str) -> None:
        """Raises `OptionError` for values out of limits and invalid combinations.

        Raises:
            OptionError: A value is out of range.
        """
        for field in dataclasses.fields(self):
            if not _is_finite(value := getattr(self, field.name)):
                raise OptionError(
                    f"option {field.name!r} of {backend} must be a finite number, not {value!r}."
                )
        for cls in type(self).__mro__:
            for name, (least, most) in vars(cls).get("LIMITS", {}).items():
                value = getattr(self, name)
                if value is None:
                    continue
                if value < least or (most is not None and value > most):
                    valid = f"at least {least}" if most is None else f"{least} to {most}"
                    raise OptionError(f"option {name!r} of {backend} must be {valid}, not {value}.")
        if self.keep_in_eager:
            from dynamo_backends.interface.operator_names import check_operator_names

            check_operator_names(self.keep_in_eager, "keep_in_eager", backend)


FORMER_OPTIONS = {"specialize": "frequent sizes no longer get executables of their own"}
"""Options of the version before, which are accepted and ignored, with the reason."""


def _without_former(given: Mapping[str, Any], backend: str) -> dict[str, Any]:
    """Returns the options that still have an effect; warns of others."""
    for name in FORMER_OPTIONS.keys() & given.keys():
        warnings.warn(
            f"the option {name!r} of {backend} is deprecated and has no effect: "
            f"{FORMER_OPTIONS[name]}. Remove it; the next version raises an error.",
            DeprecationWarning,
            stacklevel=3,
        )
    return {name: value for name, value in given.items() if name not in FORMER_OPTIONS}


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
    if hint is int or hint is float:  # which an int may stand for
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, origin or hint)


def _is_finite(value: Any) -> bool:
    """Returns whether no number in a value is infinite or NaN."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, tuple | list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _elements_match(value: tuple[Any, ...], hints: tuple[Any, ...]) -> bool:
    if len(hints) == 2 and hints[1] is Ellipsis:
        return all(_matches(v, hints[0]) for v in value)
    return len(value) == len(hints) and all(map(_matches, value, hints))


def _allowed(hint: Any) -> tuple[Any, ...]:
    """Returns the values of a `Literal`, also inside of a union; empty for other types."""
    if typing.get_origin(hint) is Literal:
        return typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(v for h in typing.get_args(hint) for v in _allowed(h))
    return ()


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
