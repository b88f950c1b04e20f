"""Type promotion is written out as torch's exporter does, which runs every call."""

from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.onnx._internal.fx.passes import type_promotion

from dynamo_backends._torch_private import FakeTensorMode
from dynamo_backends.graph.legalize import insert_promotion_casts


def mixed(x: Tensor, n: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    total = x + n * 2
    half = (h * 3 + n).exp()
    top, place = (total / half).max(1)
    mean = torch.where(top > 1, top, 0).mean()
    return total.relu(), half.softmax(-1), place + 1, mean, (n / 2).t(), (x > n) & (h < 1)


def traced(*inputs: Tensor) -> Any:
    return make_fx(mixed, tracing_mode="fake")(*inputs)


def test_the_graph_is_that_of_the_exporter():
    inputs = torch.randn(4, 5), torch.arange(20).view(4, 5), torch.randn(4, 5).half()
    ours, theirs = traced(*inputs), traced(*inputs)
    insert_promotion_casts(ours)
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x) for x in inputs]
    table = type_promotion.TypePromotionTable()
    with mode, enable_python_dispatcher(), preserve_node_meta():
        type_promotion._TypePromotionInterpreter(theirs, table).run(*fakes)
    assert str(ours.graph) == str(theirs.graph)
    assert "convert_element_type" in str(ours.graph)
    for a, b in zip(ours.graph.nodes, theirs.graph.nodes, strict=True):
        if isinstance(a.meta.get("val"), Tensor):
            kinds = [(v.dtype, v.shape, v.stride()) for v in (a.meta["val"], b.meta["val"])]
            assert kinds[0] == kinds[1], a
