"""Gradients of PyTorch's operator database through openxla: nothing wrong, nothing crashes.

Each run has one sample of some operators, others in turn; `make conformance` (`--full`) runs all
samples of all, in float32 and float64, and writes docs/conformance.md. `--samples` and `--resume`
are as in `test_opinfo`.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from rich.progress import track

from dynamo_backends._torch_private.testing import OpInfo
from dynamo_backends.conformance import workers
from dynamo_backends.conformance.catalogue import CheckRunner, Settings
from dynamo_backends.conformance.journal import Journal
from dynamo_backends.conformance.operators import database, gradients
from dynamo_backends.conformance.outcomes import FAILURES, Check
from tests.conformance import table
from tests.rotation import is_in

pytestmark = pytest.mark.conformance

RIGHT = {"native", "fallback", "no samples"}

SHARE = {torch.float32: 40, torch.float64: 80}  # one in so many operators is tried at each commit
OPERATORS = "Every operator that has gradients on the CPU"
NATIVE = 0.85  # the least share of operators whose gradients run whole on XLA in float32


def _bounded() -> Iterator[object]:
    for op, dtype in gradients.cases():
        name = database.full_name(op)
        if is_in(f"gradient of {name} {dtype}", SHARE[dtype]):
            yield pytest.param(op, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")


@pytest.mark.parametrize(("op", "dtype"), list(_bounded()))
def test_gradients_of_an_operator_are_right(op: OpInfo, dtype: torch.dtype):
    outcome = gradients.run(op, dtype, "openxla", limit=1)
    assert outcome.status in RIGHT, dict(outcome.reasons)


def test_the_whole_database(pytestconfig: pytest.Config):
    if not pytestconfig.getoption("--full"):
        pytest.skip("takes hours; run it by: make conformance")
    limit = pytestconfig.getoption("--samples")
    path = pytestconfig.rootpath / ".conformance" / "openxla-gradients.jsonl"
    journal = Journal(path, resume=pytestconfig.getoption("--resume"), again=FAILURES)
    checks = [
        Check("gradients", database.full_name(op), database.name_of(dtype))
        for op, dtype in gradients.cases()
    ]
    todo = [check for check in checks if check not in journal.outcomes]
    work = CheckRunner(Settings("openxla", samples=limit))
    results = workers.map_in_processes(work, todo, work.broke_down)
    for done in track(results, "gradients", total=len(todo)):
        journal.add(done)
    outcomes = [journal.outcomes[check] for check in checks]
    arguments = table.asked(pytestconfig, "gradients")
    name = "openxla, gradients"
    table.write(outcomes, table.Sweep(name, "openxla", arguments, limit=limit, operators=OPERATORS))
    bad = [o for o in outcomes if o.status not in RIGHT]
    assert not bad, "\n".join(f"{o.check}: {dict(o.reasons)}" for o in bad)
    assert table.native_share(outcomes, "float32") >= NATIVE


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-3), (torch.float64, 1e-8)])
def test_a_wrong_gradient_is_noticed(
    dtype: torch.dtype, error: float, monkeypatch: pytest.MonkeyPatch
):
    from dynamo_backends.xla.lowering import registry

    op = database.find("tanh")
    backward = torch.ops.aten.tanh_backward.default
    row = registry.lookup(backward)
    assert row is not None
    wrong = replace(row, fn=lambda grad, y: row.fn(grad, y) * (1 + error))
    monkeypatch.setitem(registry._TABLE, backward, wrong)
    outcome = gradients.run(op, dtype, "openxla", limit=2)
    assert outcome.status == "wrong"
    assert "output 1 differs from eager" in next(iter(outcome.reasons))
