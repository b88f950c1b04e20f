"""What backends ask of a call: its arguments by name, and the tensors that it reads and makes."""

from typing import Any

import torch
from torch import Tensor, fx


def collect_tensors(value: Any) -> list[Tensor]:
    """Returns the tensors in a `meta["val"]`: of a tensor, or of a list or tuple of them."""
    values = value if isinstance(value, list | tuple) else (value,)
    return [v for v in values if isinstance(v, Tensor)]


def collect_call_tensors(node: fx.Node) -> list[Tensor]:
    """Returns the fake tensors that a call reads, then those that it returns."""
    return [t for n in (*node.all_input_nodes, node) for t in collect_tensors(n.meta.get("val"))]


def dynamic_shape_reason(node: fx.Node) -> str | None:
    """Returns why a call has no static shapes; None if all its sizes are integers."""
    sizes = (size for tensor in collect_call_tensors(node) for size in tensor.shape)
    return None if all(isinstance(s, int) for s in sizes) else "a size depends on data"


def is_pointwise(op: Any) -> bool:
    """Returns whether torch tags an operator as pointwise (elementwise)."""
    return torch.Tag.pointwise in getattr(op, "tags", ())


def bind_arguments(node: fx.Node) -> dict[str, Any]:
    """Maps schema names to the arguments a call is given, without defaults."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def get_argument(node: fx.Node, name: str) -> Any:
    """Returns one argument of a call by schema name; the default if it is not given."""
    given = bind_arguments(node)
    if name in given:
        return given[name]
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    return next((a.default_value for a in schema if a.name == name), None)


_FILLING = frozenset(
    """clamp clamp_max clamp_min constant_pad_nd fill full full_like hardtanh masked_fill new_full
    scalar_tensor threshold""".split()  # noqa: SIM905
)


def scalar_overflow_reason(node: fx.Node) -> str | None:
    """Returns why eager raises for a scalar that the integer dtype cannot hold; else None."""
    value, target = node.meta.get("val"), node.target
    if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex():
        return None
    if value.dtype == torch.bool or not isinstance(target, torch._ops.OpOverload):
        return None
    if target._schema.name.removeprefix("aten::") not in _FILLING:
        return None
    limits = torch.iinfo(value.dtype)
    sizes = ("size", "pad")
    numbers = [v for name, v in bind_arguments(node).items() if name not in sizes]
    least = limits.min or -limits.max  # unsigned types take negative numbers, which wrap around
    wrong = [x for x in numbers if _is_number(x) and not least <= x <= limits.max]
    return (
        (f"eager raises an error, because {wrong[0]} is out of range for {value.dtype}")
        if wrong
        else None
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
