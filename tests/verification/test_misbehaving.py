"""Executables that return what is no result, or write to what they only read."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import VerificationError
from dynamo_backends.runtime.program import Block
from dynamo_backends.verify.first_call import _are_equal, _sums


def returning(value: Any) -> Callable[[Sequence[Any], Any], Any]:
    return lambda values, results: value(results) if callable(value) else value


def writing(kind: type) -> Callable[[Sequence[Any], Any], Any]:
    """Exchanges two elements of the first weight, or of the first other tensor."""

    def act(values: Sequence[Any], results: Any) -> Any:
        place = next(x for x in values if isinstance(x, nn.Parameter) == (kind is nn.Parameter))
        flat = place.detach().numpy().reshape(-1)  # as vendors write: torch does not notice
        flat[[0, 1]] = flat[[1, 0]]
        return results

    return act


FAULTS: dict[str, tuple[Callable[[Sequence[Any], Any], Any], str]] = {
    "none": (returning(None), "it returned NoneType instead of a list of 2 outputs"),
    "a tensor": (returning(lambda r: r[0]), "it returned Tensor instead of a list of 2 outputs"),
    "too few": (returning(lambda r: r[:1]), "1 outputs instead of 2"),
    "too many": (returning(lambda r: [*r, r[0]]), "3 outputs instead of 2"),
    "nothing inside": (returning(lambda r: [None, r[1]]), "output 0"),
    "input": (writing(Tensor), "it wrote to its input"),
    "weight": (writing(nn.Parameter), "it wrote to its input"),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16).reshape(4, 4))
        self.draws = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ self.weight
        return y.sin(), (y + torch.rand_like(y) if self.draws else y.cos())


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def planted(fault: str) -> None:
        act, original = FAULTS[fault][0], Block._compiled

        def compiled(self: Block, values: Sequence[Any]) -> Any:
            return act(values, original(self, values))

        monkeypatch.setattr(Block, "_compiled", compiled)

    return planted


@pytest.mark.plants_errors
@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_found_and_eager_takes_over(fault: str, plant: Callable[[str], None]):
    plant(fault)
    model, x = Net(), torch.linspace(0, 1, 8).reshape(2, 4)
    with torch.no_grad(), dynamo_backends.record() as reports:
        expected = model(x)
        found = torch.compile(model, backend="ts_trace", options={"cache": False})(x)
        again = model(x)
    torch.testing.assert_close((found, again), (expected, expected))
    assert [FAULTS[fault][1] in text for r in reports for text in r.runtime_fallbacks] == [True]


@pytest.mark.plants_errors
@pytest.mark.parametrize("fault", ["none", "weight"])
def test_it_is_an_error_with_fallback_error(fault: str, plant: Callable[[str], None]):
    plant(fault)
    options = {"cache": False, "fallback": "error"}
    with torch.no_grad(), pytest.raises(VerificationError, match=r"it (returned|wrote)"):
        torch.compile(Net(), backend="ts_trace", options=options)(torch.ones(2, 4))


@pytest.mark.plants_errors
def test_a_large_input_that_is_lost_is_an_error(
    plant: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("dynamo_backends.verify.first_call._SMALL", 0)
    plant("weight")
    with torch.no_grad(), pytest.raises(VerificationError, match="contents of this input are lost"):
        torch.compile(Net(), backend="ts_trace", options={"cache": False})(torch.ones(2, 4))


MEMORY = {
    "float32": torch.linspace(-1, 1, 10_007),
    "bfloat16, at an odd place": torch.linspace(-1, 1, 10_001).bfloat16()[1:],
    "bool": torch.arange(99) % 3 == 0,
    "complex": torch.linspace(-1, 1, 64).to(torch.complex64).conj(),
    "strided": torch.linspace(-1, 1, 64).reshape(8, 8).t()[::2],
    "one": torch.ones(()),
    "large": torch.arange((1 << 22) * 2 + 3, dtype=torch.int64),
}


@pytest.mark.parametrize("name", MEMORY)
def test_sums_see_each_write(name: str):
    value = MEMORY[name].clone(memory_format=torch.preserve_format)
    before = _sums(value)
    assert before is not None
    assert _are_equal(before, _sums(value))
    assert sum(s.nbytes for s in before) <= max(256, value.nbytes / 4)
    for place in (0, value.numel() // 2, value.numel() - 1):
        changed = value.clone()
        item = changed.reshape(-1)[place].clone()
        flat = changed.view(-1) if changed.is_contiguous() else changed.contiguous().view(-1)
        flat[place] = ~item if item.dtype == torch.bool else item + 1
        assert not _are_equal(before, _sums(flat.view(changed.shape))), place
    if value.numel() > 3 and value.dtype != torch.bool:
        flat = value.contiguous().reshape(-1)
        swapped = flat.clone()
        swapped[[0, -1]] = flat[[-1, 0]]
        assert not _are_equal(before, _sums(swapped.reshape(value.shape)))


def test_what_has_no_memory_has_no_sums():
    assert _sums(3) is None
    assert _sums(torch.empty(0)) is None
    assert _sums(torch.eye(3).to_sparse()) is None
