"""Gradients of PyTorch's operator database through openxla: nothing wrong, nothing crashes.

`make test` runs one sample of some operators, `make conformance` (`--full`) all samples of all, in
float32 and float64, and rewrites their part of docs/conformance.md. `--samples` and `--resume` are
as in `test_opinfo`.
"""

import functools
import zlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from rich.progress import track

from tests.conformance import gradients, opinfo, table, workers
from tests.conformance.journal import Journal

pytestmark = pytest.mark.conformance

SHARE = {torch.float32: 16, torch.float64: 64}  # one in so many operators is tried by `make test`
OPERATORS = "Every operator that has gradients on the CPU"
NATIVE = 0.85  # the least share of operators whose gradients run whole on XLA in float32


def _bounded() -> Iterator[object]:
    for op, dtype in gradients.cases():
        name = opinfo.full_name(op)
        if zlib.crc32(f"gradient of {name} {dtype}".encode()) % SHARE[dtype] == 0:
            yield pytest.param(op, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")


@pytest.mark.parametrize(("op", "dtype"), list(_bounded()))
def test_gradients_of_an_operator_are_right(op: opinfo.OpInfo, dtype: torch.dtype):
    outcome = gradients.run(op, dtype, "openxla", limit=1)
    assert outcome.status not in ("wrong", "crash"), dict(outcome.reasons)


def _work(index: int, limit: int | None) -> opinfo.Outcome:
    torch.set_num_threads(1)
    op, dtype = list(gradients.cases())[index]
    return gradients.run(op, dtype, "openxla", limit=limit)


def _broke_down(index: int, exit_code: int) -> opinfo.Outcome:
    return opinfo.broke_down(*list(gradients.cases())[index], exit_code)


def test_the_whole_database(pytestconfig: pytest.Config):
    if not pytestconfig.getoption("--full"):
        pytest.skip("takes hours; run it by: make conformance")
    limit = pytestconfig.getoption("--samples")
    path = pytestconfig.rootpath / ".conformance" / "openxla-gradients.jsonl"
    journal = Journal(path, resume=pytestconfig.getoption("--resume"))
    names = [(opinfo.full_name(op), str(dtype)) for op, dtype in gradients.cases()]
    todo = [i for i, name in enumerate(names) if name not in journal.outcomes]
    work = functools.partial(_work, limit=limit)
    for done in track(workers.each(work, todo, _broke_down), "gradients", total=len(todo)):
        journal.add(done)
    outcomes = [journal.outcomes[name] for name in names]
    table.write(
        outcomes, table.Sweep("openxla, gradients", "openxla", limit=limit, operators=OPERATORS)
    )
    bad = [o for o in outcomes if o.status in ("wrong", "crash")]
    assert not bad, "\n".join(f"{o.op} {o.dtype}: {dict(o.reasons)}" for o in bad)
    assert table.native_share(outcomes, "float32") >= NATIVE


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-3), (torch.float64, 1e-8)])
def test_a_wrong_gradient_is_noticed(
    dtype: torch.dtype, error: float, monkeypatch: pytest.MonkeyPatch
):
    from dynamo_backends.xla.lowering import registry

    (op,) = [o for o in opinfo.op_db if o.name == "tanh"]
    backward = torch.ops.aten.tanh_backward.default
    row = registry.lookup(backward)
    assert row is not None
    wrong = replace(row, fn=lambda grad, y: row.fn(grad, y) * (1 + error))
    monkeypatch.setitem(registry._TABLE, backward, wrong)
    outcome = gradients.run(op, dtype, "openxla", limit=2)
    assert outcome.status == "wrong"
    assert "output 1 differs from eager" in next(iter(outcome.reasons))
