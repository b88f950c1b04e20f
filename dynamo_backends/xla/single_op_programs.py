"""Single operators on a device that shares no memory with torch, by the lowerings of graphs.

A program serves a kind of call: the operator, the shapes, strides and dtypes of its tensors, and
its other arguments. Floating-point numbers are inputs, so that a learning rate that changes
compiles nothing.
"""

import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private import FakeTensorMode, OpOverload, make_fx
from dynamo_backends.graph.counter_based_rng import SEEDED_DRAW
from dynamo_backends.graph.layouts import InputConverter, OutputConverter
from dynamo_backends.graph.normalize import lift_constants
from dynamo_backends.graph.random_draws import is_random
from dynamo_backends.runtime.cache import LRU
from dynamo_backends.runtime.device_tensor import DeviceTensor, handle_of
from dynamo_backends.runtime.device_values import fills_storage, storage_value
from dynamo_backends.xla import _jaxlib, device_arrays
from dynamo_backends.xla.compiler import from_storage, to_shape_dtype_struct, to_storage
from dynamo_backends.xla.dtypes import is_supported
from dynamo_backends.xla.eager_random import single_draw
from dynamo_backends.xla.lowering.context import LoweringOptions
from dynamo_backends.xla.lowering.interpreter import GraphLowering
from dynamo_backends.xla.runtime import PjrtDevice

aten = torch.ops.aten

log = logging.getLogger("dynamo_backends")

_KINDS = 4096  # of calls whose programs are kept
_NUMBERS = 1024  # that are kept on the device

# Results, or their shapes, depend on contents that the host has to see.
_HOST_ONLY = frozenset(
    (
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
    )
)


class EagerOpRunner:
    """Runs single ATen operators on a device as small cached XLA programs.

    Args:
        device: The device.
        lookup: The row of an overload in the table of lowerings, if there is one.
        table: How operators without a row are decomposed.
    """

    def __init__(
        self,
        device: PjrtDevice,
        lookup: Callable[[Any], Any],
        table: Mapping[Any, Callable[..., Any]],
    ):
        self._device = device
        self._lookup = lookup
        self._table = table
        self._programs: LRU[Any, _Program | None] = LRU(_KINDS)
        self._numbers: LRU[str, Any] = LRU(_NUMBERS)

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator.

        Args:
            func: The overload; it may write to its first argument.
            args: With handles in the place of tensors.
            kwargs: Likewise.

        Returns:
            Handles; NotImplemented: it cannot be run here.
        """
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._drawn(func, args, kwargs)
        pure = _pure(func)
        if pure is None or not _HOST_ONLY.isdisjoint(pure.tags):
            return NotImplemented
        return self._run(pure, func, args, kwargs)

    def _drawn(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator that draws."""
        found = single_draw(func, args, kwargs)
        if found is None:
            return NotImplemented
        made = self._run(SEEDED_DRAW, SEEDED_DRAW, found.given, {})
        if found.target is None:
            return made
        target, value, source = found.target, storage_value(found.target), storage_value(made)
        assert value is not None
        assert source is not None
        if fills_storage(target) and target.stride() == made.stride():
            value.set_device_array(target, source.array, str(func))
            return target
        return self._run(aten.copy.default, aten.copy_.default, (target, made), {})

    def _run(
        self, pure: OpOverload, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs an operator by a program.

        Args:
            pure: Returns what the operator does.
            func: The operator.
            args: See `__call__`.
            kwargs: Likewise.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        for numbers in (True, False):
            kinds = [_kind(leaf, numbers) for leaf in leaves]
            try:
                program = self._find((pure, pure is func, spec, *kinds), numbers, leaves)
            except TypeError:  # an argument that cannot be compared
                return NotImplemented
            if program is not None:
                return program(self, leaves)
        return NotImplemented

    def _find(self, key: Any, numbers: bool, leaves: Sequence[Any]) -> "_Program | None":
        """Returns the program for a kind of call; None: there can be none.

        Args:
            key: The kind.
            numbers: Whether floating-point numbers are inputs.
            leaves: Leaves of the arguments.
        """
        if key not in self._programs:
            made = None
            func, is_pure, spec, *_ = key
            table = {} if self._lookup(func) is not None else self._table
            try:
                call = _Call(func, leaves, spec, not is_pure, numbers, table)
                why_not = call.why_not(self._lookup)
                if why_not is None:
                    made = _Program(self._device, call, str(func))
            except Exception:  # eager says what is wrong with the call, if anything is
                log.debug("%s cannot run on %s", func, self._device.name, exc_info=True)
            self._programs.put(key, made)
        return self._programs.get(key)

    def number(self, value: float) -> Any:
        """Returns a number on the device."""
        name = repr(value)  # -0.0 is not 0.0
        found = self._numbers.get(name)
        if found is None:
            found = self._device.upload(torch.tensor(value, dtype=torch.float64))
            self._numbers.put(name, found)
        return found


class _Call:
    """A graph that computes what one operator does.

    Args:
        func: The operator, functional.
        leaves: Leaves of its arguments.
        spec: How they are put together.
        is_update: Its result is written over the first argument.
        numbers_are_inputs: Whether floating-point numbers are.
        table: What is decomposed; empty: the operator has a lowering.

    Attributes:
        graph: The graph.
        inputs: Which leaves are its inputs.
        constants: Further inputs.
        fakes: One per input: a fake tensor or a number.
        values: Its results, fake; of an update what is written to.
        is_single: Whether the operator returns one tensor, not several.
        is_update: See above.
    """

    def __init__(
        self,
        func: OpOverload,
        leaves: Sequence[Any],
        spec: Any,
        is_update: bool,
        numbers_are_inputs: bool,
        table: Mapping[Any, Callable[..., Any]],
    ):
        kinds = (Tensor, float) if numbers_are_inputs else (Tensor,)
        self.inputs = [i for i, x in enumerate(leaves) if isinstance(x, kinds)]
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.constants: list[Tensor] = []
        self.fakes: list[Any] = [
            mode.from_tensor(leaves[i]) if isinstance(leaves[i], Tensor) else leaves[i]
            for i in self.inputs
        ]

        def call(*given: Any) -> Any:
            complete = list(leaves)
            for i, value in zip(self.inputs, given, strict=True):
                complete[i] = value
            args, kwargs = pytree.tree_unflatten(complete, spec)
            return func(*args, **kwargs)

        with mode:
            result = call(*self.fakes)
        self.is_single = not isinstance(result, list | tuple)
        self.values = [result] if self.is_single else list(result)
        if table:
            module = make_fx(call, table)(*self.fakes)
            self.graph = module.graph
            self.constants += lift_constants(module).values()
            self.fakes += map(mode.from_tensor, self.constants)
            if self.is_single:
                output = self.graph.output_node()
                output.args = (list(output.args),)
        else:
            self.graph = self._alone(func, leaves, spec, result)
        self.is_update = is_update
        if is_update:
            if self.fakes[0].shape != result.shape:
                raise ValueError("an in-place operator would change the shape of a tensor")
            self.values = self.fakes[:1]

    def _alone(self, func: OpOverload, leaves: Sequence[Any], spec: Any, result: Any) -> fx.Graph:
        graph = fx.Graph()
        nodes = list(leaves)
        for i, fake in zip(self.inputs, self.fakes, strict=True):
            nodes[i] = graph.placeholder(f"x{i}")
            nodes[i].meta["val"] = fake
        args, kwargs = pytree.tree_unflatten(nodes, spec)
        node = graph.call_function(func, args, kwargs)
        node.meta["val"] = result
        results = [node]
        if not self.is_single:
            results = [graph.call_function(operator.getitem, (node, k)) for k in range(len(result))]
        graph.output(results)
        return graph

    def why_not(self, lookup: Callable[[Any], Any]) -> str | None:
        """Returns why it cannot be lowered; None if it can."""
        for value in (*self.fakes, *self.values):
            if isinstance(value, float):
                continue
            if not isinstance(value, Tensor) or value.layout is not torch.strided:
                return "it has arguments or results that are not strided tensors"
            if not is_supported(value.dtype) or value.device.type != "cpu":
                return f"XLA does not support {value.dtype}"
        for node in self.graph.nodes:
            if node.op == "call_function" and node.target is not operator.getitem:
                row = lookup(node.target)
                if row is None or is_random(node):
                    return f"{node.target} has no lowering"
                if row.when is not None and (reason := row.when(node)) is not None:
                    return str(reason)
        return None


class _Program:
    """The compiled program of one operator.

    Args:
        device: Where it runs.
        call: What it computes.
        name: Name of the operator, for errors.
    """

    def __init__(self, device: PjrtDevice, call: _Call, name: str):
        self._device = device
        self._inputs = call.inputs
        self._is_single = call.is_single
        self._importers = [InputConverter(x) if isinstance(x, Tensor) else None for x in call.fakes]
        self._exporters = [OutputConverter(x) for x in call.values]
        self._dtypes = [x.dtype for x in call.values]
        self._name = name
        self._is_update = call.is_update
        constants = [InputConverter(x) for x in call.constants]
        self._constants = device.take_in(constants, call.constants)
        self._run = self._compiled(call)

    def _compiled(self, call: _Call) -> Callable[[list[Any]], list[Any]]:
        device = self._device
        on_cpu = device.platform == "cpu"
        lowering = GraphLowering(
            call.graph, LoweringOptions(platform=device.platform, channels_last=on_cpu)
        )

        def program(*arrays: jax.Array) -> list[jax.Array]:
            given = [
                array if importer is None else from_storage(array, importer.storage)
                for array, importer in zip(arrays, self._importers, strict=True)
            ]
            results = lowering(given)
            return [to_storage(r, e.storage) for r, e in zip(results, self._exporters, strict=True)]

        with jax.enable_x64(True):
            avals = [
                jax.ShapeDtypeStruct((), jnp.float64, weak_type=True)
                if importer is None
                else to_shape_dtype_struct(fake, importer.storage)
                for fake, importer in zip(call.fakes, self._importers, strict=True)
            ]
            traced = jax.jit(program, keep_unused=True).trace(*avals)
            module = _jaxlib.bytecode(traced.lower(lowering_platforms=(device.platform,)))
            executable = _jaxlib.compile_program(device.client, device.handle, module)
        return _jaxlib.make_single_device_call(executable, device.handle)

    def __call__(self, owner: EagerOpRunner, leaves: Sequence[Any]) -> Any:
        """Runs it.

        Args:
            owner: Has numbers.
            leaves: The arguments.
        """
        device = self._device
        arrays = []
        for i, importer in zip(self._inputs, self._importers, strict=False):
            leaf = leaves[i]
            if importer is None:
                arrays.append(owner.number(leaf))
                continue
            is_kept = storage_value(leaf) is not None
            given = DeviceTensor(leaf, device.name) if is_kept else leaf
            arrays += device.take_in([importer], [given])
        results = device.execute(self._run, arrays + self._constants)
        if self._is_update:
            target = leaves[self._inputs[0]]
            device_arrays.write_to_device_tensor(
                device, target, self._exporters[0], results[0], self._name
            )
            return target
        made = device_arrays.wrap_device_outputs(
            device, self._exporters, results, self._dtypes, self._name
        )
        handles = list(map(handle_of, made))
        return handles[0] if self._is_single else tuple(handles)


def _pure(func: OpOverload) -> OpOverload | None:
    """Returns the operator that returns what this one does; None: there is none."""
    written = [a for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
    if not written:
        return func
    name = func._schema.name.partition("::")[2]
    first = func._schema.arguments[0]
    if written != [first] or not name.endswith("_") or func.namespace != "aten":
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    pure: OpOverload | None = getattr(packet, func._overloadname, None)
    return pure


def _kind(leaf: Any, numbers: bool) -> Any:
    """Returns what tells calls apart that need different programs.

    Args:
        leaf: An argument.
        numbers: Whether floating-point numbers are inputs.
    """
    if isinstance(leaf, Tensor):
        bits = leaf.is_conj(), leaf.is_neg()
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, bits
    if isinstance(leaf, float) and numbers:
        return float
    # -0.0 equals 0.0, but is another number.
    return type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf
