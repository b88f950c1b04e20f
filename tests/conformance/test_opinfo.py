"""PyTorch's operator database through each backend: nothing wrong, nothing crashes.

Each run has one sample of some operators, others in turn; `make conformance` (`--full`) runs all
samples in all dtypes, keeps what it finds in docs/operators/ and writes docs/conformance.md. That
takes hours; with `make conformance ARGS="--samples 12"` at most so many of each operator and
dtype, evenly spread; with `--dtype float32` only this dtype.
What is done is kept in .conformance/: `--resume` goes on after an interruption and tries failures
again; `-k onnxrt` runs one backend; `--processes 1` leaves a core free. With `--extremes` samples
hold NaN, infinities, signed zeros and bounds of integers, nothing is written, and what
docs/differences.md lists as a difference (differences.py) is not wrong.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import pytest
import torch
from rich.progress import track

from dynamo_backends._torch_private.testing import OpInfo
from dynamo_backends.conformance import workers
from dynamo_backends.conformance.catalogue import CheckRunner, Settings
from dynamo_backends.conformance.journal import Journal
from dynamo_backends.conformance.operators import database, running
from dynamo_backends.conformance.outcomes import FAILURES, Check, Outcome
from tests.conformance import table
from tests.nvfuser import double as nvfuser_double
from tests.nvfuser import share as nvfuser_share
from tests.rotation import is_in

pytestmark = pytest.mark.conformance

RIGHT = {"native", "fallback", "declared", "no samples"}
SHARE = 5  # one in so many operators of those in float32 is tried in each other dtype


class Row(NamedTuple):
    """How a backend is tested.

    Attributes:
        native: The least share of operators that run whole on it in float32.
        share: One in so many operators is tried at each commit in float32.
        chosen: Which operators are run.
        operators: Those, in words.
        dtypes: In which they are run.
        around: What they are run inside of.
        vendor: What runs them, where that is not the first of the packages behind the backend.
    """

    native: float
    share: int
    chosen: Callable[[OpInfo], bool] = lambda op: True
    operators: str = "Every operator"
    dtypes: tuple[torch.dtype, ...] = database.DTYPES
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    vendor: str = ""

    def cases(self, extremes: bool = False) -> list[tuple[OpInfo, torch.dtype]]:
        dtypes = database.EXTREME_DTYPES if extremes else self.dtypes
        return [(op, dtype) for op, dtype in database.cases(dtypes) if self.chosen(op)]


BACKENDS = {
    "nvfuser": Row(
        0.65,
        60,
        nvfuser_share.is_in,
        nvfuser_share.IN_WORDS,
        nvfuser_share.DTYPES,
        nvfuser_double.installed,
        "a double of nvFuser that computes with torch",
    ),
    "openxla": Row(0.85, 20),
    "onnxrt": Row(0.61, 60),
    "tvm": Row(0.58, 120),
    "iree": Row(0.60, 120),
    "ov": Row(0.46, 60),
    "ts_trace": Row(0.91, 100),
    "ofi": Row(0.90, 150),
    "static_runtime": Row(0.90, 150),
    "onednn_graph": Row(0.45, 150),
    "ltc": Row(0.42, 150),
    "ltc_trace": Row(0.45, 150),
    "inductor_freezing": Row(0.91, 300),
    "inductor_max_autotune": Row(0.91, 300),
}


def _bounded() -> Iterator[object]:
    for backend, row in BACKENDS.items():
        for op, dtype in row.cases():
            name = database.full_name(op)
            share = row.share * (1 if dtype == torch.float32 else SHARE)
            text = f"{backend}-{name}-{str(dtype).removeprefix('torch.')}"
            if is_in(text, share):
                yield pytest.param(backend, op, dtype, id=text.removeprefix("openxla-"))


@pytest.mark.parametrize(("backend", "op", "dtype"), list(_bounded()))
def test_an_operator_is_right_or_falls_back(backend: str, op: OpInfo, dtype: torch.dtype):
    with BACKENDS[backend].around():
        outcome = running.run(op, dtype, backend, limit=1)
    assert outcome.status in RIGHT, dict(outcome.reasons)


class Sweeping(CheckRunner):
    """Runs operators inside of what their backend needs."""

    def __init__(self, backend: str, limit: int | None, extremes: bool):
        super().__init__(Settings(backend, samples=limit))
        self.backend, self.extremes = backend, extremes

    def __call__(self, check: Check) -> Outcome:
        with BACKENDS[self.backend].around():
            if not self.extremes:
                return super().__call__(check)
            torch.set_num_threads(1)
            op, dtype = database.find(check.name), getattr(torch, check.dtype)
            limit = self.settings.samples
            return running.run(op, dtype, self.backend, limit=limit, extremes=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_whole_database(pytestconfig: pytest.Config, backend: str):
    if not pytestconfig.getoption("--full"):
        pytest.skip("takes hours; run it by: make conformance")
    limit = pytestconfig.getoption("--samples")
    extremes = pytestconfig.getoption("--extremes")
    name = f"{backend}-extremes" if extremes else backend
    path = pytestconfig.rootpath / ".conformance" / f"{name}.jsonl"
    journal = Journal(path, resume=pytestconfig.getoption("--resume"), again=FAILURES)
    row = BACKENDS[backend]
    wanted = pytestconfig.getoption("--dtype")
    checks = [
        Check("operators", database.full_name(op), database.name_of(dtype))
        for op, dtype in row.cases(extremes)
        if not wanted or database.name_of(dtype) in wanted
    ]
    todo = [check for check in checks if check not in journal.outcomes]
    work = Sweeping(backend, limit, extremes)
    processes = pytestconfig.getoption("--processes")
    results = workers.map_in_processes(work, todo, work.broke_down, processes=processes)
    for done in track(results, "operators", total=len(todo)):
        journal.add(done)
    outcomes = [journal.outcomes[check] for check in checks]
    if not extremes:
        arguments = table.asked(pytestconfig, backend)
        sweep = table.Sweep(backend, backend, arguments, row.vendor, limit, row.operators)
        table.write(outcomes, sweep)
    bad = [o for o in outcomes if o.status not in RIGHT]
    assert not bad, "\n".join(f"{o.check}: {dict(o.reasons)}" for o in bad)
    assert extremes or table.native_share(outcomes, "float32") >= row.native


def test_a_wrong_result_is_noticed(monkeypatch: pytest.MonkeyPatch):
    import jax.numpy as jnp

    from dynamo_backends.xla.lowering import registry

    op = database.find("sin")
    row = registry.lookup(torch.ops.aten.sin.default)
    assert row is not None
    from dataclasses import replace

    wrong = replace(row, fn=lambda x: jnp.sin(x) * (1 + 1e-3))
    monkeypatch.setitem(registry._TABLE, torch.ops.aten.sin.default, wrong)
    outcome = running.run(op, torch.float32, "openxla", limit=2)
    assert outcome.status == "wrong"
    assert "differs from eager" in next(iter(outcome.reasons))
