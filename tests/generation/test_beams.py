"""Beam search: how often the cache is copied, by whom, and how not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dynamo_backends
from dynamo_backends.bench.torchvision_shim import import_transformers
from dynamo_backends.xla import _jaxlib
from tests.generation.tiny import compiled, generate, make, prompt

BEAMS, TOKENS = 3, 8
TENSORS = 4  # keys and values of two layers
HOW = {
    "cache_implementation": "static", "max_cache_len": 256, "num_beams": BEAMS,
    "max_new_tokens": TOKENS, "min_new_tokens": TOKENS,
}  # fmt: skip
ELEMENTS = 2 * 256 * 8  # of one beam's keys in one layer


class Selections(TorchDispatchMode):
    """Counts what torch selects that is as large as keys."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_selection = func is torch.ops.aten.index_select.default
        self.count += is_selection and result.numel() >= ELEMENTS
        return result


@dataclass
class Copies:
    """Of keys or values.

    Attributes:
        selected: Made by torch, outside of graphs, where transformers reorders a cache.
        moved: Made by `openxla`, of what it is to update and does not own.
        mode: What `selected` is counted under; None: it is not, for nothing is compiled under one.
    """

    selected: int = 0
    moved: int = 0
    mode: type[TorchDispatchMode] | None = Selections


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Counts from now on."""
    found = Copies()
    copied, cache = _jaxlib.copy_to_device, import_transformers().StaticCache
    reorder = cache.reorder_cache

    def counted(device: Any, array: Any) -> Any:
        found.moved += array.size >= ELEMENTS
        return copied(device, array)

    def watched(self: Any, beams: torch.Tensor) -> None:
        if found.mode is None:
            return reorder(self, beams)
        with found.mode() as selections:
            reorder(self, beams)
        found.selected += selections.count

    monkeypatch.setattr(_jaxlib, "copy_to_device", counted)
    monkeypatch.setattr(cache, "reorder_cache", watched)
    return found


def test_transformers_copies_the_cache_and_xla_takes_it_in(copies: Copies):
    """Both at each token, since torch's memory cannot be given to XLA."""
    model, given = make("llama"), prompt("llama", 20, multiple=32)
    run = compiled(model, "openxla")
    for _ in range(2):
        copies.selected = copies.moved = 0
        found = generate(run, given, **HOW)
    counts = copies.selected, copies.moved
    assert counts == (TENSORS * TOKENS, TENSORS * (TOKENS - 1))  # the last one's is not read
    assert torch.equal(found, generate(model, given, **HOW))


def test_a_cache_that_xla_reorders_is_copied_by_that_alone(
    copies: Copies, monkeypatch: pytest.MonkeyPatch
):
    """What a program returned is XLA's, so that it can be given back."""
    model, given = make("llama"), prompt("llama", 20, multiple=32)
    run = compiled(model, "openxla")
    expected = generate(model, given, **HOW)
    layer = import_transformers().cache_utils.StaticLayer
    reorder = torch.compile(layer.reorder_cache, backend="openxla")
    monkeypatch.setattr(layer, "reorder_cache", reorder)
    copies.mode = None
    with dynamo_backends.record() as reports:
        for _ in range(2):
            copies.moved = 0
            assert torch.equal(generate(run, given, **HOW), expected)
    assert not copies.moved
    size = BEAMS * ELEMENTS * 8
    decoding, reordering = memory(reports, "index_put"), memory(reports, "index_select")
    assert decoding.alias_size_in_bytes > TENSORS * size
    assert decoding.temp_size_in_bytes < size
    assert 2 * size <= reordering.output_size_in_bytes < 3 * size
    assert reordering.temp_size_in_bytes < size


def memory(reports: Sequence[Any], operator: str) -> Any:
    """XLA's statistics of the last program with an operator."""
    found = [r for r in reports if any(operator in op for p in r.parts for op in p.operators)]
    (block,) = found[-1].executable.static_program.blocks
    return block.executable.main.get_compiled_memory_stats()


def test_a_cache_that_a_prompt_made_is_not_copied(copies: Copies):
    """Its program returned it; decoding writes to it there."""
    model, given = make("llama"), prompt("llama", 20, multiple=32, batch=BEAMS)
    run = compiled(model, "openxla")
    for _ in range(2):
        copies.moved = 0
        found = generate(run, given, **{**HOW, "num_beams": 1})
    assert not copies.moved
    assert torch.equal(found, generate(model, given, **{**HOW, "num_beams": 1}))
