"""Which of the exporter's lowerings are used.

A lowering that is absent here is not trusted: the call is taken apart by torch's decompositions or
left to eager. Every other lowering is still tried on each kind of call before it is used (`trial`).
"""

import functools
from typing import Any

from dynamo_backends._torch_private import OpOverload, onnx_registry

OPSET = 20
"""What `torch.onnx.export` takes by default; ONNX Runtime has kernels of its own for `Gelu`."""


@functools.cache
def registry() -> Any:
    """The lowerings that `torch.onnx.export(dynamo=True)` uses."""
    return onnx_registry(OPSET)


WRONG: dict[str, str] = {
    "erfc.default": "it is lowered to 1 - erf(x), which has no correct digit for x > 4",
    "special_erfc.default": "it is lowered to 1 - erf(x), which has no correct digit for x > 4",
    "expm1.default": "it is lowered to exp(x) - 1, which has no correct digit for small x",
    "special_expm1.default": "it is lowered to exp(x) - 1, which has no correct digit for small x",
    "log1p.default": "it is lowered to log(1 + x), which has no correct digit for small x",
}
"""Lowerings that are wrong on inputs that a trial does not show, by the overload's name."""


def is_lowered(op: Any) -> bool:
    """Whether an operator has a lowering that is used."""
    return why_not(op) is None


def why_not(op: Any) -> str | None:
    """Why an operator has no lowering that is used; None if it has."""
    if not registry().is_registered(op):
        return "onnxscript has no lowering of it"
    return WRONG.get(str(op).removeprefix("aten."))


@functools.cache
def lowered_overloads() -> frozenset[OpOverload]:
    """Every overload that has a lowering that is used."""
    targets = (metas[0].fx_target for metas in registry().functions.values())
    return frozenset(t for t in targets if isinstance(t, OpOverload) and is_lowered(t))
