"""Defines the interface of a backend.

A backend author writes one `Backend` subclass: what is needed to run here (`availability`), which
ATen calls it takes (`supports`, or `plan` for a whole graph), and how a graph of such calls is
compiled (`compile`). Training, mutation, views, dynamic shapes, partitioning, fallback, frozen
weights, verification, caching and reports come from the pipeline. `interface.protocols` has what a
backend may do besides.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dynamo_backends.interface.deprecated_names import DeprecatedNames
from dynamo_backends.interface.executable import ArtifactStore, Executable
from dynamo_backends.interface.options import Options

if TYPE_CHECKING:
    from torch import fx

    from dynamo_backends._torch_private import OpOverload
    from dynamo_backends.graph.graph import Graph
    from dynamo_backends.interface.plan import Plan, Support


@dataclass(frozen=True)
class Availability:
    """Whether a backend can run here, with the reason and a command that fixes it.

    Attributes:
        usable: Whether the backend can run here.
        reason: Why it cannot run; if it can, what it runs on.
        remedy: A command that fixes it, or an empty string.
        devices: torch device types that it can compile for here.
    """

    usable: bool
    reason: str
    remedy: str = ""
    devices: tuple[str, ...] = ()


RANGED = "one executable for all sizes"
"""What `Backend.dynamic_shapes` is of backends that serve ranges."""


class Backend(DeprecatedNames, ABC):
    """A compiler for functional ATen graphs.

    Attributes:
        name: The name for `torch.compile(backend=...)`.
        summary: One line for `dynamo-backends list`.
        Options: The frozen dataclass of its options.
        trains: Whether it compiles forward and backward graphs, not only inference graphs.
        dynamic_shapes: How graphs with symbolic shapes are run, for `dynamo-backends list`.
        serves_ranges: Whether one executable can serve several shapes. Then sizes in a graph carry
            their symbolic expressions (see `graph.sizes`). Otherwise, and for executables without
            `Executable.serves_range`, the pipeline compiles once per concrete shape.
        depends_on_ranges: Whether an executable for a range depends on its bounds, beyond whether a
            size may be 0 or 1. Otherwise it also serves other ranges of the same graph: Dynamo
            captures a function once for each range that its guards distinguish.
        is_verified: Whether the backend compares its results with eager itself.
        packages: The modules that it needs, each with the package that contains it.
        optional_packages: Packages that its code depends on if they are installed, such as a
            vendor's build for GPUs; "nvfuser-*" stands for all names with this prefix.
        install: The command that installs `packages`.
        same_as: Name of the backend of which this is a variant with the same code; `autotune` tries
            one of them.
        kept: The store of its compiled blocks; None: the disk cache.
    """

    RENAMED: ClassVar[dict[str, str]] = {
        "decomposes": "decomposed_operators",
        "keeps": "preserved_operators",
        "lacks": "check_packages",
        "prepare": "check_graph",
        "prefetch": "start_initialization",
        "on_mesh": "make_mesh_target",
    }

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    Options: ClassVar[type[Options]] = Options
    trains: ClassVar[bool] = True
    dynamic_shapes: ClassVar[str] = "one executable per shape"
    serves_ranges: ClassVar[bool] = False
    depends_on_ranges: ClassVar[bool] = True
    is_verified: ClassVar[bool] = False
    packages: ClassVar[Mapping[str, str]] = {}
    optional_packages: ClassVar[tuple[str, ...]] = ()
    install: ClassVar[str] = ""
    same_as: ClassVar[str] = ""
    kept: ArtifactStore | None = None

    @abstractmethod
    def availability(self) -> Availability:
        """Returns whether the backend can run here, or why not and what fixes it. Never raises."""

    def supports(self, node: "fx.Node", options: Any) -> "Support":
        """Returns whether the backend takes a call (a `call_function` node with `meta["val"]`).

        A backend that decides about whole graphs has `plan` instead.
        """
        raise NotImplementedError(f"{self.name} has neither `supports` nor `plan`")

    def plan(self, graph: "Graph", options: Any) -> "Plan":
        """Decides for each call of a graph: backend, decompose first, or eager.

        Asks `supports` about each, unless a backend decides about several together.

        Args:
            graph: The calls in question, with static shapes; not to be changed. Results of calls
                that run in eager anyway are inputs.
            options: An instance of `Options`.
        """
        from dynamo_backends.interface.plan import plan_per_call

        return plan_per_call(graph, lambda node: self.supports(node, options), self.name)

    @abstractmethod
    def compile(self, graph: "Graph", options: Any) -> Executable:
        """Compiles a static-shape graph whose calls `plan` accepted into an `Executable`.

        Raises:
            LoweringError: One node cannot be lowered after all; it will run in eager.
            CompileError: The whole graph cannot be compiled; all of it will run in eager.
        """

    def check_packages(self) -> Availability | None:
        """Returns an unusable `Availability` that names missing packages; None if none is."""
        from dynamo_backends.interface.packages import describe_missing

        reason = describe_missing(self.packages)
        return Availability(False, reason, self.install) if reason else None

    def versions(self) -> dict[str, str]:
        """Returns installed package names and versions that compiled code depends on."""
        from dynamo_backends.interface.packages import installed_versions

        return installed_versions((*self.packages.values(), *self.optional_packages))

    def preserved_operators(self, options: Any) -> Collection["OpOverload"]:
        """Returns composite operators that must reach the backend undecomposed."""
        return ()

    def decomposed_operators(self, options: Any) -> Collection["OpOverload"]:
        """Returns extra operators to decompose within calls that `plan` decomposes.

        Besides the operators that are not core ATen and not kept, which are so anyway.
        """
        return ()

    def check_graph(self, graph: "Graph", options: Any) -> None:
        """Raises an error if a captured graph cannot be compiled for its tensors' devices.

        Raises:
            DynamoBackendsError: It cannot, and the user has to change something.
        """
