"""Prepares weights with torch: a prologue as a list of instructions that needs no compilation.

A prologue runs once per binding, so compiling it costs more than it saves: for ResNet-50 a second,
and the memory of all intermediate results at once. What torch has no instruction for here is
compiled by XLA after all.
"""

import json
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jax.extend import core
from torch import Tensor

from dynamo_backends._torch_private import disable_current_modes, from_dlpack
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.runtime.weight_binding import value_bits
from dynamo_backends.xla import _jaxlib

_COMPUTED = frozenset({"float32", "float64"})  # XLA may round others less often than torch
_MOVED = _COMPUTED | {"bfloat16", "float16", "int8", "uint8", "int32", "int64", "bool"}
_LARGEST_CONSTANT = 4096  # elements


def _contract(
    x: Tensor, y: Tensor, *, contracted: Sequence[Sequence[int]], batch: Sequence[Sequence[int]]
) -> Tensor:
    dtype = x.dtype
    if torch.get_float32_matmul_precision() != "highest":  # torch might use bfloat16
        x, y = x.double(), y.double()
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    names = [["" for _ in range(t.ndim)] for t in (x, y)]
    for dims in (contracted, batch):
        for i, j in zip(*dims, strict=True):
            names[0][i] = names[1][j] = next(letters)
    shared = [names[0][i] for i in batch[0]]
    free: list[str] = []
    for each in names:
        for i, name in enumerate(each):
            if not name:
                each[i] = next(letters)
                free.append(each[i])
    left, right = map("".join, names)
    return torch.einsum(f"{left},{right}->{''.join(shared + free)}", x, y).to(dtype)


def _broadcast(x: Tensor, *, shape: Sequence[int], dims: Sequence[int]) -> Tensor:
    inner = [1] * len(shape)
    for size, dim in zip(x.shape, dims, strict=True):
        inner[dim] = size
    return x.reshape(inner).expand(list(shape))


def _slice(x: Tensor, *, bounds: Sequence[tuple[int, int, int]]) -> Tensor:
    return x[tuple(slice(*b) for b in bounds)]


_ARITHMETIC: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
    "rsqrt": torch.rsqrt,
    "sqrt": torch.sqrt,
    "exp": torch.exp,
    "dot_general": _contract,
}
_MOVES: dict[str, Callable[..., Tensor]] = {
    "reshape": lambda x, shape: x.reshape(shape),
    "squeeze": lambda x, shape: x.reshape(shape),
    "expand_dims": lambda x, shape: x.reshape(shape),
    "transpose": lambda x, order: x.permute(order),
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "unstack": torch.select,  # one of its results
    "concatenate": lambda *parts, dim: torch.cat(parts, dim),
    "stack": lambda *parts, dim: torch.stack(parts, dim),
}
_RUN = _ARITHMETIC | _MOVES


def _settings(eqn: Any) -> dict[str, Any]:
    """An equation's parameters as the functions above take them; they can be written as JSON."""
    name, params = eqn.primitive.name, eqn.params
    shape = list(eqn.outvars[0].aval.shape)
    if name == "dot_general":
        contracted, batch = params["dimension_numbers"]
        return {"contracted": _lists(contracted), "batch": _lists(batch)}
    if name in ("reshape", "squeeze", "expand_dims"):
        return {"shape": shape}
    if name == "transpose":
        return {"order": list(params["permutation"])}
    if name == "broadcast_in_dim":
        return {"shape": shape, "dims": list(params["broadcast_dimensions"])}
    if name == "slice":
        steps = params["strides"] or [1] * len(shape)
        bounds = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
        return {"bounds": _lists(bounds)}
    if name == "concatenate":
        return {"dim": params["dimension"]}
    if name == "stack":
        return {"dim": params["axis"]}
    return {}


def _results(eqn: Any) -> Iterator[tuple[core.Var, dict[str, Any]]]:
    """Returns what an equation computes, each with the settings of the call that gives it."""
    if eqn.primitive.name != "unstack":
        yield eqn.outvars[0], _settings(eqn)
        return
    for index, var in enumerate(eqn.outvars):  # jax 0.12 iterates over an array so, 0.11 by slices
        yield var, {"dim": eqn.params["axis"], "index": index}


def _lists(values: Any) -> list[list[int]]:
    return [[int(v) for v in value] for value in values]


@dataclass(frozen=True)
class Instruction:
    """One call of a prologue that torch runs.

    Attributes:
        name: Name of the function.
        reads: Registers of its operands.
        settings: Its other arguments.
        dead: Registers that nobody reads after it.
    """

    name: str
    reads: tuple[int, ...]
    settings: Mapping[str, Any]
    dead: tuple[int, ...] = ()


@dataclass(frozen=True)
class TorchPrologue:
    """Prepares weights by running a list of torch instructions, without compilation.

    Registers hold the weights first, then the constants, then one result per instruction.

    Attributes:
        constants: Dtype, shape and elements of each.
        instructions: In order.
        outputs: Registers of the prepared weights.
    """

    constants: tuple[tuple[str, Sequence[int], Sequence[Any]], ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[int, ...]

    def __call__(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Prepared weights, each contiguous."""
        device = weights[0].device if weights else torch.device("cpu")
        wanted = frozenset(self.outputs)
        with disable_current_modes(), torch.no_grad():
            registers: list[Any] = [w.detach() for w in weights]
            for dtype, shape, values in self.constants:
                constant = torch.tensor(values, dtype=getattr(torch, dtype), device=device)
                registers.append(constant.reshape(list(shape)))
            for each in self.instructions:
                operands = [registers[i] for i in each.reads]
                result = _RUN[each.name](*operands, **each.settings)
                # Now: a view would keep all that it is a view of.
                registers.append(result.contiguous() if len(registers) in wanted else result)
                del operands, result
                for i in each.dead:
                    registers[i] = None
            return [registers[i].contiguous() for i in self.outputs]

    def dump(self) -> bytes:
        """As JSON, for `load`."""
        instructions = [(x.name, x.reads, dict(x.settings), x.dead) for x in self.instructions]
        return json.dumps([self.constants, instructions, self.outputs]).encode()

    @classmethod
    def load(cls, text: bytes) -> "TorchPrologue":
        """Recreates what was dumped.

        Raises:
            ValueError: It is not what `dump` writes.
        """
        constants, instructions, outputs = json.loads(text)
        made = [
            Instruction(name, tuple(reads), settings, tuple(dead))
            for name, reads, settings, dead in instructions
        ]
        if unknown := {x.name for x in made} - _RUN.keys():
            raise ValueError(f"unknown instructions: {', '.join(sorted(unknown))}")
        return cls(tuple(map(tuple, constants)), tuple(made), tuple(outputs))


def jaxpr_to_torch_prologue(prologue: core.ClosedJaxpr) -> TorchPrologue | None:
    """Converts a prologue's jaxpr to torch instructions; None if an op has none."""
    jaxpr = prologue.jaxpr
    values = dict(zip(jaxpr.constvars, prologue.consts, strict=True))
    constants: dict[Any, tuple[str, Sequence[int], Sequence[Any]]] = {}
    wanted = {v for e in jaxpr.eqns for v in e.invars if isinstance(v, core.Var)} | {*jaxpr.outvars}
    calls: list[tuple[core.Var, str, list[Any], dict[str, Any]]] = []
    for eqn in jaxpr.eqns:
        reads = [
            v if isinstance(v, core.Var) and v not in values else _constant(v, values, constants)
            for v in eqn.invars
        ]
        if None in reads or not _is_known(eqn):
            return None
        name = eqn.primitive.name
        calls += [(var, name, reads, given) for var, given in _results(eqn) if var in wanted]
    order = [*jaxpr.invars, *constants, *(var for var, *_ in calls)]
    register = {key: i for i, key in enumerate(order)}
    if any(v not in register for v in jaxpr.outvars):
        return None
    outputs = tuple(register[v] for v in jaxpr.outvars)
    places_read = [tuple(map(register.__getitem__, reads)) for *_, reads, _ in calls]
    last = {i: k for k, places in enumerate(places_read) for i in places}
    instructions = []
    for k, (places, (_, name, _, settings)) in enumerate(zip(places_read, calls, strict=True)):
        dead = tuple(sorted({i for i in places if last[i] == k and i not in outputs}))
        instructions.append(Instruction(name, places, settings, dead))
    found = TorchPrologue(tuple(constants.values()), tuple(instructions), outputs)
    return found if _keeps_types(found, jaxpr) else None


def _is_known(eqn: Any) -> bool:
    dtypes = {str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)}
    allowed = _MOVED if eqn.primitive.name in _MOVES else _COMPUTED
    return eqn.primitive.name in _RUN and len(dtypes) == 1 and dtypes <= allowed


def _constant(
    value: Any,
    values: Mapping[Any, Any],
    constants: dict[Any, tuple[str, Sequence[int], Sequence[Any]]],
) -> Any:
    """The key of a literal or constant variable among `constants`; None if it cannot be one."""
    array = np.asarray(values[value] if isinstance(value, core.Var) else value.val)
    array = array.astype(value.aval.dtype)
    if array.size > _LARGEST_CONSTANT or str(array.dtype) not in _COMPUTED:
        return None
    key = (str(array.dtype), array.shape, array.tobytes())
    constants[key] = (str(array.dtype), array.shape, array.ravel().tolist())
    return key


def _keeps_types(preparation: TorchPrologue, jaxpr: Any) -> bool:
    """Returns whether torch gives results of the shapes and dtypes that the program expects."""

    def described(values: Sequence[Any]) -> list[tuple[tuple[int, ...], str]]:
        return [(tuple(v.shape), str(v.dtype).removeprefix("torch.")) for v in values]

    avals = [v.aval for v in jaxpr.invars]
    with disable_current_modes():
        weights = [
            torch.empty(a.shape, dtype=getattr(torch, str(a.dtype)), device="meta") for a in avals
        ]
    return described(preparation(weights)) == described([v.aval for v in jaxpr.outvars])


LEAST = 1 << 12
"""Bytes; smaller ones are not looked for."""

_SAMPLE = 16  # elements

Import = Callable[[Tensor], Any]
"""Makes a buffer that shares a tensor's memory, or has a copy of it."""


class PreparedWeightCache:
    """Shares the buffers of equal prepared weights between programs of this process."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()
        self._lock = fork_safe_lock()

    def buffers(
        self,
        prepared: Sequence[Tensor],
        weights: Collection[Tensor],
        place: Hashable,
        take_in: Import,
    ) -> list[Any]:
        """Returns a buffer for each prepared weight: that of an equal one, if there is one.

        Args:
            prepared: Contiguous tensors on the CPU.
            weights: What they were made of. A prepared weight that shares memory with one of them
                has a buffer of its own, since the caller writes there.
            place: The device that buffers are on.
            take_in: Makes a new buffer.
        """
        callers = {w.untyped_storage().data_ptr() for w in weights}
        return [
            take_in(tensor)
            if tensor.nbytes < LEAST or tensor.untyped_storage().data_ptr() in callers
            else self._one(tensor, place, take_in)
            for tensor in prepared
        ]

    def _one(self, tensor: Tensor, place: Hashable, take_in: Import) -> Any:
        bits = value_bits(tensor).view(-1)
        sample = bits[:: len(bits) // _SAMPLE].tolist()
        key = (place, tensor.dtype, tensor.shape, *sample)
        with self._lock:
            known = self._known.get(key)
            if known is not None and torch.equal(_bits(known), bits):
                return known
            made = self._known[key] = take_in(tensor)
            return made


def _bits(buffer: Any) -> Tensor:
    return value_bits(from_dlpack(_jaxlib.export_dlpack(buffer))).view(-1)


equal_weights = PreparedWeightCache()
"""Those of this process."""
