"""Defines optional backend capabilities as protocols for `isinstance`.

A backend has one of these by having its methods. Most backends have `SavesExecutables` alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dynamo_backends.interface.executable import Executable, StepProgram
from dynamo_backends.interface.mesh import InputPlacement, Mesh, MeshLayout, Placement

if TYPE_CHECKING:
    from torch import Tensor, fx

    from dynamo_backends.graph.graph import Graph


@runtime_checkable
class SavesExecutables(Protocol):
    """A backend whose executables can be saved in the disk cache and in packages."""

    def cache_key(self, options: Any) -> str | None:
        """Returns a text of all that compiled code depends on; None disables the cache."""

    def load(self, parts: Mapping[str, bytes], graph: "Graph", options: Any) -> Executable:
        """Loads an executable from the bytes of `Executable.dump`.

        Args:
            parts: What was dumped.
            graph: Has the inputs and outputs of the one that was compiled. Calls are whole in it
                that were decomposed in that one.
            options: An instance of `Backend.Options`.

        Raises:
            CompileError: The parts are damaged or from another version; they will be dropped.
        """


@runtime_checkable
class CompilesSteps(Protocol):
    """A backend that compiles a whole training step into one `StepProgram`.

    For other backends what a step updates is computed by an executable (see `Backend.compile`) and
    copied to where it belongs.
    """

    def compile_step(self, graph: "Graph", options: Any) -> StepProgram | None:
        """Compiles a training step; None if this device is not supported.

        Returns:
            A program that writes over its inputs; None: not on this device.

        Raises:
            LoweringError: One node cannot be lowered after all.
            CompileError: The graph cannot be compiled.
        """


@runtime_checkable
class SavesSteps(Protocol):
    """A backend whose compiled training steps can be stored."""

    def load_step(self, parts: Mapping[str, bytes], graph: "Graph", options: Any) -> StepProgram:
        """Loads a compiled step from the bytes of `StepProgram.dump`.

        Raises:
            CompileError: The parts are damaged or from another version; they will be dropped.
        """


class MeshTarget(Protocol):
    """A mesh of a backend's devices."""

    @property
    def name(self) -> str:
        """The device name of tensors on the mesh."""

    def place(self, tensor: "Tensor", placement: Placement) -> None:
        """Moves a tensor to the mesh in place with a placement.

        Raises:
            DeviceError: torch cannot exchange it.
        """

    def compile_step(self, graph: "Graph", layout: MeshLayout) -> StepProgram:
        """Compiles a training step as one SPMD program for all devices.

        Raises:
            LoweringError: One node cannot be lowered after all.
            CompileError: The graph cannot be compiled.
        """


@runtime_checkable
class SpansMesh(Protocol):
    """A backend whose programs run on several devices."""

    def make_mesh_target(self, options: Any, mesh: Mesh) -> MeshTarget:
        """Returns the devices of a mesh as a target for compiled training steps.

        Args:
            options: An instance of `Backend.Options`.
            mesh: Their grid.

        Raises:
            OptionError: The backend has no such steps with these options.
            DeviceError: There are too few devices.
        """

    def placements(
        self, graph: "Graph", names: Sequence[str], options: Any
    ) -> Sequence[InputPlacement | None]:
        """Returns placements of a graph's inputs on the options' mesh; empty without one.

        Args:
            graph: In normal form, perhaps with symbolic shapes.
            names: Names of its inputs, as users write them: "self.fc.weight".
            options: An instance of `Backend.Options`.

        Raises:
            OptionError: A placement does not fit, or the graph is none for inference.
        """

    def single_process_options(self, options: Any) -> Any:
        """Returns options for a graph that this process runs without other ranks.

        Args:
            options: An instance of `Backend.Options`.
        """


@runtime_checkable
class OwnsDevice(Protocol):
    """A backend with devices of its own that torch does not know."""

    def options_for_device(self, options: Any, device: str) -> Any:
        """Returns options adapted to a graph with inputs on one of these devices.

        For other backends the contents come to the host.

        Args:
            options: An instance of `Backend.Options`.
            device: The name of the device.
        """

    def resident_device(self, options: Any) -> str | None:
        """Returns the device where results remain; None if results are ordinary tensors."""


NamedBounds = Sequence[int] | Mapping[str, Mapping[int, Sequence[int]]]
"""Bounds of all sizes that vary, in order; or by the name of an input and the dimension."""


@dataclass(frozen=True)
class BucketRule:
    """How a backend rounds dynamic sizes up to bounds when it pads inputs.

    Attributes:
        growth: The ratio of a bound to the one before it, about; 1: there are those of `named`
            alone.
        exact_after: Number of calls after which sizes get their own executable; None: those whose
            padding has taken as long as compiling one does.
        named: Bounds that the user named, which come before others.
    """

    growth: float
    exact_after: int | None
    named: NamedBounds = ()


@runtime_checkable
class PadsShapes(Protocol):
    """A backend whose executables take inputs smaller than those they were compiled for."""

    def buckets(self, options: Any) -> BucketRule | None:
        """Returns the rounding rule; None compiles each set of concrete shapes.

        Such a graph's sizes know where they come from (see `graph.sizes`). Its executable takes
        inputs of all sizes up to the bounds, or `compile` raises `NotPaddedError`.

        Args:
            options: An instance of `Backend.Options`.

        Returns:
            None: every set of concrete shapes is compiled for itself.
        """


@runtime_checkable
class UpdatesInputs(Protocol):
    """A backend whose executables can write over their inputs."""

    def donates(self, graph: "Graph", options: Any) -> bool:
        """Returns whether `compile` writes updated inputs in place (`Input.updated_by`).

        A bound function returns the input itself then, in the place of its new contents. For other
        backends the pipeline copies results to inputs, or the rows that change.

        Args:
            graph: In normal form, with symbolic shapes.
            options: An instance of `Backend.Options`.
        """


@runtime_checkable
class CompilesCapturedGraphs(Protocol):
    """A backend that can compile Dynamo's torch-level graphs itself."""

    def compile_captured_graph(
        self, captured: "fx.GraphModule", example_inputs: Sequence[Any], options: Any, number: int
    ) -> Callable[..., Any] | None:
        """Compiles Dynamo's graph; None passes it to the usual pipeline.

        Args:
            captured: Dynamo's torch-level graph.
            example_inputs: Its inputs, real tensors.
            options: An instance of `Backend.Options`.
            number: Number of the captured graph, for reports.
        """


@runtime_checkable
class Prefetches(Protocol):
    """A backend that can start slow initialization while a graph is traced."""

    def start_initialization(self, inputs: Sequence[Any], options: Any) -> None:
        """Starts slow initialization in the background while the graph is traced.

        Args:
            inputs: Inputs of the captured graph, real tensors; weights among them.
            options: An instance of `Backend.Options`.
        """


def cache_key(backend: object, options: Any) -> str | None:
    """Returns `SavesExecutables.cache_key`; None for backends that save nothing."""
    return backend.cache_key(options) if isinstance(backend, SavesExecutables) else None


def load_executable(
    backend: object, parts: Mapping[str, bytes], graph: "Graph", options: Any
) -> Executable:
    """Loads an executable with `SavesExecutables.load`."""
    assert isinstance(backend, SavesExecutables), backend
    return backend.load(parts, graph, options)


def resident_device(backend: object, options: Any) -> str | None:
    """Returns `OwnsDevice.resident_device`; None for backends without own devices."""
    return backend.resident_device(options) if isinstance(backend, OwnsDevice) else None


def buckets(backend: object, options: Any) -> BucketRule | None:
    """Returns `PadsShapes.buckets`; None for backends that do not pad."""
    return backend.buckets(options) if isinstance(backend, PadsShapes) else None


def options_for_device(backend: object, options: Any, device: str) -> Any:
    """Returns `OwnsDevice.options_for_device`; else the options unchanged."""
    return (
        backend.options_for_device(options, device) if isinstance(backend, OwnsDevice) else options
    )


def single_process_options(backend: object, options: Any) -> Any:
    """Returns `SpansMesh.single_process_options`; else the options unchanged."""
    return backend.single_process_options(options) if isinstance(backend, SpansMesh) else options


def donates(backend: object, graph: "Graph", options: Any) -> bool:
    """Returns `UpdatesInputs.donates`; False for backends that update no inputs."""
    return isinstance(backend, UpdatesInputs) and backend.donates(graph, options)
