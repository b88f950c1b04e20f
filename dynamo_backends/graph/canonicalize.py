"""Rewrites calls with the same meaning to one canonical form.

Arguments that may be positional are positional, arguments that equal their defaults are left out,
overloads that compute the same bits become one (`SPELLINGS`), views that change nothing disappear
(`IDENTITIES`), and so do empty operands of concatenations. Each row holds for all shapes, strides
and dtypes, bit for bit.
"""

import functools
from typing import Any

import torch
from torch import fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.aliasing import is_identity_view, is_replayed_view
from dynamo_backends.graph.graph import Graph, eliminate_dead_calls
from dynamo_backends.graph.properties import NORMAL_FORM, Pass, Property
from dynamo_backends.graph.shape_propagation import ShapeInference, describe_metadata
from dynamo_backends.graph.symbolic_sizes import SIZES, SizeWithExpression, is_symbolic

aten = torch.ops.aten

# What None means for operators that make a tensor out of no other.
_FACTORY_DEFAULTS = {"layout": torch.strided, "pin_memory": False}


# Arithmetic with a number is spelled as Python's operators arrive: torch makes a tensor of it.
SPELLINGS: dict[OpOverload, OpOverload] = {
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    aten.div.Scalar_mode: aten.div.Tensor_mode,
    aten._unsafe_view.default: aten.view.default,
    aten.detach.default: aten.alias.default,
}

IDENTITIES = frozenset(
    {
        aten.alias.default, aten.expand.default, aten.permute.default, aten.slice.Tensor,
        aten.squeeze.dim, aten.squeeze.dims, aten.view.default,
    }
)  # fmt: skip


def canonicalize(graph: Graph) -> bool:
    """Rewrites every call to its canonical form, in place; returns whether it changed any.

    Requires: normal form. Ensures: normal form, `CANONICAL`; same bits.
    """
    changed = removed = False
    for node in graph.calls:
        if not isinstance(node.target, OpOverload):
            continue
        if node.target is aten.detach.default and is_replayed_view(node):
            continue  # which torch computes; autograd takes an alias for a view
        changed |= _respell(node)
        changed |= _shorten(node)
        removed |= node.target in IDENTITIES and _bypass(node)
        removed |= node.target is aten.cat.default and _drop_empty_operands(node)
    if removed:
        eliminate_dead_calls(graph.module.graph)
    return changed or removed


def _respell(node: fx.Node) -> bool:
    op = _operator(node)
    target = SPELLINGS.get(op)
    if target is None:
        return False
    names = _signature(op)[0]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    positional, keywords, _ = _signature(target)
    node.args = tuple(given[n] for n in positional if n in given)
    node.kwargs = {n: given[n] for n in keywords if n in given}
    node.target = target
    return True


def _operator(node: fx.Node) -> OpOverload:
    assert isinstance(node.target, OpOverload)
    return node.target


@functools.cache
def _signature(op: OpOverload) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]:
    """Names of positional and of keyword-only arguments, and defaults of both."""
    arguments = op._schema.arguments
    positional = tuple(a.name for a in arguments if not a.kwarg_only)
    keywords = tuple(a.name for a in arguments if a.kwarg_only)
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    makes = not any(str(a.type) == "Tensor" for a in arguments)
    defaults |= {n: v for n, v in _FACTORY_DEFAULTS.items() if makes and n in keywords}
    return positional, keywords, defaults


def _shorten(node: fx.Node) -> bool:
    positional, _, defaults = _signature(_operator(node))
    args, kwargs = list(node.args), dict(node.kwargs)
    for name in positional[len(args) :]:
        if name in kwargs:
            args.append(kwargs.pop(name))
        elif name in defaults and any(later in kwargs for later in positional):
            args.append(defaults[name])
        else:
            break
    while args and (name := positional[len(args) - 1]) in defaults:
        if not _equals(args[-1], defaults[name]):
            break
        args.pop()
    for name in [n for n, v in kwargs.items() if n in defaults and _equals(v, defaults[n])]:
        del kwargs[name]
    if len(args) == len(node.args) and len(kwargs) == len(node.kwargs):
        return False
    node.args, node.kwargs = tuple(args), kwargs
    return True


def _equals(value: Any, default: Any) -> bool:
    """Returns whether an argument is its default; 1, 1.0 and True are different arguments."""
    if isinstance(value, list | tuple) and isinstance(default, list | tuple):
        return len(value) == len(default) and all(map(_equals, value, default))
    return type(value) is type(default) and bool(value == default)


def _bypass(node: fx.Node) -> bool:
    """Lets the readers of a view read its source, if both are the same.

    An output stays what it is: two outputs that were two tensors must not become one object.
    """
    source = node.args[0]
    if not isinstance(source, fx.Node) or not is_identity_view(node):
        return False
    node.replace_all_uses_with(source, lambda user: user.op != "output")
    return not node.users


def _drop_empty_operands(cat: fx.Node) -> bool:
    """Takes `torch.tensor([])` out of a concatenation: eager allows it beside any shape.

    Caches of keys and values begin so. Vendors refuse tensors without elements.
    """
    operands, value = cat.args[0], cat.meta["val"]
    assert isinstance(operands, list | tuple)
    left = [x for x in operands if not _is_empty_vector(x, value.dtype)]
    if len(left) == len(operands) or not left or is_symbolic(value):
        return False
    args = cat.args
    cat.args = (left, *args[1:])
    ShapeInference()(cat)
    is_same = describe_metadata(cat.meta["val"]) == describe_metadata(
        value
    )  # the memory format depends on operands
    cat.meta["val"] = value
    if not is_same:
        cat.args = args
    return is_same


def _is_empty_vector(node: Any, dtype: torch.dtype) -> bool:
    """Returns whether a tensor always has the shape (0,) and does not affect result dtypes."""
    value = node.meta["val"]
    varies = any(isinstance(size, SizeWithExpression) for size in node.meta.get(SIZES, ()))
    (size,) = value.shape if value.ndim == 1 else (None,)
    # Asking whether a size that depends on data is 0 would be a guard.
    return isinstance(size, int) and size == 0 and value.dtype == dtype and not varies


CANONICALIZE = Pass(
    name="canonicalize",
    summary="each operator call gets a canonical form; no-op views are removed",
    requires=NORMAL_FORM,
    ensures=frozenset({Property.CANONICAL}),
    run=canonicalize,
)
