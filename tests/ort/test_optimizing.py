"""ONNX models are rewritten as onnxscript's own optimizer rewrites them."""

from typing import Any

import onnx_ir as ir
import pytest
import torch
from onnxscript import optimizer
from torch import Tensor, nn

from dynamo_backends.onnx import lowering
from dynamo_backends.onnx.optimizing import optimize


def structure(model: ir.Model) -> list[Any]:
    """Operators, where their inputs come from, and attributes; names of values are anybody's."""
    places: dict[Any, Any] = {value: i for i, value in enumerate(model.graph.inputs)}
    places |= {
        value: value.const_value.numpy().tobytes()
        for value in model.graph.initializers.values()
        if value.const_value is not None
    }
    found: list[Any] = []
    for n, node in enumerate(model.graph):
        places |= {value: (n, i) for i, value in enumerate(node.outputs)}
        attributes = sorted((a.name, str(a.value)) for a in node.attributes.values())
        found.append((node.op_type, [places.get(x) for x in node.inputs], attributes))
    return [*found, [places.get(x) for x in model.graph.outputs]]


class Net(nn.Module):
    """Calls that rules are about: casts, reshapes, slices that split, clips, pads, constants."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.norm(self.conv(nn.functional.pad(x, (1, 1, 1, 1))))
        y = nn.functional.hardswish(y.relu().clamp(0, 4).clamp(1, 3))
        left, right = y[..., :4], y[..., 4:]
        z = (left * 3 + right + 2).reshape(2, -1).reshape(2, 8, -1).transpose(1, 2).transpose(1, 2)
        return z.double().float().unsqueeze(0).unsqueeze(0), z.to(torch.int32).expand(2, 8, -1)


def test_the_model_is_that_of_the_optimizer(monkeypatch: pytest.MonkeyPatch):
    pairs: list[tuple[list[Any], list[Any], list[Any]]] = []

    def both(model: ir.Model) -> None:
        before = structure(model)
        copy = ir.from_proto(ir.to_proto(model))
        optimizer.optimize_ir(copy)
        optimize(model)
        pairs.append((before, structure(copy), structure(model)))

    monkeypatch.setattr(lowering, "optimize", both)
    torch._dynamo.reset()
    model, x = Net().eval(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        compiled = torch.compile(model, backend="onnxrt", options={"cache": False})
        torch.testing.assert_close(compiled(x), model(x), atol=1e-4, rtol=1e-4)
    before, theirs, ours = pairs[-1]
    assert ours == theirs
    assert len(ours) < len(before)
    assert all(theirs == ours for _, theirs, ours in pairs)
