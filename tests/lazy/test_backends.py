"""Lazy Tensor Core: recorded once or at every call, and right in both ways."""

from typing import Any

import pytest
import torch
from torch import Tensor

import dynamo_backends
from dynamo_backends import _torch_private as private
from dynamo_backends.conformance.operators import database, running
from dynamo_backends.conformance.weights.changes import CHANGES
from dynamo_backends.lazy import lowering
from tests import backend_checks as checks
from tests import refusals
from tests.test_harmless import SEEN, changes

NAMES = ["ltc", "ltc_trace"]


@pytest.mark.parametrize("what", checks.SEMANTICS)
@pytest.mark.parametrize("name", NAMES)
def test_semantics(name: str, what: str):
    fn, inputs = checks.SEMANTICS[what]
    with torch.no_grad():
        checks.agree(name, fn, *inputs())


@pytest.mark.parametrize("name", NAMES)
def test_changed_weights_are_seen(name: str):
    checks.never_stale(name, list(CHANGES))


@pytest.mark.parametrize("name", NAMES)
def test_dynamic_batch(name: str):
    checks.follows_the_batch(name)


def test_gradients():
    checks.gradients_agree("ltc")


@pytest.mark.parametrize(
    "op", ["div.floor_rounding", "nn.functional.binary_cross_entropy", "where"]
)
def test_operators(op: str):
    info = database.find(op)
    outcome = running.run(info, torch.float32, "ltc", limit=1)
    assert outcome.status in ("native", "fallback"), dict(outcome.reasons)


def test_two_numbers_that_are_equal_at_first_are_two_inputs():
    compiled = torch.compile(
        lambda x, y: x * 2 - y * 3 + 1, backend=dynamo_backends.compiler("ltc", min_block_size=1)
    )
    for x, y in ((1.0, 1.0), (2.0, 5.0)):
        result = compiled(torch.tensor(x), torch.tensor(y))
        assert result.item() == x * 2 - y * 3 + 1


def test_an_input_is_not_taken_for_a_number_that_a_kernel_computes_with():
    compiled = torch.compile(
        torch.ldexp, backend=dynamo_backends.compiler("ltc", min_block_size=1), fullgraph=True
    )
    with dynamo_backends.record() as reports:
        for x, y in ((3.5, -2.0), (5.0, 1.0)):
            assert compiled(torch.tensor(x), torch.tensor(y)).item() == x * 2**y
    assert checks.ran_on_backend(reports)


def test_a_hundred_numbers_are_a_hundred_inputs():
    numbers = [torch.tensor(float(i)) for i in range(100)]
    compiled = torch.compile(
        lambda *x: torch.stack(x) * 3, backend=dynamo_backends.compiler("ltc", min_block_size=1)
    )
    for _ in range(2):
        assert torch.equal(compiled(*numbers), torch.stack(numbers) * 3)
        numbers.reverse()


def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made = []
    sync = private.lazy_sync
    monkeypatch.setattr(private, "lazy_sync", lambda tensors: made.append(1) or sync(tensors))
    return made


@pytest.mark.parametrize(("name", "expected"), [("ltc", 1), ("ltc_trace", 5)])
def test_how_often_a_graph_is_recorded(name: str, expected: int, monkeypatch: pytest.MonkeyPatch):
    made = recordings(monkeypatch)
    compiled = torch.compile(lambda x: x.relu() * 2 + 1, backend=name)
    for i in range(5):
        x = torch.full((3,), float(i))
        assert torch.equal(compiled(x), x.relu() * 2 + 1)
    assert len(made) == expected


def test_a_program_that_was_dropped_is_recorded_again(monkeypatch: pytest.MonkeyPatch):
    compiled = torch.compile(lambda x: x.relu() * 2 + 1, backend="ltc")
    x = torch.randn(3)
    compiled(x)
    run, dropped = private.lazy_run, []

    def forgetful(hash: str, inputs: Any) -> list[Tensor]:
        if not dropped:
            dropped.append(hash)
            raise RuntimeError("Failed to get computation by hash")
        return run(hash, inputs)

    monkeypatch.setattr(private, "lazy_run", forgetful)
    with dynamo_backends.record() as reports:
        assert torch.equal(compiled(x), x.relu() * 2 + 1)
    assert dropped
    assert reports == []


def test_views_of_inputs_are_not_copied_by_the_program(monkeypatch: pytest.MonkeyPatch):
    """A linear layer multiplies by the transposed weight, which a program of its own would copy."""
    given: list[list[Any]] = []
    run = private.lazy_run
    monkeypatch.setattr(private, "lazy_run", lambda hash, x: given.append([*x]) or run(hash, x))
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    compiled = torch.compile(model.eval(), backend=dynamo_backends.compiler("ltc", cache=False))
    x = torch.randn(4, 5)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x))
            model[0].weight.mul_(2)
    seen = {(v.data_ptr(), v.stride()) for v in given[-1] if isinstance(v, Tensor)}
    assert {(m.weight.data_ptr(), m.weight.t().stride()) for m in (model[0], model[2])} <= seen


def test_views_of_views_and_numbers_among_them():
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        turned = w.t()[1:]
        return x @ turned + w.select(0, 1)[0], (turned * 2).t()

    checks.agree("ltc", fn, torch.randn(3, 4), torch.randn(6, 5), min_block_size=1)


def test_operators_without_a_node_stay_in_eager_with_the_reason():
    reports = checks.agree(
        "ltc", lambda x: torch.special.i0(x * 2 + 1) * 3, torch.randn(4), min_block_size=1
    )
    (fallback,) = [f for r in reports for f in r.fallbacks]
    assert fallback.reason.startswith("Lazy Tensor Core has no node for")


def test_starting_twice_does_no_harm():
    lowering.start()
    lowering.start.cache_clear()
    lowering.start()
    assert torch.zeros(2, device="lazy").to("cpu").tolist() == [0, 0]


@pytest.mark.parametrize("name", NAMES)
def test_a_torch_without_it(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(torch._C, "_lazy_ts_backend")
    text = "without Lazy Tensor Core. To fix it: pip install --force-reinstall torch"
    refusals.backend_is_refused(name, text)


def test_importing_starts_nothing():
    imports = "import dynamo_backends.lazy.lowering, dynamo_backends.lazy.runtime"
    assert changes(imports) == [[], SEEN]


def test_a_recording_that_failed_does_not_make_the_next_one_fail():
    """Inputs are recorded as zeros, by which integers cannot be divided."""
    x, y = torch.arange(12), torch.full((12,), 7)
    for name, fn in (("ltc", lambda x, y: x // y * 2), ("ltc_trace", lambda x, y: x * 2 - y)):
        compiler = dynamo_backends.compiler(name, min_block_size=1, cache=False)
        with dynamo_backends.record() as reports:
            assert torch.equal(torch.compile(fn, backend=compiler)(x, y), fn(x, y))
        assert reports[0].runtime_fallbacks == []
    assert checks.ran_on_backend(reports)
