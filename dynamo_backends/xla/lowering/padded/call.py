"""One call on padded arrays, as the rules see it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from torch import Tensor, fx

from dynamo_backends.graph.symbolic_sizes import SIZES, SizeWithExpression
from dynamo_backends.interface.errors import NotPaddedError
from dynamo_backends.xla.lowering.padded.extents import (
    Extents,
    broadcast,
    extents_of,
    is_padded,
)
from dynamo_backends.xla.lowering.padded.validity import Validity

Placed = tuple[Any, Any]
"""A result, or a tuple of them, and its extents, or a tuple of such."""

Neutral = Any
"""What stands at positions that do not count."""


@dataclass(frozen=True)
class Operand:
    """A tensor argument, padded or not.

    Attributes:
        extents: Which of its positions are valid.
        read: Its array in torch's order of dimensions.
        validity: Validity of the graph.
    """

    extents: Extents
    read: Callable[[], jax.Array]
    validity: Validity

    @property
    def array(self) -> jax.Array:
        """The array, with whatever its padding holds."""
        return self.read()

    @property
    def ndim(self) -> int:
        """Returns the number of dimensions."""
        return len(self.extents)

    def is_padded(self, dims: Sequence[int]) -> bool:
        """Returns whether any of these dimensions is padded."""
        return any(is_padded(self.extents[d]) for d in dims)

    def masked(self, dims: Sequence[int] | None = None, neutral: Neutral = 0) -> jax.Array | None:
        """Returns the array with `neutral` in the padding along some dimensions.

        Args:
            dims: None: all.
            neutral: A number, or a function from a dtype to one.

        Returns:
            None: nothing is padded there, so that the argument can stay as it is.
        """
        dims = range(self.ndim) if dims is None else dims
        valid = self.validity.of(self.extents, dims)
        if valid is None:
            return None
        array = self.array
        value = neutral(array.dtype) if callable(neutral) else neutral
        return jnp.where(valid, array, jnp.asarray(value, array.dtype))

    def whole(self, dims: Sequence[int]) -> jax.Array:
        """Returns the array with zeros in the padding along some dimensions, if there is any."""
        masked = self.masked(dims)
        return self.array if masked is None else masked

    def astype(self, dtype: Any) -> "Operand":
        """Returns the operand in another dtype."""
        return Operand(self.extents, lambda: self.array.astype(dtype), self.validity)

    def aligned(self, extents: Extents) -> "Operand":
        """Returns the operand with its valid positions where those of other extents are.

        Args:
            extents: With as many valid positions, of the last dimensions; size 1 stays as it is.
        """
        own = self.extents
        wanted = extents[len(extents) - len(own) :]
        moved = [d for d, e in enumerate(wanted) if own[d] and e and own[d] != e]
        if not moved:
            return self
        array = self.array
        for d in moved:
            places = self.validity.places(wanted[d], own[d])
            array = jnp.take(array, places, axis=d, mode="clip")
        known = tuple(e if d in moved else own[d] for d, e in enumerate(wanted))
        return Operand(known, lambda: array, self.validity)

    def without(self, dims: Sequence[int], keepdim: bool = False) -> Extents:
        """Returns the extents without some dimensions, or with size 1 there."""
        if keepdim:
            return tuple(() if d in dims else e for d, e in enumerate(self.extents))
        return tuple(e for d, e in enumerate(self.extents) if d not in dims)


class PaddedCall:
    """Gives a padding rule one call: operands with extents, masks, and its lowering.

    Args:
        node: The call.
        operand: Its tensor arguments.
        lower: Runs its lowering, with arrays in the place of some arguments, or of some tensors.
        validity: Validity of the graph.
    """

    def __init__(
        self,
        node: fx.Node,
        operand: Callable[[fx.Node], Operand],
        lower: Callable[[Mapping[str, Any], Mapping[fx.Node, Any]], Any],
        validity: Validity,
    ):
        self.node = node
        self.validity = validity
        self._operand = operand
        self._lower = lower
        self._schema = node.target._schema.arguments  # type: ignore[union-attr]
        names = [argument.name for argument in self._schema]
        self._given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)

    def value(self, name: str) -> Any:
        """Returns an argument that is no tensor, or the nodes of a list of them."""
        if name in self._given:
            return self._given[name]
        return next((a.default_value for a in self._schema if a.name == name), None)

    def values(self) -> Mapping[str, Any]:
        """Returns all arguments that are given."""
        return self._given

    def operand(self, value: Any) -> Operand:
        """Returns the operand of a node among the arguments."""
        return self._operand(value)

    def __getitem__(self, name: str) -> Operand:
        """Returns the operand of a tensor argument."""
        return self._operand(self._given[name])

    def get(self, name: str) -> Operand | None:
        """Returns a tensor argument that may be None."""
        value = self.value(name)
        return self._operand(value) if isinstance(value, fx.Node) else None

    def operands(self) -> list[Operand]:
        """Returns all tensor arguments."""
        return [self._operand(n) for n in self.node.all_input_nodes]

    def axes(self, name: str, dims: str | None = None) -> tuple[int, ...]:
        """Dimensions of a tensor that an argument names; all of them by None and an empty list.

        Args:
            name: Name of the tensor.
            dims: Dims of the argument; None: all dimensions.
        """
        ndim = self[name].ndim
        given = None if dims is None else self.value(dims)
        if ndim == 0 or given is None or (not isinstance(given, int) and not given):
            return tuple(range(ndim))
        return tuple(d % ndim for d in ((given,) if isinstance(given, int) else given))

    def dim(self, name: str, dim: str = "dim") -> int:
        """Returns a dimension of a tensor that an argument names."""
        return int(self.value(dim) or 0) % max(self[name].ndim, 1)

    def run(self, /, **arguments: Any) -> Any:
        """Returns what the lowering makes of the arguments.

        Args:
            arguments: Arrays in the place of some; None: that one stays as it is.
        """
        return self._lower({k: v for k, v in arguments.items() if v is not None}, {})

    def run_aligned(self, operands: Mapping[fx.Node, Operand]) -> Any:
        """Returns the lowering's result for operands whose positions were moved (see `aligned`)."""
        moved = {n: x.array for n, x in operands.items() if x.extents != self.operand(n).extents}
        return self._lower({}, moved)

    def sizes(self, index: int | None = None) -> tuple[int, ...]:
        """Returns the sizes of the (or one) result; its value says the bounds."""
        known = self.node.meta.get(SIZES)
        value = self.node.meta["val"]
        if known is not None and index is not None:
            known, value = known[index], value[index]
        if known is None or not isinstance(value, Tensor) or tuple(known) != tuple(value.shape):
            raise self.refuse("the sizes of its result are not known")
        return tuple(known)

    def fresh(self, index: int | None = None) -> Extents:
        """Returns the extents of a result whose dimensions are none that were merged."""
        return extents_of(self.sizes(index))

    def number(self, size: Any) -> Any:
        """Returns a size of this call as a scalar of the program; a plain number as it is."""
        return self.validity.number(size) if isinstance(size, SizeWithExpression) else size

    def need_whole(self, name: str, dims: Sequence[int] | None = None) -> None:
        """Refuses a tensor that is padded in some dimensions (None: in any)."""
        operand = self.get(name)
        if operand is not None and operand.is_padded(range(operand.ndim) if dims is None else dims):
            raise self.refuse(f"{name} has padding in a dimension where it is not supported")

    def agreed(self, *extents: Extents) -> Extents:
        """Extents that operands are to be aligned to, so that they can be broadcast."""
        result = broadcast(extents)
        if result is None:
            raise self.refuse("dimensions of its operands are padded differently")
        return result

    def need_agreeing(self, *extents: Extents) -> Extents:
        """Extents that are broadcast to each other as they are."""
        result = self.agreed(*extents)
        for own in extents:
            wanted = result[len(result) - len(own) :]
            if any(e and e != w for e, w in zip(own, wanted, strict=True)):
                raise self.refuse("its operands have different merged dimensions")
        return result

    def refuse(self, reason: str) -> NotPaddedError:
        """Returns the error to raise when this call cannot be padded."""
        return NotPaddedError(str(self.node.target), reason)


def elementwise(call: PaddedCall) -> Placed:
    """Applies an elementwise call to padded operands; padding may hold garbage."""
    nodes = call.node.all_input_nodes
    placed = call.agreed(*(call.operand(n).extents for n in nodes))
    result = call.run_aligned({n: call.operand(n).aligned(placed) for n in nodes})
    return result, (placed,) * len(result) if isinstance(result, tuple) else placed
