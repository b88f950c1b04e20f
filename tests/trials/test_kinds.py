"""Which calls share a verdict."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import dynamo_backends
from dynamo_backends._torch_private import FakeTensorMode
from dynamo_backends.runtime.verdicts import VerdictStore
from dynamo_backends.verify.trials.verdict_keys import verdict_key

aten = torch.ops.aten
FOLDERS = {"onnxrt": "ort", "ov": "openvino"}
ONES = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call on fake tensors."""
    graph = fx.Graph()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        values = fx.node.map_aggregate(args, lambda a: mode.from_tensor(a) if isinstance(a, Tensor)
                                       else a)  # fmt: skip
        result = target(*values, **kwargs)
    places: list[fx.Node] = []

    def placed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        places.append(graph.placeholder(f"x{len(places)}"))
        places[-1].meta["val"] = value
        return places[-1]

    node = graph.call_function(target, fx.node.map_aggregate(values, placed), kwargs)
    node.meta["val"] = result
    graph.output(node)
    return node


def kind(*args: Any) -> str:
    return verdict_key(call(*args))


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def index(*shape: int) -> Tensor:
    return x(*shape, dtype=torch.int64)


SAME = [
    ((aten.view.default, x(4, 48, 384), [192, 384]),
     (aten.view.default, x(6, 40, 384), [240, 384])),
    ((aten.expand.default, x(1, 48), [4, 48]), (aten.expand.default, x(1, 33), [7, 33])),
    ((aten.addmm.default, x(9), x(48, 8), x(8, 9)), (aten.addmm.default, x(9), x(200, 8), x(8, 9))),
    ((aten.slice.Tensor, x(1, 512), 1, 0, 48), (aten.slice.Tensor, x(1, 512), 1, 0, 20)),
    ((aten.arange.default, 48), (aten.arange.default, 20)),
    ((aten._softmax.default, x(4, 48), -1, False), (aten._softmax.default, x(5, 99), -1, False)),
    ((aten.transpose.int, x(4, 48, 384), 1, 2), (aten.transpose.int, x(9, 20, 99), 1, 2)),
    ((aten.native_layer_norm.default, x(4, 48, 99), [99], x(99), x(99), 1e-5),
     (aten.native_layer_norm.default, x(7, 20, 70), [70], x(70), x(70), 1e-5)),
    ((aten.gather.default, x(4, 48), 1, index(4, 40)),
     (aten.gather.default, x(7, 99), 1, index(7, 16))),
    ((aten.cat.default, [x(4, 48), x(4, 16)], 1), (aten.cat.default, [x(5, 99), x(5, 20)], 1)),
    ((aten.bmm.default, x(4, 48, 8), x(4, 8, 5)), (aten.bmm.default, x(9, 17, 8), x(9, 8, 5))),
    ((aten.embedding.default, x(512, 64), index(4, 48)),
     (aten.embedding.default, x(512, 64), index(3, 20))),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), SAME)
def test_sizes_that_decide_nothing_are_not_part_of_it(one: Any, other: Any):
    assert kind(*one) == kind(*other)


@pytest.mark.parametrize("backend", ["onnxrt", "ov"])
@pytest.mark.parametrize(("one", "other"), SAME)
def test_trials_of_one_kind_say_the_same(
    one: Any, other: Any, backend: str, monkeypatch: pytest.MonkeyPatch
):
    asked: Any = dynamo_backends.get_backend(backend)
    trial = importlib.import_module(f"dynamo_backends.{FOLDERS[backend]}.trial")
    found = []
    for each in (one, other):
        monkeypatch.setattr(trial, "_verdicts", VerdictStore(backend, (), shipped=False))
        found.append(asked.supports(call(*each), asked.Options(cache=False)))
    assert found[0] == found[1]


OTHER = [
    ((aten.view.default, x(4, 48), [192]), (aten.view.default, x(1, 48), [48])),  # broadcasts
    ((aten.view.default, x(4, 48), [192]), (aten.view.default, x(0, 48), [0])),
    ((aten.view.default, x(4, 48), [192]), (aten.view.default, x(4, 8), [32])),  # vectors
    ((aten.view.default, x(4, 3), [12]), (aten.view.default, x(4, 4), [16])),
    ((aten.gather.default, x(4, 48), 1, index(4, 48)),
     (aten.gather.default, x(4, 48), 1, index(4, 40))),
    ((aten.gather.default, x(4, 48), 1, index(4, 40)),
     (aten.gather.default, x(4, 48), 1, index(4, 50))),
    ((aten.transpose.int, x(4, 48, 5), 1, 2), (aten.transpose.int, x(4, 48, 5), 0, 2)),
    ((aten.addmm.default, x(9), x(48, 8), x(8, 9)), (aten.addmm.default, x(9), x(1, 8), x(8, 9))),
    ((aten.mm.default, x(48, 8), x(8, 9)), (aten.mm.default, x(48, 7), x(7, 9))),
    ((aten.mm.default, x(48, 8), x(8, 9)), (aten.mm.default, x(48, 8), x(9, 8).t())),
    ((aten.mm.default, x(48, 8), x(8, 9)), (aten.mm.default, x(1 << 20, 8), x(8, 9))),  # not run
    ((aten._softmax.default, x(4, 48), -1, False), (aten._softmax.default, x(4, 512), -1, False)),
    ((aten._softmax.default, x(4, 48), -1, False), (aten._softmax.default, x(4, 48), 0, False)),
    ((aten.constant_pad_nd.default, x(20), [1, 1]), (aten.constant_pad_nd.default, x(20), [1, -1])),
    ((aten.slice.Tensor, x(20), 0, 0, 1), (aten.slice.Tensor, x(20), 0, 0, 0)),
    ((aten.neg.default, x(5, 20)), (aten.neg.default, x(20, 5).t())),
    ((aten.clone.default, x(4, 48)), (aten.clone.default, x(4, 48).bfloat16())),
    ((aten.t.default, x(4, 48)), (aten.t.default, x(4, 96)[:, :48])),  # gaps
    ((aten.avg_pool2d.default, x(4, 3, 20, 20), [2, 2]),
     (aten.avg_pool2d.default, x(4, 3, 21, 21), [2, 2])),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), OTHER)
def test_what_a_vendor_may_choose_a_kernel_by_is_part_of_it(one: Any, other: Any):
    assert kind(*one) != kind(*other)


def test_of_convolutions_only_the_batch_is_free():
    def given(batch: int, size: int, window: int) -> Any:
        image, weight = x(batch, 3, size, size), x(8, 3, window, window)
        return aten.convolution.default, image, weight, None, *ONES

    assert kind(*given(4, 20, 3)) == kind(*given(7, 20, 3))
    assert kind(*given(4, 20, 3)) != kind(*given(4, 28, 3))
    assert kind(*given(4, 20, 3)) != kind(*given(4, 20, 5))
    assert kind(*given(4, 20, 3)) != kind(*given(1, 20, 3))
