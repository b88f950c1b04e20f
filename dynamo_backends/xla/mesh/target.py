"""A mesh of XLA's devices, to which steps are compiled."""

import hashlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import jax
import jaxlib.version
from torch import Tensor

from dynamo_backends.graph.graph import Graph, Input, Role
from dynamo_backends.graph.layouts import InputConverter, OutputConverter
from dynamo_backends.interface.executable import StepProgram
from dynamo_backends.interface.mesh import InputPlacement, MeshLayout, Placement
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.runtime.device_tensor import DeviceTensor, copy_to_device, swap_in_contents
from dynamo_backends.runtime.device_values import (
    fetch_to_host,
    fills_storage,
    make_device_handle,
    storage_value,
)
from dynamo_backends.runtime.freed_memory import return_free_memory
from dynamo_backends.xla import _jaxlib
from dynamo_backends.xla.custom_calls import find_custom_calls
from dynamo_backends.xla.lowering.context import LoweringOptions
from dynamo_backends.xla.matmul_rewrites import simplify_products
from dynamo_backends.xla.mesh.compiling import (
    ProgramShardings,
    compile_lowered,
    lower_split,
    mesh_report,
    partitioned_options,
)
from dynamo_backends.xla.mesh.devices import MeshDevice
from dynamo_backends.xla.resident_step import ResidentStep
from dynamo_backends.xla.steps import donated, trace_step


class XlaMesh:
    """The `MeshTarget` of XLA's devices.

    Args:
        device: All devices of the mesh.
        options: Options of the lowering.
    """

    def __init__(self, device: MeshDevice, options: LoweringOptions):
        self._device = device
        self._options = options

    @property
    def name(self) -> str:
        """See `MeshTarget.name`."""
        return self._device.name

    def place(self, tensor: Tensor, placement: Placement) -> None:
        """See `MeshTarget.place`; a gradient goes with its tensor."""
        if isinstance(tensor, DeviceTensor) and tensor.home == self.name:
            return
        gradient = tensor.grad
        swap_in_contents(tensor, self._placed(tensor, placement))
        if gradient is not None:
            tensor.grad = self._placed(gradient, placement)

    def _placed(self, tensor: Tensor, placement: Placement) -> Tensor:
        plain = tensor.host() if isinstance(tensor, DeviceTensor) else tensor
        plain = plain.detach()
        importer, export = InputConverter(plain), OutputConverter(plain)
        if export.copies or tuple(importer.dense_shape) != tuple(export.dense_shape):
            return copy_to_device(plain, self._device)  # goes there with the first step
        sharding = self._device.sharding(placement, importer.storage.order)
        array = self._device.split(importer(plain), sharding)
        handle = make_device_handle(self._device, array, export.dense_shape, plain.dtype)
        return DeviceTensor(export(handle), self.name)

    def compile_step(self, graph: Graph, layout: MeshLayout) -> StepProgram:
        """See `MeshTarget.compile_step`.

        A program that calls other libraries is given nothing (see `custom_calls`).
        """
        splits = ProgramShardings(self._device, graph, layout)
        options = partitioned_options(self._options, self._device, graph, layout)
        with jax.enable_x64(True):
            program = simplify_products(trace_step(graph, options, is_flat=False))
            lowered = lower_split(program, self._device, splits, "step", donated(graph))
            if find_custom_calls(lowered):
                lowered = lower_split(program, self._device, splits, "step")
            key = self._agreed(graph, layout, lowered)
            executable = compile_lowered(lowered, program, self._device, "step")
        return_free_memory()
        if self._device.ranks is not None:
            self._device.ranks.add_program(key)
        return MeshStep(self._device, graph, executable, layout, splits, self, key)

    def _agreed(self, graph: Graph, layout: MeshLayout, lowered: Any) -> str:
        """Returns what stands for a program; raises on all ranks if they have different ones."""
        ranks = self._device.ranks
        if ranks is None:
            return ""
        text = f"{jaxlib.version.__version__}\n{lowered.as_text()}"
        key = hashlib.sha256(text.encode()).hexdigest()
        facts = [
            f"has {_name(x, layout.parameters.get(i))} of {_described(p.meta['val'])}"
            for i, (x, p) in enumerate(zip(graph.inputs, graph.placeholders, strict=True))
        ]
        facts += [f"calls {node.target}" for node in graph.calls]
        facts.append(f"has jaxlib {jaxlib.version.__version__} and program {key[:16]}")
        advice = (
            "Build the same model and optimizer on all ranks, and pass batches of the same shapes "
            "(use DistributedSampler and DataLoader(drop_last=True))."
        )
        ranks.require_agreement("compiles a step", key, facts, advice)
        return key


def _name(given: Input, parameter: str | None) -> str:
    if parameter is not None:
        return parameter
    if given.role is Role.ACTIVATION:
        return "a tensor of the whole batch"
    return given.role.name.lower().replace("_", " ")


def _described(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


class _Places(Protocol):
    def place(self, tensor: Tensor, placement: Placement) -> None:
        """See `MeshTarget.place`."""


class MeshStep(ResidentStep):
    """A step on a mesh.

    Args:
        device: All devices of the mesh.
        graph: The graph.
        executable: Compiled from it.
        layout: Where its inputs and outputs are.
        splits: The shardings that say so.
        target: Moves tensors to the mesh.
        key: Key of the program, the same on all ranks and for no other.
    """

    def __init__(
        self,
        device: MeshDevice,
        graph: Graph,
        executable: Any,
        layout: MeshLayout,
        splits: ProgramShardings,
        target: _Places,
        key: str = "",
    ):
        self._splits = splits
        self._mesh = device
        self._key = key
        self._what = "takes a step"
        super().__init__(device, graph, executable)
        self._layout = layout
        self._target = target
        self._values = [p.meta["val"] for p in graph.placeholders]

    def __call__(self, inputs: Sequence[Tensor], taken: list[Any]) -> None:
        """See `StepProgram.__call__`."""
        ranks = self._mesh.ranks
        if ranks is not None:
            self._what = f"takes a step with program {self._key[:8]} and {_numbers(inputs[0])}"
            ranks.require_same_program(self._what, self._key)
        super().__call__(inputs, taken)

    def _caller(self) -> Callable[[list[Any]], list[Any]]:
        call = _jaxlib.make_multi_device_call(
            self.executable, self._splits.results, self._splits.outputs
        )
        ranks = self._mesh.ranks
        if ranks is None:
            return call
        return lambda arrays: cast(
            list[Any], ranks.run_on_all_ranks(self._what, lambda: call(arrays))
        )

    def _take_in(self, place: int, tensor: Tensor) -> Any:
        importer, sharding = self._importers[place], self._splits.inputs[place]
        if self._mesh.ranks is not None and tensor.shape != self._values[place].shape:
            plain = tensor.host() if isinstance(tensor, DeviceTensor) else tensor
            return self._mesh.join(plain.detach(), self._values[place].shape, sharding)
        if not isinstance(tensor, DeviceTensor):
            return self._mesh.split(importer(tensor), sharding)
        handle = tensor._handle
        value = storage_value(handle)
        is_ours = value is not None and value.home is self._mesh and not value.is_exposed
        whole = fills_storage(handle) and importer.to_program_order(handle).is_contiguous()
        if value is None or not is_ours or not whole:
            return self._mesh.split(importer(tensor.host()), sharding)
        if not self._is_here(place, value.array):
            value.array = self._mesh.split(importer(fetch_to_host(handle)), sharding)
            value.is_shared = False
        return value.array

    def _is_here(self, place: int, array: Any) -> bool:
        """Returns whether an array is split as an input is expected."""
        if array is None or array.shape != self._importers[place].dense_shape:
            return False
        return bool(array.sharding.is_equivalent_to(self._splits.inputs[place], array.ndim))

    def _array(self, place: int, tensor: Tensor, value: Any) -> Any:
        return self._take_in(place, tensor)

    def _duplicated(self, place: int, array: Any) -> Any:
        return self._mesh.duplicated(array, self._splits.inputs[place])

    def _settle(self, place: int, tensor: Tensor) -> None:
        self._target.place(tensor, self._layout.inputs[place])

    def set_report(self, report: GraphReport) -> None:
        """See `StepProgram.set_report`."""
        inputs = self._layout.inputs
        parameters = [
            (InputPlacement(name, inputs[place]), self._values[place])
            for place, name in self._layout.parameters.items()
        ]
        report.mesh = mesh_report(self._mesh.mesh, self.executable, parameters)

    def dump(self) -> None:
        """See `StepProgram.dump`: programs for meshes are not kept on disk."""


def _numbers(given: Tensor) -> str:
    """Learning rates and the like, which have to be the same on all ranks, in words."""
    numbers = given.tolist()
    shown = ", ".join([*(f"{n:.6g}" for n in numbers[:4]), *["…"] * (len(numbers) > 4)])
    return f"numbers [{shown}] ({zlib.crc32(str(numbers).encode()):x})"
