"""PyTorch's operator database through openxla: nothing wrong, nothing crashes.

`make test` runs one or two samples of each operator; `make conformance` (`--full`) runs all
samples in all dtypes and rewrites docs/conformance.md.
"""

import multiprocessing
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from rich.progress import track

from tests.conformance import opinfo, table

pytestmark = pytest.mark.conformance

DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"
SHARE = 16  # one in so many operators is tried in the dtypes other than float32


def _bounded() -> Iterator[object]:
    for op, dtype in opinfo.cases():
        name = opinfo.full_name(op)
        if dtype == torch.float32 or zlib.crc32(f"{name}{dtype}".encode()) % SHARE == 0:
            yield pytest.param(op, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")


@pytest.mark.parametrize(("op", "dtype"), list(_bounded()))
def test_an_operator_is_right_or_falls_back(op: opinfo.OpInfo, dtype: torch.dtype):
    outcome = opinfo.run(op, dtype, "openxla", limit=1)
    assert outcome.status not in ("wrong", "crash"), dict(outcome.reasons)


def _work(index: int) -> opinfo.Outcome:
    torch.set_num_threads(1)
    op, dtype = list(opinfo.cases())[index]
    return opinfo.run(op, dtype, "openxla")


def test_the_whole_database(pytestconfig: pytest.Config):
    if not pytestconfig.getoption("--full"):
        pytest.skip("takes an hour; run it by: make conformance")
    count = len(list(opinfo.cases()))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context, max_tasks_per_child=300) as pool:
        results = pool.map(_work, range(count), chunksize=1)
        outcomes = list(track(results, "operators", total=count))
    DOCUMENT.write_text(table.render(outcomes), encoding="utf-8")
    bad = [o for o in outcomes if o.status in ("wrong", "crash")]
    assert not bad, "\n".join(f"{o.op} {o.dtype}: {dict(o.reasons)}" for o in bad)
    assert table.native_share(outcomes, "float32") >= 0.85


def test_a_wrong_result_is_noticed(monkeypatch: pytest.MonkeyPatch):
    import jax.numpy as jnp

    from dynamo_backends.xla.lowering import registry

    (op,) = [o for o in opinfo.op_db if o.name == "sin"]
    row = registry.lookup(torch.ops.aten.sin.default)
    assert row is not None
    from dataclasses import replace

    wrong = replace(row, fn=lambda x: jnp.sin(x) * (1 + 1e-3))
    monkeypatch.setitem(registry._TABLE, torch.ops.aten.sin.default, wrong)
    outcome = opinfo.run(op, torch.float32, "openxla", limit=2)
    assert outcome.status == "wrong"
    assert "differs from eager" in next(iter(outcome.reasons))
