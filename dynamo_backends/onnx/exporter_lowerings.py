"""Which of the exporter's lowerings exist and are used.

A lowering that is absent here is not trusted: the call is decomposed by torch's decompositions or
left to eager. Every other lowering is still tried on each kind of call before it is used (`trial`).
"""

import functools
import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import OpOverload, onnx_registry
from dynamo_backends.graph.decomposition_tables import (
    all_decomposition_rules,
    nested_decomposition_table,
)
from dynamo_backends.onnx.formulas import FORMULAS, has_formula
from dynamo_backends.runtime.cache import DiskCache, cache_folder
from dynamo_backends.verify.trials.call_trials import sanitize_norm_sample, used_result_indices
from dynamo_backends.verify.trials.samples import without_nan

WRONG: dict[str, str] = {
    "erfc.default": "it is lowered to 1 - erf(x), which loses all precision for x > 4",
    "special_erfc.default": "it is lowered to 1 - erf(x), which loses all precision for x > 4",
    "expm1.default": "it is lowered to exp(x) - 1, which loses all precision for small x",
    "special_expm1.default": "it is lowered to exp(x) - 1, which loses all precision for small x",
    "log1p.default": "it is lowered to log(1 + x), which loses all precision for small x",
    "its lowering raises an error": "its lowering raises",
    "convolution_backward.default": (
        "ONNX has no convolution gradients; matrix products and convolutions instead of them take "
        "1.5 times as long as eager"
    ),
}
"""Lowerings that are wrong on inputs that a trial does not show, raise on all, or are slow, by the
name of the overload."""

_LOSE_NAN = frozenset({"max_pool2d_with_indices.default", "max_pool3d_with_indices.default"})
"""Where ONNX Runtime's kernels turn NaN into a number. Without them hardly any network of images
would run whole, so their trials have no NaN; what else loses it is refused by its trial."""

_FIRST_RESULT = frozenset(
    {
        "_embedding_bag.default",
        "_embedding_bag_forward_only.default",
        "_scaled_dot_product_flash_attention.default",
        "_scaled_dot_product_flash_attention_for_cpu.default",
        "embedding_bag.default",
        "embedding_bag.padding_idx",
    }
)
"""Lowerings that compute the first of several results; the others, which gradients need, are 0."""

_FIXED_POINT = frozenset(
    {
        "_upsample_bicubic2d_aa",
        "_upsample_bilinear2d_aa",
        "upsample_bicubic2d",
        "upsample_bilinear2d",
    }
)
"""Interpolations of images; those of integers are computed in integers."""


def has_trusted_lowering(op: Any) -> bool:
    """Returns whether an operator has a formula, or a lowering that is not in `WRONG`."""
    return why_not_lowered(op) is None


def why_not_lowered(op: Any) -> str | None:
    """Returns why an operator has no trusted lowering; None if it has one."""
    return None if op in FORMULAS else _why_not_registered(op)


def _why_not_registered(op: Any) -> str | None:
    reason = WRONG.get(str(op).removeprefix("aten."))
    if reason is None and not has_exporter_lowering(op):
        return "onnxscript has no lowering of it"
    return reason


def why_call_not_lowered(node: fx.Node) -> str | None:
    """Returns why a call with these arguments has no trusted lowering; None if it has."""
    if has_formula(node):
        return None
    reason = _why_not_registered(node.target)
    name = str(node.target).removeprefix("aten.")
    if reason is None and name in _FIRST_RESULT and any(used_result_indices(node)):
        return "onnxscript computes only its first result, but another one is used"
    if reason is None and name == "scatter_reduce.two" and _starts_at_a_bound(node):
        return "its lowering starts from the largest finite number, which hides infinities"
    if reason is None and name.partition(".")[0] in _FIXED_POINT and _is_of_integers(node):
        return "eager computes it in fixed-point arithmetic, which rounds differently"
    return reason


def _is_of_integers(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and not value.dtype.is_floating_point


def _starts_at_a_bound(node: fx.Node) -> bool:
    """Returns whether an amax or amin reduction excludes the input's own elements."""
    own = node.args[5] if len(node.args) > 5 else node.kwargs.get("include_self", True)
    return node.args[4] in ("amax", "amin") and not own


@functools.cache
def lowered_overloads() -> frozenset[OpOverload]:
    """Returns the overloads that have a trusted lowering or a formula."""
    return frozenset(FORMULAS).union(filter(has_trusted_lowering, registered_overloads()))


@functools.cache
def unlowered_overloads() -> frozenset[OpOverload]:
    """Returns the overloads with a decomposition but without a trusted lowering."""
    return frozenset(op for op in all_decomposition_rules() if not has_trusted_lowering(op))


@functools.cache
def nested_decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """Returns decompositions for operators that appear inside a decomposed call."""
    return nested_decomposition_table(lowered_overloads(), unlowered_overloads())


def sanitize_sample(node: fx.Node, tensor: Tensor) -> Tensor:
    """Replaces NaN or infinities in a trial's input where the kernel is known to lose them."""
    loses_nan = str(node.target).removeprefix("aten.") in _LOSE_NAN and not has_formula(node)
    tensor = sanitize_norm_sample(node, tensor)
    return without_nan(tensor) if loses_nan else tensor


OPSET = 20
"""What `torch.onnx.export` takes by default; ONNX Runtime has kernels of its own for `Gelu`."""

_LIMIT = 1 << 20


@functools.cache
def exporter_registry() -> Any:
    """Returns the lowerings that `torch.onnx.export(dynamo=True)` uses, loaded once."""
    return onnx_registry(OPSET)


def has_exporter_lowering(op: Any) -> bool:
    """Returns whether torch's exporter has a lowering of an operator, trusted or not."""
    if not isinstance(op, OpOverload):
        return bool(exporter_registry().is_registered(op))
    return str(op) in _names()


def registered_overloads() -> frozenset[OpOverload]:
    """Returns this process's overloads that torch's exporter has a lowering of.

    The names may come from a process that had imported more: operators that nobody has registered
    here are left out, since no graph of this process can call them.
    """
    return frozenset(op for name in _names() if (op := _overload(name)) is not None)


def _overload(name: str) -> OpOverload | None:
    op: Any = torch.ops
    for part in name.split("."):  # namespace, operator, overload
        op = getattr(op, part, None)
    return op if isinstance(op, OpOverload) else None


@functools.cache
def _names() -> frozenset[str]:
    # Operators of torchvision are there once it is imported.
    facts = (torch.__version__, version("onnxscript"), OPSET, "torchvision" in sys.modules)
    key = hashlib.sha256(repr(facts).encode()).hexdigest()
    cache = DiskCache(cache_folder() / "onnx-operators", _LIMIT, what="names of operators")
    kept = cache.get(key)
    if kept is not None:
        return frozenset(json.loads(kept["names"]))
    targets = (metas[0].fx_target for metas in exporter_registry().functions.values())
    names = sorted({str(target) for target in targets if isinstance(target, OpOverload)})
    cache.put(key, {"names": json.dumps(names).encode()})
    return frozenset(names)
