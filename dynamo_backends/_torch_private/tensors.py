"""Tensors and their memory, symbolic numbers, and subclasses that wrap other tensors.

| what | checked |
|---|---|
| `torch._C._to_dlpack`, `_from_dlpack`, `_has_storage`, `_storage_Use_Count` | 2.11+ |
| `torch._C._functorch.is_functorch_wrapped_tensor` | 2.13 |
| `UntypedStorage._cdata`, `torch.SymInt.node.hint` | 2.11+ |
| `torch._subclasses.fake_tensor.FakeTensor`, its `fake_device` | 2.11+ |
| `torch.utils._python_dispatch.is_traceable_wrapper_subclass` | 2.11+ |
| `ShapeEnv.bound_sympy`, `torch.utils._sympy.numbers.int_oo` | 2.11+ |
| `torch.fx.experimental.symbolic_shapes.statically_known_true` | 2.11+ |
| `Tensor._neg_view`, `Tensor._use_count` | 2.11+ |
| `torch._C._dynamo.guards.TensorGuards` | 2.13; without it tensors are asked one by one |
"""

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
)
from torch.utils._python_dispatch import (
    return_and_correct_aliasing as return_and_correct_aliasing,
)

from dynamo_backends._torch_private.aot_graph_metadata import ONLY

to_dlpack: Callable[[Tensor], Any] = torch._C._to_dlpack


from_dlpack: Callable[[Any], Tensor] = torch._C._from_dlpack


def concretize_number(value: Any) -> Any:
    """Returns a symbolic number's hint, its value in this call; others unchanged."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return value.node.hint
    return value


def has_conj_or_neg_bit(value: Any) -> bool:
    """Returns whether a value is a tensor with the conjugate or negative bit set."""
    return isinstance(value, Tensor) and (value.is_conj() or value.is_neg())


def apply_conj_neg_bits(value: Tensor, memory: Tensor) -> Tensor:
    """Sets the conjugate and negative bits of `value` on a view of `memory`."""
    seen = memory.conj() if value.is_conj() else memory
    return seen._neg_view() if value.is_neg() else seen


def strip_conj_neg_bits(tensor: Tensor) -> Tensor:
    """Returns a view without conjugate and negative bits: the numbers as stored."""
    return apply_conj_neg_bits(tensor, tensor)


def storage_id(tensor: Tensor) -> int | None:
    """Returns an id that tensors with the same storage share, fake ones too; or None.

    None for tensors without a storage, such as sparse ones. A wrapper with one tensor has that of
    this one.
    """
    try:
        return getattr(tensor, ONLY, tensor).untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def storage_users(storage: torch.UntypedStorage) -> int:
    """Returns how many tensors share a storage, not counting `storage` itself."""
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def is_sole_storage_owner(tensor: Tensor) -> bool:
    """Returns whether nothing else refers to a tensor or its storage (views, NumPy).

    Views and numpy's arrays refer to the storage, DLPack capsules to the tensor.
    """
    if _storage_references(tensor) > _storage_references(torch.empty(0)):
        return False
    storage = tensor.untyped_storage()
    return storage_users(storage) == 1 and tensor._use_count() == 1  # type: ignore[attr-defined]


def _storage_references(tensor: Tensor) -> int:
    """References to the Python object of a tensor's storage, this one included."""
    return sys.getrefcount(tensor.untyped_storage())


def has_storage(tensor: Tensor) -> bool:
    """Returns whether a tensor has real memory; wrappers and fake tensors have none."""
    return bool(torch._C._has_storage(tensor))


def is_dense_on_cpu(tensor: Tensor) -> bool:
    """Returns whether a tensor is plain strided CPU memory: no subclass, no lazy bits."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and has_storage(tensor)
    )


def flatten_wrapper(tensor: Tensor) -> list[Tensor]:
    """Returns the innermost tensors of a wrapper subclass; of others `[tensor]`."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inner = [getattr(tensor, name) for name in names]
    return [part for each in inner if isinstance(each, Tensor) for part in flatten_wrapper(each)]


def size_bounds(size: torch.SymInt) -> tuple[int, int | None]:
    """Returns the minimum and maximum of a symbolic size; None for no maximum."""
    return bounds_of(size, size.node.expr)


def bounds_of(number: torch.SymInt | torch.SymFloat, part: Any) -> tuple[int, int | None]:
    """Returns the bounds of an integer subexpression of a symbolic number."""
    return _bounds(number.node.shape_env.bound_sympy(part))


def _bounds(bounds: Any) -> tuple[int, int | None]:
    from torch.utils._sympy.numbers import int_oo

    lower = 0 if bounds.lower in (-int_oo, int_oo) else max(int(bounds.lower), 0)
    return lower, None if bounds.upper == int_oo else int(bounds.upper)


def bounds_within(
    expression: Any, ranges: Mapping[Any, tuple[int, int | None]]
) -> tuple[int, int | None]:
    """Returns an integer expression's bounds, given ranges of its symbols.

    Args:
        expression: Over symbols of sizes.
        ranges: Of symbols; of others there are no bounds. None: there is no largest value.
    """
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    known = {s: ranges.get(s, (0, None)) for s in expression.free_symbols}
    within = {s: ValueRanges(a, int_oo if b is None else b) for s, (a, b) in known.items()}
    return _bounds(bound_sympy(expression, within))


def size_function(name: str) -> Any:
    """Returns torch's sympy function of that name, such as "FloorDiv"."""
    from torch.utils._sympy import functions

    return getattr(functions, name)


def is_statically_true(condition: bool | torch.SymBool) -> bool:
    """Returns whether a condition holds for all sizes; adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


class TensorProperties:
    """The dtypes, devices, sizes, strides and requires_grad of tensors, to detect changes.

    One call of Dynamo's own guard for all of them: less than asking each for a single property.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        self._kinds = list(map(_properties, tensors))
        self._check: Callable[..., bool] | None = None
        with contextlib.suppress(ImportError, TypeError, RuntimeError):
            from torch._C._dynamo.guards import TensorGuards

            sizes: Any = [list(t.shape) for t in tensors]
            strides: Any = [list(t.stride()) for t in tensors]
            guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
            self._check = guards.check

    def are_unchanged(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether tensors still have the recorded properties.

        Args:
            tensors: As many as there were.
        """
        if self._check is not None and self._check(*tensors):
            return True
        # Dynamo's guard also asks for what does not matter here, such as inference mode.
        return list(map(_properties, tensors)) == self._kinds


def _properties(t: Tensor) -> tuple[Any, ...]:
    strides = t.stride() if t.layout is torch.strided else ()
    return type(t), t.shape, strides, t.dtype, t.device, t.requires_grad


def is_tracing_wrapper(tensor: Tensor) -> bool:
    """Returns whether a tensor is fake, functional, or wrapped by a torch.func transform."""
    if type(tensor) is Tensor:
        return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))
    return isinstance(tensor, FakeTensor | FunctionalTensor)


def is_functionalized(tensor: Tensor) -> bool:
    """Returns whether a tensor is a `FunctionalTensor` of AOT Autograd's tracing."""
    return isinstance(tensor, FunctionalTensor)


def mark_static(tensor: Tensor) -> None:
    """Marks all dimensions of a tensor static, so that Dynamo makes no symbols of them.

    It would make one of each number that a view of a wrapper was made with, and then fail at sizes
    that are differences of such.
    """
    if not is_tracing_wrapper(tensor):
        tensor._dynamo_static_indices = set(range(tensor.dim()))  # type: ignore[attr-defined]


def is_parameter(tensor: Tensor) -> bool:
    """Returns whether a tensor, also of a subclass, is an `nn.Parameter`."""
    return isinstance(tensor, torch.nn.Parameter)


def set_data(tensor: Tensor, value: Tensor) -> None:
    """Sets `tensor.data` by the base class's setter, past a subclass's own."""
    vars(torch._C.TensorBase)["data"].__set__(tensor, value)


def make_wrapper(cls: type, like: Tensor) -> Any:
    """Makes a wrapper subclass instance without memory, with the metadata of `like`."""
    return Tensor._make_wrapper_subclass(
        cls,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=like.device,
    )


def classify_aot_outputs(graph: fx.Graph) -> Sequence[str]:
    """Classifies each output as "wrapped", "saved", "returned" or "read" (anything else)."""
    outputs: Any = graph.output_node().args[0]
    descs = graph.output_node().meta.get("desc") or [None] * len(outputs)
    return [_ENDS.get(type(desc).__name__, "read") for desc in descs]


_ENDS = {
    "SubclassGetAttrAOTOutput": "wrapped",
    "SavedForBackwardsAOTOutput": "saved",
    "SavedForBackwardsNoVcCheckAOTOutput": "saved",
    "PlainAOTOutput": "returned",
}
