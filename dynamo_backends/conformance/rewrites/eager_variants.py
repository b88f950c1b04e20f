"""Other paths of eager: operands elsewhere in memory, torch's decompositions, other roundings.

Kernels of torch for CPUs have a loop over vectors and one over single elements, whose results may
differ: `F.gelu` of inf is NaN in contiguous tensors, and inf where elements are not next to each
other. Which of the loops runs depends on memory and sizes alone, and a compiled program has its own
of both.
"""

import functools
import math
import zlib
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dynamo_backends._torch_private import all_decompositions


class _Path(TorchDispatchMode):
    """Calls operators in another way than eager does."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See `TorchDispatchMode`."""
        if func.is_view or func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        return self.call(func, args, kwargs or {})

    @abstractmethod
    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of a call whose results are new tensors."""


class OperandLayoutMode(_Path):
    """Dispatch mode that calls operators on copies of operands with another layout.

    Args:
        move: Returns an equal tensor in other memory.
    """

    def __init__(self, move: Callable[[Tensor], Tensor]):
        super().__init__()
        self._move = move

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """See the base class."""
        moved_args, moved_kwargs = pytree.tree_map_only(Tensor, self._move, (args, kwargs))
        try:
            result = func(*moved_args, **moved_kwargs)
        except RuntimeError:  # aten::_unsafe_view, which is called with contiguous tensors
            result = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, Tensor.contiguous, result)


def spread_elements(x: Tensor) -> Tensor:
    """Copies a tensor so that no two elements are adjacent in memory."""
    return torch.stack((x, x), -1).select(-1, 0)


def transposed(x: Tensor) -> Tensor:
    """Returns a tensor whose first dimension is the innermost in memory."""
    order = list(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


class MatmulOrderMode(_Path):
    """Dispatch mode that pads matrix products or sums them in reverse order.

    Large products are computed by a library, which rounds a product and a sum once: -inf plus
    1e30 * 1e30 is -inf there, and NaN in small products. Which of the summands comes first decides
    whether a sum overflows.

    Args:
        times: As many times larger.
        backwards: The order in which products are summed.
    """

    def __init__(self, times: int = 1, backwards: bool = False):
        super().__init__()
        self._times = times
        self._backwards = backwards

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """See the base class."""
        if func not in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            return func(*args, **kwargs)
        x, y = args
        if self._backwards:
            x, y = x.flip(-1), y.flip(-2)
        large = func(torch.cat([x] * self._times, -2), torch.cat([y] * self._times, -1))
        return large[..., : x.shape[-2], : y.shape[-1]].contiguous()


LARGER = 32


class DecompositionMode(_Path):
    """Dispatch mode that runs torch's decompositions instead of operators."""

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """See the base class."""
        decomposition = _decompositions().get(func)
        if decomposition is not None:
            with self:
                result = decomposition(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)


_decompositions = functools.cache(all_decompositions)


class SumByDimensionMode(DecompositionMode):
    """Dispatch mode that decomposes operators and reduces one dimension at a time.

    In which order numbers are summed decides which digits are lost: the mean of numbers that cancel
    may be 0, or as large as the rounding of the largest summand.
    """

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """See the base class."""
        prims = torch.ops.prims
        if func not in (prims.sum.default, prims.var.default):
            return super().call(func, args, kwargs)
        x, dims, *correction = args
        x = x.to(kwargs.get("output_dtype") or x.dtype)
        total = _sum(x, dims)
        if func is prims.var.default:
            count = math.prod(x.shape[d] for d in dims)
            distance = x - total / count
            total = _sum(distance * distance, dims) / max(count - correction[0], 0)
        return total.reshape([n for d, n in enumerate(x.shape) if d not in dims])


def _sum(x: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in sorted(dims, reverse=True):
        x = x.sum(dim, keepdim=True)
    return x


class PerturbedRoundingMode(_Path):
    """Dispatch mode that rounds operators' results another way, also in composites.

    Args:
        seed: Which of the ways.
        scale: Rounds a tensor.
    """

    def __init__(self, seed: int, scale: Callable[[Tensor, torch.Generator], Tensor]):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self._round = lambda x: scale(x, generator)

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """See the base class."""
        return pytree.tree_map_only(Tensor, self._round, func(*args, **kwargs))


class CorrectRoundingMode(DecompositionMode):
    """Dispatch mode that computes pointwise functions in float64 and rounds once.

    Torch's own kernels may be a unit in the last place away: the sigmoid of 1e-7 is 0.50000006 for
    them, and 0.5 if it is rounded correctly. What follows may be any number then: its logit is 2e-7
    or 0.

    Args:
        seed: Which functions are one call; of others each call of their decomposition rounds. 0:
            all.
    """

    def __init__(self, seed: int = 0):
        super().__init__()
        self._seed = seed

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """See the base class."""
        if self._seed >> zlib.crc32(str(func).encode()) % CHOICES & 1:
            return super().call(func, args, kwargs)
        result = func(*args, **kwargs)
        if torch.Tag.pointwise not in func.tags or func in _OF_DTYPES:
            return result
        wide_args, wide_kwargs = pytree.tree_map_only(Tensor, _wide, (args, kwargs))
        wide = func(*wide_args, **wide_kwargs)
        return pytree.tree_map(lambda r, w: w.to(r.dtype), result, wide)


CHOICES = 3
"""Functions are in as many groups; each group is decomposed or not."""

_OF_DTYPES = (torch.ops.aten.nan_to_num.default,)  # whose values depend on the dtype


def _wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def make_eager_variants() -> list[_Path]:
    """Creates dispatch modes under which eager gives other, equally right results."""
    return [
        OperandLayoutMode(spread_elements),
        OperandLayoutMode(transposed),
        MatmulOrderMode(LARGER),
        MatmulOrderMode(LARGER, backwards=True),
        MatmulOrderMode(backwards=True),
        DecompositionMode(),
        SumByDimensionMode(),
        *map(CorrectRoundingMode, range(2**CHOICES)),
    ]
