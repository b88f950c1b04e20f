"""docs/graph.md shows what the passes do."""

from pathlib import Path

import pytest
import torch

from dynamo_backends.capture.stage_printing import show_passes
from dynamo_backends.graph import STAGES
from tests.graph.graph_page import MARK, PAGE, before_and_after, examples, generated


def test_the_page_is_what_the_code_generates():
    page = Path(PAGE).read_text()
    assert page.partition(MARK)[2].strip() == generated().strip(), (
        "docs/graph.md is out of date; run: python -m tests.graph.graph_page"
    )


def test_every_stage_but_the_one_for_untyped_graphs_has_an_example():
    assert {s.name for s in STAGES} - set(examples()) == {"propagate"}


def test_show_passes_prints_the_graphs_that_changed(capsys: pytest.CaptureFixture[str]):
    show_passes(lambda x: x.mul_(2), torch.ones(2))
    shown = capsys.readouterr().out
    assert "# capture\ngraph(l_x_: float32[2])\n  mul_: float32[2] = l_x_.mul_(2)" in shown
    assert "# functionalize\ngraph(arg0_1: float32[2])\n  mul: float32[2] = aten.mul" in shown
    assert "# fold batch norm: changes nothing" in shown


def test_dropout_is_drawn_before_the_block():
    torch._dynamo.reset()
    assert before_and_after("separate draws")[1].splitlines()[1].startswith("  draw: float32[2, 3]")
