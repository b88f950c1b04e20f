"""docs/conformance.md: each sweep has rows and a section, and rewriting one leaves the others."""

from collections import Counter
from pathlib import Path

import pytest

from dynamo_backends.conformance.outcomes import Outcome
from tests.conformance import table
from tests.conformance.test_opinfo import BACKENDS

PAGE = table.PAGE.read_text(encoding="utf-8")
OUTCOMES = [
    Outcome("sin", "float32", 2, "native", Counter()),
    Outcome("svd", "float32", 1, "fallback", Counter({"aten.svd: a | b": 1})),
    Outcome("eye", "float32", 0, "no samples", Counter()),
]


def test_every_swept_backend_is_on_the_page():
    for name in [*BACKENDS, "openxla, gradients"]:
        assert f"\n| {name} | float32 |" in PAGE
        assert f"\n### {name}\n" in PAGE


def test_rewriting_a_sweep_leaves_the_others(tmp_path: Path):
    path = tmp_path / "page.md"
    path.write_text(PAGE, encoding="utf-8")
    table.write(OUTCOMES, table.Sweep("openxla", "openxla", "jax 0", 3), path)
    written = path.read_text(encoding="utf-8")
    assert (
        "\n| openxla | float32 | 2 | 3 | 1 | 1 | 0 | 0 | 50.0% |\n| openxla, gradients " in written
    )
    assert "\nEvery operator on at most 3 of its sample inputs, with jax 0 and torch " in written
    assert "\n| svd | float32 | aten.svd: a \\| b |\n\n### openxla, gradients\n" in written
    others = [line for line in PAGE.splitlines() if "| onnxrt |" in line or "ONNX Runtime" in line]
    assert others == [x for x in written.splitlines() if "| onnxrt |" in x or "ONNX Runtime" in x]
    table.write(OUTCOMES, table.Sweep("openxla", "openxla", "jax 0", 3), path)
    assert path.read_text(encoding="utf-8") == written


def test_a_new_sweep_comes_last():
    page = table.put(PAGE, "new", ["| new | float32 | 1 |"], "Text.\n")
    assert page.endswith("\n### new\n\nText.\n")
    assert "\n| new | float32 | 1 |\n\n## Operators that are not native\n" in page


def test_a_page_without_its_tables_is_refused():
    with pytest.raises(ValueError, match="the page has no line"):
        table.put("# Another page\n", "new", [], "")
