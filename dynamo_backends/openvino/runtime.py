"""Runs OpenVINO models on torch's memory."""

import contextlib
import functools
import json
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import InputConverter, OutputConverter, to_row_major
from dynamo_backends.interface.executable import Bound, Executable
from dynamo_backends.interface.forks import check_not_forked
from dynamo_backends.openvino.core_api import (
    CompileSettings,
    as_openvino_tensor,
    clone_with_constants,
    compile_model,
    export_compiled,
    find_passthrough_outputs,
    make_infer_request,
    serialize_model,
)
from dynamo_backends.openvino.lowering import LoweredOpenVino
from dynamo_backends.openvino.vendor import CompiledModel, Model
from dynamo_backends.runtime.staging import allocate_staging_tensors


class OpenVinoExecutable(Executable):
    """Runs a compiled OpenVINO model on torch's memory.

    Weights become constants of a copy of the model, which is compiled when they are bound. Those
    that keep changing stay inputs of one compiled model that prepares nothing.

    Args:
        graph: The graph that was compiled, for the layouts of its inputs and outputs.
        lowered: The model.
        settings: How it is compiled.
        compiled: The compiled model, if it is known already and has no weights.
    """

    def __init__(
        self,
        graph: Graph,
        lowered: LoweredOpenVino,
        settings: CompileSettings,
        compiled: CompiledModel | None = None,
    ):
        self._model: Model = lowered.model
        self._places = lowered.inputs
        self._settings = settings
        self._pid = os.getpid()
        # Positions among the weights, and places in the model, of those that the model has.
        self._weights = [
            (at, place)
            for at, i in enumerate(graph.weights)
            if (place := lowered.inputs[i]) is not None
        ]
        values = [p.meta["val"] for p in graph.placeholders]
        self._activations = [
            _Input(at, place, values[i])
            for at, i in enumerate(graph.activations)
            if (place := lowered.inputs[i]) is not None
        ]
        self._outputs = [_Output(node.meta["val"]) for node in graph.outputs]
        self._running: weakref.WeakSet[CompiledModel] = weakref.WeakSet()
        # Errors of a graph without weights show when it is compiled, not when it is first called.
        self._fixed = None
        if not self._weights:
            self._fixed = compiled or compile_model(self._model, settings)

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind`."""
        check_not_forked(self._pid, "OpenVINO")
        if self._fixed is not None:
            return self._run(self._fixed, ()), ()
        prepared = self._dense(weights)
        compiled = compile_model(clone_with_constants(self._model, prepared), self._settings)
        return self._run(compiled, tuple(prepared), prepared), [at for at, _ in self._weights]

    def bind_live(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind_live`."""
        check_not_forked(self._pid, "OpenVINO")
        given = self._dense(weights)
        copied = [a for a, place in self._weights
                  if given[place].data_ptr() != weights[a].data_ptr()]  # fmt: skip
        return self._run(self._live, (), given), copied

    def release_memory(self) -> None:
        """Frees the memory of intermediate results (see `Executable.release_memory`)."""
        for compiled in tuple(self._running):
            with contextlib.suppress(RuntimeError):  # a call is running, or the device cannot
                compiled.release_memory()

    @functools.cached_property
    def _live(self) -> CompiledModel:
        """Compiles the model with its weights as inputs, on first use."""
        return self._fixed or compile_model(self._model, self._settings)

    def _dense(self, weights: Sequence[Tensor]) -> dict[int, Tensor]:
        """Returns the weights that the model has, row-major, by input index."""
        dense = {place: to_row_major(weights[at]) for at, place in self._weights}
        return {place: t.to(computed_dtype(t.dtype)) for place, t in dense.items()}

    def renumber_inputs(self, removed: Collection[int]) -> dict[int, int]:
        """Maps the inputs left after some became constants to their new indices."""
        left = [place for place in self._places if place is not None and place not in removed]
        return {place: i for i, place in enumerate(sorted(left))}

    def _run(
        self,
        compiled: CompiledModel,
        constants: Sequence[int],
        weights: dict[int, Tensor] | None = None,
    ) -> Bound:
        """Returns a function that runs the compiled model on activations.

        Args:
            compiled: What runs.
            constants: Places of the inputs that became constants: the others have moved up.
            weights: By place. Those that are no constants are inputs of every request.
        """
        self._running.add(compiled)
        moved = self.renumber_inputs(constants)
        inputs = [(moved[x.place], x) for x in self._activations]
        outputs = self._outputs
        live = {moved[p]: t for p, t in (weights or {}).items() if p not in constants}
        copies = find_passthrough_outputs(compiled)
        requests: list[_Request] = []  # those that no thread is using
        pid = self._pid
        all_plain = all(y.is_plain for y in outputs)

        def run(values: list[Tensor]) -> list[Tensor]:
            check_not_forked(pid, "OpenVINO")
            try:
                request = requests.pop()
            except IndexError:
                request = _Request(compiled, inputs, outputs, live, copies)
            results = request.infer(values)
            requests.append(request)
            if all_plain:
                return results
            return [y.returned(result) for y, result in zip(outputs, results, strict=True)]

        run.keeps_alive = weights  # type: ignore[attr-defined] # constants share their memory
        return run

    def bind_for_benchmark(
        self, weights: Sequence[Tensor], activations: Sequence[Tensor]
    ) -> Callable[[], Any]:
        """Binds weights and inputs; returns a function that only runs OpenVINO.

        Args:
            weights: As for `bind`.
            activations: As for a bound function.
        """
        prepared = self._dense(weights)
        compiled = self._fixed
        if compiled is None:
            compiled = compile_model(clone_with_constants(self._model, prepared), self._settings)
        moved = self.renumber_inputs(list(prepared))
        request = make_infer_request(compiled)
        given = [x.row_major(activations[x.at]) for x in self._activations]
        for x, tensor in zip(self._activations, given, strict=True):
            place = moved[x.place]
            request.set_input_tensor(place, as_openvino_tensor(tensor, compiled.inputs[place]))
        scalars = self.size_inputs(activations)
        for place, tensor in scalars.items():
            request.set_input_tensor(moved[place], as_openvino_tensor(tensor))
        results = [y.make() for y in self._outputs]
        for place, tensor in enumerate(results):
            request.set_output_tensor(place, as_openvino_tensor(tensor, compiled.outputs[place]))
        kept = (prepared, given, results, scalars)

        def execute() -> list[Tensor]:
            request.infer({}, share_outputs=True, decode_strings=False)
            return list(kept[2])

        return execute

    def size_inputs(self, activations: Sequence[Tensor]) -> dict[int, Tensor]:
        """Returns the model inputs that carry symbolic sizes, by index; none here.

        Args:
            activations: As for a bound function.
        """
        return {}

    def dump(self) -> dict[str, bytes]:
        """See `Executable.dump`."""
        wiring = {"places": self._places, "ranged": self.serves_range}
        parts = {"inputs": json.dumps(wiring).encode()}
        if self._fixed is not None:
            return {**parts, "compiled": export_compiled(self._fixed)}
        text, constants = serialize_model(self._model)
        return {**parts, "model": text, "constants": constants}


class _Request:
    """Holds an inference request and buffers for small tensors; for one call at a time.

    Args:
        compiled: What runs.
        inputs: Activations, by their places.
        outputs: Outputs of the model.
        live: Weights that are inputs, by their places.
        copies: Places of outputs that are inputs, and of the latter (see
            `find_passthrough_outputs`).

    Attributes:
        small_inputs: Those that are copied, and where to.
        large_inputs: Those that the request is told of at each call, by their places.
        small_outputs: Places of those that are copied from `results`.
        large_outputs: Those that get new memory at each call, by their places.
        given: By their places, the inputs that are known already.
        results: Memory of small outputs by their places.
    """

    def __init__(
        self,
        compiled: CompiledModel,
        inputs: Sequence[tuple[int, "_Input"]],
        outputs: Sequence["_Output"],
        live: Mapping[int, Tensor],
        copies: Mapping[int, int],
    ):
        self.native = native = make_infer_request(compiled)
        self._inputs, self._outputs = compiled.inputs, compiled.outputs
        small, self.large_inputs = allocate_staging_tensors(
            inputs, lambda x: (x[1].check.dense_shape, x[1].dtype)
        )
        self.small_inputs = [(x, memory) for (_, x), memory in small]
        self.given = {**live, **{place: memory for (place, _), memory in small}}
        self._copies = [(place, at, outputs[place].shape) for place, at in copies.items()]
        written = [(place, y) for place, y in enumerate(outputs) if place not in copies]
        made, self.large_outputs = allocate_staging_tensors(
            written, lambda y: (y[1].shape, y[1].dtype)
        )
        self.small_outputs = [place for (place, _), _ in made]
        self.results: list[Any] = [None] * len(outputs)
        for (place, _), memory in made:
            self.results[place] = memory
            native.set_output_tensor(place, as_openvino_tensor(memory, self._outputs[place]))
        for place, tensor in self.given.items():
            native.set_input_tensor(place, as_openvino_tensor(tensor, self._inputs[place]))

    def infer(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The model's results, from activations."""
        native = self.native
        for x, memory in self.small_inputs:
            memory.copy_(x.check.to_program_order(values[x.at]))
        # These keep the memory alive while the request uses it.
        given = self.given.copy()
        for place, x in self.large_inputs:
            given[place] = tensor = x.row_major(values[x.at])
            native.set_input_tensor(place, as_openvino_tensor(tensor, self._inputs[place]))
        results = self.results.copy()
        for place, y in self.large_outputs:
            results[place] = tensor = y.make()
            native.set_output_tensor(place, as_openvino_tensor(tensor, self._outputs[place]))
        native.infer({}, share_outputs=True, decode_strings=False)
        for place in self.small_outputs:
            results[place] = results[place].clone()
        for place, source, shape in self._copies:
            results[place] = given[source].clone().view(shape)
        return results


class _Input:
    """Converts an activation to the layout and dtype of a model input.

    Args:
        at: Its position among the activations.
        place: Its place among the inputs of the model.
        value: The fake tensor that the model was compiled for.
    """

    def __init__(self, at: int, place: int, value: Tensor):
        self.at = at
        self.place = place
        self.check = InputConverter(value)
        self.dtype = computed_dtype(value.dtype)

    def row_major(self, tensor: Tensor) -> Tensor:
        """A tensor as the model takes it."""
        tensor = self.check(tensor)
        return tensor if tensor.dtype == self.dtype else tensor.to(self.dtype)


class _Output:
    """Allocates a model output, and converts it to the layout and dtype of torch."""

    def __init__(self, value: Tensor):
        self._export = OutputConverter(value)
        self._dtype = value.dtype
        self.shape = self._export.storage.dense_shape(value.shape)
        self.dtype = computed_dtype(value.dtype)
        self.is_plain = self._export.is_plain and self.dtype == value.dtype

    def make(self) -> Tensor:
        """Memory for one result."""
        return torch.empty(self.shape, dtype=self.dtype)

    def returned(self, result: Tensor) -> Tensor:
        """A result of the model as torch promises it."""
        return self._export(result.to(self._dtype))


def computed_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which OpenVINO computes: float32 for float64."""
    return torch.float32 if dtype == torch.float64 else dtype
