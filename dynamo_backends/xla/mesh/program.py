"""Runs training steps on a mesh: each device has its parts of parameters, state and batch."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from torch import Tensor

from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.mesh import MeshLayout, Placed, Placement
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.runtime.device_tensor import DeviceTensor
from dynamo_backends.runtime.device_values import fills_storage, on_host, value_of
from dynamo_backends.xla import _jaxlib
from dynamo_backends.xla.mesh.devices import MeshDevice
from dynamo_backends.xla.mesh.reports import mesh_report
from dynamo_backends.xla.mesh.splits import Splits
from dynamo_backends.xla.resident_step import ResidentStep


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
        key: Of the program, the same on all ranks and for no other.
    """

    def __init__(
        self,
        device: MeshDevice,
        graph: Graph,
        executable: Any,
        layout: MeshLayout,
        splits: Splits,
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
            ranks.check_program(self._what, self._key)
        super().__call__(inputs, taken)

    def _caller(self) -> Callable[[list[Any]], list[Any]]:
        call = _jaxlib.split_caller(self.executable, self._splits.results, self._splits.outputs)
        ranks = self._mesh.ranks
        if ranks is None:
            return call
        return lambda arrays: cast(list[Any], ranks.together(self._what, lambda: call(arrays)))

    def _take_in(self, place: int, tensor: Tensor) -> Any:
        importer, sharding = self._importers[place], self._splits.inputs[place]
        if self._mesh.ranks is not None and tensor.shape != self._values[place].shape:
            plain = tensor.host() if isinstance(tensor, DeviceTensor) else tensor
            return self._mesh.join(plain.detach(), self._values[place].shape, sharding)
        if not isinstance(tensor, DeviceTensor):
            return self._mesh.split(importer(tensor), sharding)
        handle = tensor._handle
        value = value_of(handle)
        is_ours = value is not None and value.home is self._mesh and not value.is_exposed
        whole = fills_storage(handle) and importer.view(handle).is_contiguous()
        if value is None or not is_ours or not whole:
            return self._mesh.split(importer(tensor.host()), sharding)
        if not self._is_here(place, value.array):
            value.array = self._mesh.split(importer(on_host(handle)), sharding)
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

    def report_to(self, report: GraphReport) -> None:
        """See `StepProgram.report_to`."""
        inputs = self._layout.inputs
        parameters = [
            (Placed(name, inputs[place]), self._values[place])
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
