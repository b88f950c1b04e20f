"""The blocks of docs/backends.md run in order and print what the page shows."""

import re
from collections.abc import Iterator

import pytest
import torch

import dynamo_backends
from dynamo_backends.interface import registry
from dynamo_backends.xla.lowering import registry as lowerings
from tests.bench.programs import ROOT
from tests.pages import Example, compared, differences, executed

TEXT = (ROOT / "docs/backends.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page() -> Iterator[list[Example]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_registered", dict(registry._registered))
        patch.setattr(lowerings, "_TABLE", dict(lowerings._TABLE))
        torch.manual_seed(0)
        with executed("docs/backends.md") as (ran, _):
            yield ran
    registry.get_backend.cache_clear()


def test_the_page_shows_what_its_code_prints(page: list[Example]):
    assert differences(page) == []
    assert compared(page) >= 6


def test_the_names_it_uses_are_public():
    used = set(re.findall(r"\bdb\.(\w+)", TEXT))
    assert used >= {"Backend", "Executable", "Graph", "Results", "SUPPORTED"}
    assert used <= set(dynamo_backends.__all__)


def test_architecture_names_files_that_are_there():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/]+/\w+\.py\b", page))
    assert len(named) > 30
    assert {f for f in named if not any(ROOT.glob(f"dynamo_backends/**/{f}"))} == set()
