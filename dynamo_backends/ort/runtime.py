"""Runs ONNX Runtime sessions on torch's memory."""

import ctypes
import functools
import json
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnxruntime
import torch
from onnxruntime.capi import _pybind_state as C
from torch import Tensor

from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.cudagraphs.slots import OutputCopies, StaticInputs
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import InputConverter, OutputConverter, to_row_major
from dynamo_backends.interface.executable import Bound, Executable
from dynamo_backends.interface.forks import check_not_forked
from dynamo_backends.onnx.dtypes import DTYPES
from dynamo_backends.ort import cuda
from dynamo_backends.ort.session import (
    SessionSettings,
    make_session,
    ort_device,
    run_options,
    turn_weights_into_inputs,
)
from dynamo_backends.runtime.staging import allocate_staging_tensors

_scratch = ctypes.create_string_buffer(64)
_nowhere = ctypes.addressof(_scratch)  # of empty tensors: ONNX Runtime takes no null pointers


@dataclass(frozen=True)
class ModelNames:
    """The ONNX model's names of the graph's inputs and outputs.

    Attributes:
        inputs: One per graph input; None for inputs that the model does not have.
        outputs: One per graph output.
    """

    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]


class OrtExecutable(Executable):
    """A compiled graph: its ONNX model, and a session per set of bound weights.

    Weights are prepared by making a session of them. Those that keep changing are inputs of one
    session that prepares nothing.

    Args:
        graph: The graph that was compiled, for the layouts of its inputs and outputs.
        model: The ONNX model, without the data of weights.
        wiring: Which names the graph's inputs and outputs have in it.
        settings: How its sessions are made.
    """

    def __init__(self, graph: Graph, model: bytes, wiring: ModelNames, settings: SessionSettings):
        self.graph = graph
        self.model = model
        self.wiring = wiring
        self.settings = settings
        self.last_weights: list[weakref.ref[Tensor]] | None = None
        self._pid = os.getpid()
        values = [p.meta["val"] for p in graph.placeholders]
        self.weight_places = [i for i in graph.weights if wiring.inputs[i] is not None]
        self._inputs = [
            _Input(str(wiring.inputs[i]), at, values[i])
            for at, i in enumerate(graph.activations)
            if wiring.inputs[i] is not None
        ]
        fakes = [node.meta["val"] for node in graph.outputs]
        self._outputs = [_Output(n, v) for n, v in zip(wiring.outputs, fakes, strict=True)]
        # Errors of a graph without weights show when it is compiled, not when it is first called.
        self._fixed = None if self.weight_places else self._session(model, {})

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind`."""
        check_not_forked(self._pid, "ONNX Runtime")
        if self._fixed is not None:
            return self._run(self._fixed), ()
        self.last_weights = [weakref.ref(w) for w in weights]
        session = self._session(self.model, self.model_weights(weights))
        return self._run(session), range(len(weights))

    def bind_live(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind_live`."""
        check_not_forked(self._pid, "ONNX Runtime")
        self.last_weights = [weakref.ref(w) for w in weights]
        given = self.model_weights(weights)
        names = [str(self.wiring.inputs[i]) for i in self.graph.weights]
        copied = [at for at, (name, weight) in enumerate(zip(names, weights, strict=True))
                  if name in given and given[name].data_ptr() != weight.data_ptr()]  # fmt: skip
        return self._run(self._live, tuple(given.items())), copied

    @functools.cached_property
    def _live(self) -> Any:
        """The session that takes weights as inputs and prepares nothing, made once."""
        return self._fixed or self._session(turn_weights_into_inputs(self.model), {})

    def _session(self, model: bytes, weights: Mapping[str, Tensor]) -> Any:
        return make_session(model, weights, self.settings, self.serves_range)

    def model_weights(self, weights: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns the weights as row-major tensors, by their names in the model.

        Args:
            weights: As for `bind`.
        """
        by_place = dict(zip(self.graph.weights, weights, strict=True))
        return {str(self.wiring.inputs[i]): to_row_major(by_place[i]) for i in self.weight_places}

    def _run(self, session: Any, live: Sequence[tuple[str, Tensor]] = ()) -> Bound:
        device = ort_device(self.settings.device)
        outputs = self._outputs
        bindings: list[_Binding] = []  # those that no thread is using
        options = run_options(self.settings)
        where = output_device(self.settings)
        pid = self._pid
        launch = launcher(session, options, self.settings)
        all_plain = all(y.export.is_plain for y in outputs)

        def run(values: list[Tensor]) -> list[Tensor]:
            check_not_forked(pid, "ONNX Runtime")
            try:
                binding = bindings.pop()
            except IndexError:
                binding = _Binding(
                    new_binding(session, device, live), device, self._inputs, outputs, where is None
                )
            native = binding.native
            for x, memory in binding.small_inputs:
                memory.copy_(x.check.to_program_order(values[x.place]))
            # The list keeps copies of unusual inputs alive while the session runs.
            given = [(x, x.check(values[x.place])) for x in binding.large_inputs]
            for x, tensor in given:
                native.bind_input(x.name, device, x.dtype, x.shape, x.address(tensor))
            results = binding.results.copy()
            for at, y in binding.large_outputs:
                results[at] = tensor = y.make(where)
                native.bind_output(y.name, device, y.dtype, y.shape, y.address(tensor))
            launch(native)
            for at in binding.small_outputs:
                results[at] = results[at].clone()
            bindings.append(binding)
            if all_plain:
                return results
            return [y.export(t) for y, t in zip(outputs, results, strict=True)]

        if self.settings.graphs:
            return self._run_static(new_binding(session, device, live), launch)
        return run

    def _run_static(self, binding: Any, launch: Callable[[Any], None]) -> Bound:
        """Returns a run function on fixed memory, as CUDA graphs need; copies in and out."""
        device, lock = ort_device(self.settings.device), fork_safe_lock()
        where = torch.device(*self.settings.device)
        static: list[tuple[StaticInputs, OutputCopies]] = []
        inputs, outputs = self._inputs, self._outputs

        def bind_static(given: Sequence[Tensor]) -> tuple[StaticInputs, OutputCopies]:
            slots = StaticInputs(given)
            for x, tensor in zip(inputs, slots.tensors, strict=True):
                binding.bind_input(x.name, device, x.dtype, x.shape, x.address(tensor))
            made = [y.make(where) for y in outputs]
            for y, tensor in zip(outputs, made, strict=True):
                binding.bind_output(y.name, device, y.dtype, y.shape, y.address(tensor))
            return slots, OutputCopies(made)

        def run(values: list[Tensor]) -> list[Tensor]:
            check_not_forked(self._pid, "ONNX Runtime")
            given = [x.check(values[x.place]) for x in inputs]
            with lock:
                if not static:
                    static.append(bind_static(given))
                slots, results = static[0]
                slots.fill(given)
                launch(binding)
                copies = results.copy()
            return [y.export(t) for y, t in zip(outputs, copies, strict=True)]  # type: ignore[arg-type]

        return run

    def bind_for_benchmark(
        self, weights: Sequence[Tensor], activations: Sequence[Tensor]
    ) -> Callable[[], Any]:
        """Binds all inputs and outputs once; returns ONNX Runtime's bare run, for benchmarks.

        Args:
            weights: As for `bind`.
            activations: As for a bound function.
        """
        session = self._fixed or self._session(self.model, self.model_weights(weights))
        binding = C.SessionIOBinding(session)
        device = ort_device(self.settings.device)
        given = [x.check(activations[x.place]) for x in self._inputs]
        for x, tensor in zip(self._inputs, given, strict=True):
            binding.bind_input(x.name, device, x.dtype, x.shape, x.address(tensor))
        where = output_device(self.settings)
        results = [y.make(where) for y in self._outputs]
        for y, tensor in zip(self._outputs, results, strict=True):
            binding.bind_output(y.name, device, y.dtype, y.shape, y.address(tensor))
        launch = launcher(session, run_options(self.settings), self.settings)

        def execute(_: object = (given, list(activations))) -> list[Tensor]:
            launch(binding)  # reads what the default keeps alive
            return results

        return execute

    def dump(self) -> dict[str, bytes]:
        """See `Executable.dump`."""
        names = {
            "inputs": self.wiring.inputs, "outputs": self.wiring.outputs,
            "ranged": self.serves_range,
        }  # fmt: skip
        return {"wiring": json.dumps(names).encode(), "model": self.model}


def new_binding(session: Any, device: Any, live: Sequence[tuple[str, Tensor]]) -> Any:
    """Creates a session's I/O binding with only the live weights bound.

    Args:
        session: ONNX Runtime's.
        device: ONNX Runtime's device.
        live: Names in the model and row-major tensors of those weights.
    """
    native = C.SessionIOBinding(session)
    for name, tensor in live:
        bind_tensor(native.bind_input, name, device, tensor)
    return native


def output_device(settings: SessionSettings) -> torch.device | None:
    """Returns the torch device of outputs; None for the CPU."""
    return torch.device(*settings.device) if settings.device[0] != "cpu" else None


def launcher(
    session: Any, options: onnxruntime.RunOptions, settings: SessionSettings
) -> Callable[[Any], None]:
    """Returns a function that runs a session on a binding, ordered with torch's stream."""
    if settings.device[0] == "cpu":
        return lambda binding: session.run_with_iobinding(binding, options)
    index = settings.device[1]

    def launch(binding: Any) -> None:
        with cuda.ordered_with_torch(index):
            session.run_with_iobinding(binding, options)

    return launch


class _Binding:
    """What one call at a time uses: a session's binding, and memory for what is small.

    Args:
        native: ONNX Runtime's binding.
        device: ONNX Runtime's device.
        inputs: Inputs of the session.
        outputs: Outputs of the session.
        staged: Whether what is small is copied; else it is bound as what is large.

    Attributes:
        small_inputs: Those that are copied, and where to.
        large_inputs: Those that are bound at each call.
        small_outputs: Places of those that are copied from `results`.
        large_outputs: Those that get new memory at each call, and their places.
        results: Memory of small outputs by their places.
    """

    def __init__(
        self,
        native: Any,
        device: Any,
        inputs: Sequence["_Input"],
        outputs: Sequence["_Output"],
        staged: bool,
    ):
        self.native = native
        self.small_inputs: list[tuple[_Input, Tensor]] = []
        self.large_inputs = list(inputs)
        made: list[tuple[tuple[int, _Output], Tensor]] = []
        self.large_outputs = list(enumerate(outputs))
        if staged:
            self.small_inputs, self.large_inputs = allocate_staging_tensors(
                inputs, lambda x: (x.shape, x.check.dtype)
            )
            made, self.large_outputs = allocate_staging_tensors(
                enumerate(outputs), lambda y: (y[1].shape, y[1].torch_dtype)
            )
        self.small_outputs = [at for (at, _), _ in made]
        self.results: list[Any] = [None] * len(outputs)
        for x, memory in self.small_inputs:
            native.bind_input(x.name, device, x.dtype, x.shape, x.address(memory))
        for (at, y), memory in made:
            self.results[at] = memory
            native.bind_output(y.name, device, y.dtype, y.shape, y.address(memory))


class _Input:
    """An activation that the model has."""

    def __init__(self, name: str, place: int, value: Tensor):
        self.name = name
        self.place = place
        self.dtype = int(DTYPES[value.dtype])
        self.check = InputConverter(value)
        self.shape = self.check.dense_shape
        self.address = _address if value.numel() else _no_address


class _Output:
    """An output of the model."""

    def __init__(self, name: str, value: Tensor):
        self.name = name
        self.dtype = int(DTYPES[value.dtype])
        self.export = OutputConverter(value)
        self.shape = self.export.storage.dense_shape(value.shape)
        self.address = _address if value.numel() else _no_address
        self.torch_dtype = value.dtype

    def make(self, device: torch.device | None) -> Tensor:
        """Allocates a result's memory."""
        return torch.empty(self.shape, dtype=self.torch_dtype, device=device)


_address = Tensor.data_ptr


def _no_address(_: Tensor) -> int:
    return _nowhere


def bind_tensor(bind: Callable[..., Any], name: str, device: Any, tensor: Tensor) -> None:
    """Binds a row-major tensor's memory to a model name; it must outlive the runs.

    Args:
        bind: The method of ONNX Runtime's binding, for inputs or for outputs.
        name: In the model.
        device: ONNX Runtime's device.
        tensor: Is to outlive the call.
    """
    address = (_address if tensor.numel() else _no_address)(tensor)
    bind(name, device, int(DTYPES[tensor.dtype]), tuple(tensor.shape), address)
