"""Writes the generated part of docs/graph.md.

python -m tests.graph.graph_page
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends.capture.stage_printing import normal_form
from dynamo_backends.graph import PASSES, STAGES, Property

PAGE = Path(__file__).parents[2] / "docs" / "graph.md"
MARK = "<!-- From here on: python -m tests.graph.graph_page -->\n"


def write_to_a_view(x: Tensor) -> Tensor:
    x[0].mul_(2)
    return x + 1


def composite(x: Tensor) -> Tensor:
    return nn.functional.hardswish(x).t()


def constant(x: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 2.0])


def several_spellings(x: Tensor) -> Tensor:
    return torch.ops.aten.add.Scalar(x, 1).view(2, 3) * torch.ones(2, 3)


def drawn(x: Tensor) -> Tensor:
    return torch.rand_like(x * 2) + x


def two_views(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y.t(), y.view(-1)


def folded() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()


def examples() -> dict[str, tuple[Callable[..., Any], Tensor, bool]]:
    """For each stage: a function that it changes, an input, and whether shapes are dynamic."""
    x = torch.zeros(2, 3)
    return {
        "functionalize": (write_to_a_view, x, False),
        "decompose": (composite, x, False),
        "normalize": (constant, torch.zeros(3, 2), False),
        "specialize": (lambda x: x.view(x.shape[0] * 3), x, True),
        "canonicalize": (several_spellings, x, False),
        "separate draws": (drawn, x, False),
        "fold batch norm": (folded(), torch.zeros(1, 3, 4, 4), False),
        "separate views": (two_views, x, False),
    }


def before_and_after(stage: str) -> tuple[str, str]:
    """The graph of the stage's example before the stage and after it."""
    fn, x, dynamic = examples()[stage]
    torch._dynamo.reset()
    with torch.no_grad():
        steps = normal_form(fn, x, dynamic=dynamic or None)
    at = [step.name for step in steps].index(stage)
    assert steps[at].changed, f"{stage} does not change its example"
    return steps[at - 1].text, steps[at].text


def generated() -> str:
    """The generated part: properties, and every stage with its contract and an example."""
    lines = ["## Properties", "", "| property | meaning |", "|---|---|"]
    lines += [f"| `{p.name}` | {p.value} |" for p in Property]
    lines += ["", "## Stages", ""]
    for stage in STAGES:
        lines += [f"### {stage.name}", "", f"{stage.summary[0].upper()}{stage.summary[1:]}.", ""]
        lines += [f"Requires: {_names(stage.requires)}. Ensures: {_names(stage.ensures)}.", ""]
        if stage.name in examples():
            before, after = before_and_after(stage.name)
            lines += ["```", before, "```", "", "becomes", "", "```", after, "```", ""]
    order = ", ".join(f"`{p.name}`" for p in PASSES.passes)
    lines += [f"The passes that run for every set of concrete shapes: {order}."]
    return "\n".join(lines) + "\n"


def _names(properties: frozenset[Property]) -> str:
    return ", ".join(f"`{p.name}`" for p in Property if p in properties) or "nothing"


if __name__ == "__main__":
    head = PAGE.read_text().partition(MARK)[0]
    PAGE.write_text(head + MARK + "\n" + generated())
