"""Runs IREE programs on torch's memory, for one set of sizes or a range."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import (
    InputConverter,
    OutputConverter,
    copy_if_misaligned,
    to_row_major,
)
from dynamo_backends.graph.symbolic_sizes import with_sizes_as_inputs
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.interface.executable import Bound, Executable
from dynamo_backends.iree.lowering import ENTRY, IreeInputMap
from dynamo_backends.iree.session import Device, Loaded
from dynamo_backends.runtime.ranged_calls import RangedLayout

_BYTES = (torch.int8, torch.uint8)


class IreeExecutable(Executable):
    """The executable of one graph compiled by IREE.

    Weights of floating-point types become parameters of the program when they are bound, which
    packs them as its kernels want them; that takes no compilation. Other weights are arguments.

    Args:
        graph: The graph that was compiled, for the layouts of its inputs and outputs.
        program: From `compiler.compile_program`.
        wiring: Which inputs of the graph go where in the program.
        device: What runs it.
        entry: The function's name in the program.
    """

    def __init__(
        self, graph: Graph, program: bytes, wiring: IreeInputMap, device: Device, entry: str = ENTRY
    ):
        self._wiring = wiring
        self._device = device
        self._entry = entry
        self._loaded = Loaded(program, device)
        values = [p.meta["val"] for p in graph.placeholders]
        weights = {i: at for at, i in enumerate(graph.weights)}
        activations = {i: at for at, i in enumerate(graph.activations)}
        self._parameters = [(weights[i], name) for i, name in wiring.parameters]
        # Of each argument: its place, its position among weights or activations, its layout.
        arguments = list(enumerate(wiring.arguments))
        self._fixed = [(p, weights[i]) for p, i in arguments if i in weights]
        self._moving = [
            (p, activations[i], InputConverter(values[i])) for p, i in arguments if i in activations
        ]
        fakes = [node.meta["val"] for node in graph.outputs]
        self._exporters = [OutputConverter(fake) for fake in fakes]
        # IREE does not tell unsigned bytes from signed ones.
        self._bytes = [(i, fake.dtype) for i, fake in enumerate(fakes) if fake.dtype in _BYTES]

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind`."""
        self._device.check_process()
        fixed = {p: copy_if_misaligned(to_row_major(weights[at])) for p, at in self._fixed}
        moved = [at for p, at in self._fixed if fixed[p].data_ptr() != weights[at].data_ptr()]
        parameters = {name: to_row_major(weights[at]) for at, name in self._parameters}
        bound = self._bound(self._loaded.start(parameters, self._entry), fixed)
        return bound, sorted({*moved, *(at for at, _ in self._parameters)})

    def _bound(self, run: Callable[..., list[Tensor]], fixed: dict[int, Tensor]) -> Bound:
        device, moving, exporters = self._device, self._moving, self._exporters
        wrap, has_threads = device.wrap, device.has_threads
        views: list[Any] = [None] * (len(fixed) + len(moving))
        for place, tensor in fixed.items():
            views[place] = wrap(tensor)
        owned = [range_of(t) for t in fixed.values()]
        count, of_bytes = len(exporters), self._bytes
        plain = all(e.is_plain for e in exporters)

        def bound(activations: list[Tensor]) -> list[Tensor]:
            if has_threads:
                device.check_process()
            arguments, taken = views.copy(), owned.copy()
            for place, at, check in moving:
                tensor = copy_if_misaligned(check(activations[at]))
                arguments[place] = wrap(tensor)
                taken.append(range_of(tensor))
            results = separate(run(arguments, count), taken)
            for i, dtype in of_bytes:
                results[i] = results[i].view(dtype)
            return results if plain else [e(r) for e, r in zip(exporters, results, strict=True)]

        return bound

    def bind_for_benchmark(
        self, weights: Sequence[Tensor], activations: Sequence[Tensor]
    ) -> Callable[[], Any]:
        """IREE's own execution, for benchmarks: everything is imported beforehand.

        Args:
            weights: As for `bind`.
            activations: As for a bound function.
        """
        parameters = {name: to_row_major(weights[at]) for at, name in self._parameters}
        started = self._loaded.start(parameters, self._entry)
        tensors = {p: copy_if_misaligned(to_row_major(weights[at])) for p, at in self._fixed}
        tensors |= {p: copy_if_misaligned(check(activations[at])) for p, at, check in self._moving}
        views = [self._device.wrap(tensors[p]) for p in sorted(tensors)]
        return lambda: started(views, len(self._exporters))

    def dump(self) -> dict[str, bytes]:
        """See `Executable.dump`."""
        wiring = [self._wiring.arguments, self._wiring.parameters, self.serves_range]
        return {"wiring": json.dumps(wiring).encode(), "program": self._loaded.program}


def range_of(tensor: Tensor) -> tuple[int, int]:
    """Returns where a tensor's memory begins and ends."""
    start = tensor.data_ptr()
    return start, start + tensor.nbytes


def separate(results: list[Tensor], taken: list[tuple[int, int]]) -> list[Tensor]:
    """Copies results that IREE left in the memory of an argument or of another result."""
    for i, result in enumerate(results):
        start, end = range_of(result)
        if start == end:
            continue
        if any(start < stop and begin < end for begin, stop in taken):
            results[i] = result.clone()
        else:
            taken.append((start, end))
    return results


class RangedIreeExecutable(IreeExecutable):
    """A compiled graph whose program has dynamic dimensions (see `IreeExecutable`).

    After the graph's inputs the program has those of the sizes among arguments (see
    `graph.sizes.with_sizes_as_inputs`), as integers.

    Raises:
        CompileError: Sizes do not follow from the shapes of inputs.
    """

    serves_range = True

    def __init__(
        self, graph: Graph, program: bytes, wiring: IreeInputMap, device: Device, entry: str = ENTRY
    ):
        super().__init__(graph, program, wiring, device, entry)
        count = len(graph.inputs)
        arguments = [(at, i - count) for at, i in enumerate(wiring.arguments) if i >= count]
        further = with_sizes_as_inputs(graph)[1]
        self._scalars = [at for at, _ in arguments]
        self._layout = RangedLayout(graph, [further[i] for _, i in arguments])

    def _bound(self, run: Callable[..., list[Tensor]], fixed: dict[int, Tensor]) -> Bound:
        device, layout, scalars = self._device, self._layout, self._scalars
        moving = [(place, at, layout.checks[at]) for place, at, _ in self._moving]
        wrap, count, of_bytes = device.wrap, len(layout.outputs), self._bytes
        views: list[Any] = [None] * (len(fixed) + len(moving) + len(scalars))
        for place, tensor in fixed.items():
            views[place] = wrap(tensor)
        owned = [range_of(t) for t in fixed.values()]

        def bound(activations: list[Tensor]) -> list[Tensor]:
            device.check_process()
            arguments, taken, numbers = views.copy(), owned.copy(), layout.numbers(activations)
            for place, at, check in moving:
                tensor = copy_if_misaligned(check(activations[at]))
                arguments[place] = wrap(tensor)
                taken.append(range_of(tensor))
            for place, number in zip(scalars, numbers, strict=False):
                arguments[place] = number
            results = separate(run(arguments, count), taken)
            for i, dtype in of_bytes:
                results[i] = results[i].view(dtype)
            layout.require_shapes(results, numbers, "IREE")
            return layout.export_results(results, numbers)

        return bound


def load(parts: Mapping[str, bytes], graph: Graph, device: Device) -> IreeExecutable:
    """Recreates an executable from `IreeExecutable.dump`.

    Raises:
        CompileError: The parts are incomplete, or IREE refuses them.
    """
    try:
        arguments, parameters, ranged = json.loads(parts["wiring"])
        pairs = tuple((int(i), str(name)) for i, name in parameters)
        wiring = IreeInputMap(tuple(arguments), pairs)
        return executable_class(ranged)(graph, parts["program"], wiring, device)
    except Exception as error:
        raise CompileError(f"the cached IREE program cannot be used: {error}") from error


def executable_class(ranged: bool) -> type[IreeExecutable]:
    """Returns the kind of executables: for a range, or for the sizes of one call."""
    return RangedIreeExecutable if ranged else IreeExecutable
