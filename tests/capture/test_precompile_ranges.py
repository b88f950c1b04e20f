"""`precompile(dynamic_shapes=...)`: later calls inside the ranges compile nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import dynamo_backends
from dynamo_backends import OptionError
from dynamo_backends.capture.precompile import resize_by_repeating
from dynamo_backends.interface.counters import total


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        return self.head(self.words(ids)).softmax(-1) * scale


BATCH, LENGTH = Dim("batch", min=2, max=16), Dim("length", min=2, max=40)
OPEN = Dim("open")

SHAPES: dict[str, Any] = {
    "by name": {"ids": {0: BATCH, 1: LENGTH}, "scale": {0: BATCH}},
    "in order": ((BATCH, Dim.DYNAMIC(min=2, max=40)), {0: BATCH}),
    "without bounds": {"ids": {0: OPEN, 1: Dim.DYNAMIC}, "scale": {0: OPEN}},
}


@pytest.mark.parametrize("form", [*SHAPES, "marks"])
def test_calls_inside_the_ranges_compile_nothing(form: str):
    torch.manual_seed(0)
    model = Net().eval()
    ids, scale = torch.randint(50, (3, 5)), torch.rand(3, 1, 1)
    if form == "marks":
        torch._dynamo.mark_dynamic(ids, 0, min=2, max=16)
        torch._dynamo.mark_dynamic(ids, 1, min=2, max=40)
        scale = torch.rand(1, 1, 1)
    with torch.no_grad():
        compiled, done = dynamo_backends.precompile(
            model, (ids, scale), dynamic_shapes=SHAPES.get(form), backend="onnxrt"
        )
        assert done.complete
        assert done.graphs == 1
        before = total.compilations
        for rows, columns in ((2, 2), (16, 40), (7, 7), (9, 18)):
            ids = torch.randint(50, (rows, columns))
            scale = torch.rand(1 if form == "marks" else rows, 1, 1)
            with dynamo_backends.run():
                torch.testing.assert_close(compiled(ids, scale), model(ids, scale))
        assert total.compilations == before


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (
            {"words": {0: BATCH}},
            r"\['words'\], which are not arguments of this call. Valid names: \['ids', 'scale'",
        ),
        ({"ids": {2: BATCH}}, "names dimension 2, but the tensor has 2"),
        ({"ids": {0: BATCH * 2}}, "Use a named torch.export.Dim"),
    ],
)
def test_shapes_that_do_not_fit(shapes: Any, text: str):
    with pytest.raises(OptionError, match=text):
        dynamo_backends.precompile(
            Net(), (torch.ones(3, 5, dtype=torch.int64), torch.ones(1)), dynamic_shapes=shapes
        )


def test_a_least_size_without_a_largest():
    ids, scale = torch.randint(50, (4, 5)), torch.rand(1, 1, 1)
    shapes = {"ids": {0: Dim("least", min=3)}}
    model = Net().eval()
    with torch.no_grad():
        compiled, done = dynamo_backends.precompile(
            model, (ids, scale), dynamic_shapes=shapes, backend="onnxrt"
        )
        assert done.complete
        assert done.graphs == 1
        for rows in (3, 100):
            ids = torch.randint(50, (rows, 5))
            with dynamo_backends.run():
                torch.testing.assert_close(compiled(ids, scale), model(ids, scale))


def test_resized():
    x = torch.arange(6.0).view(2, 3)
    assert resize_by_repeating(x, (3, 2)).tolist() == [[0, 1], [3, 4], [0, 1]]
    with pytest.raises(OptionError, match=r"of shape \[2, 3\] cannot be resized to \[3\]"):
        resize_by_repeating(x, (3,))
