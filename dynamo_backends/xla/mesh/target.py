"""A mesh of XLA's devices, to which steps are compiled."""

import hashlib
from typing import Any

import jax
import jaxlib.version
from torch import Tensor

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import Exporter, Importer
from dynamo_backends.graph.roles import Input, Role
from dynamo_backends.interface.executable import StepProgram
from dynamo_backends.interface.mesh import MeshLayout, Placement
from dynamo_backends.runtime.device_tensor import DeviceTensor, exchange, to_home
from dynamo_backends.runtime.device_values import on_device
from dynamo_backends.runtime.memory import return_free_memory
from dynamo_backends.xla.foreign_calls import calls_of_libraries
from dynamo_backends.xla.lowering.context import LoweringOptions
from dynamo_backends.xla.mesh.compiling import compile_lowered, lower_split
from dynamo_backends.xla.mesh.devices import MeshDevice
from dynamo_backends.xla.mesh.program import MeshStep
from dynamo_backends.xla.mesh.splits import Splits, splitting
from dynamo_backends.xla.products import simplify_products
from dynamo_backends.xla.steps import donated, trace_step


class XlaMesh:
    """See `MeshTarget`.

    Args:
        device: All devices of the mesh.
        options: Of the lowering.
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
        exchange(tensor, self._placed(tensor, placement))
        if gradient is not None:
            tensor.grad = self._placed(gradient, placement)

    def _placed(self, tensor: Tensor, placement: Placement) -> Tensor:
        plain = tensor.host() if isinstance(tensor, DeviceTensor) else tensor
        plain = plain.detach()
        importer, export = Importer(plain), Exporter(plain)
        if export.copies or tuple(importer.dense_shape) != tuple(export.dense_shape):
            return to_home(plain, self._device)  # goes there with the first step
        sharding = self._device.sharding(placement, importer.storage.order)
        array = self._device.split(importer(plain), sharding)
        handle = on_device(self._device, array, export.dense_shape, plain.dtype)
        return DeviceTensor(export(handle), self.name)

    def compile_step(self, graph: Graph, layout: MeshLayout) -> StepProgram:
        """See `MeshTarget.compile_step`.

        A program that calls other libraries is given nothing (see `foreign_calls`).
        """
        splits = Splits(self._device, graph, layout)
        options = splitting(self._options, self._device, graph, layout)
        with jax.enable_x64(True):
            program = simplify_products(trace_step(graph, options, is_flat=False))
            lowered = lower_split(program, self._device, splits, "step", donated(graph))
            if calls_of_libraries(lowered):
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
            "All ranks have to build the same model and optimizer, and to give batches of the "
            "same shapes (DistributedSampler and DataLoader(drop_last=True) do)."
        )
        ranks.agree("compiles a step", key, facts, advice)
        return key


def _name(given: Input, parameter: str | None) -> str:
    if parameter is not None:
        return parameter
    if given.role is Role.ACTIVATION:
        return "a tensor of the whole batch"
    return given.role.name.lower().replace("_", " ")


def _described(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
