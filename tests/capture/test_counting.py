"""`dynamo_backends.counters()`: what a process compiled and ran, for monitoring."""

import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

import dynamo_backends
from dynamo_backends.interface.counters import Counters, count_live_executables, track_executable
from dynamo_backends.pipeline.captured import compile_captured
from tests.bench.programs import ROOT
from tests.test_pipeline import Careless, Failing


def counted(act: Callable[[], Any]) -> dict[str, float]:
    """By how much counters that changed grew."""
    before = dynamo_backends.counters()
    act()
    after = dynamo_backends.counters()
    return {k: after[k] - before[k] for k in after if after[k] != before[k]}


def test_compilations_are_counted_once():
    compiled = torch.compile(lambda x: (x.sin() @ x).cos() + 1, backend="openxla")
    x = torch.randn(5, 5)
    gc.collect()
    grew = counted(lambda: compiled(x))
    seconds = grew.pop("compile_seconds")
    assert 0 < seconds < 60
    grew.pop("cache_hits", None)
    assert grew == {"compilations": 1, "executables": 1, "executables_kept": 1, "compared": 1}
    assert counted(lambda: compiled(x)) == {}


def test_executables_that_leave_are_not_counted_as_kept():
    executable = Failing()
    gc.collect()
    before = count_live_executables()
    track_executable(executable)
    assert count_live_executables() == before + 1
    del executable
    assert count_live_executables() == before


def test_code_that_fails_is_counted():
    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        options = dynamo_backends.Options(verify="off")
        return compile_captured(Careless(None), gm, inputs, options)

    compiled = torch.compile(lambda x: (x * 2).sin() + 1, backend=backend)
    grew = counted(lambda: compiled(torch.randn(3)))
    assert grew["failed"] == 1
    assert "wrong" not in grew


def test_calls_in_eager_are_counted():
    compiled = torch.compile(lambda x: (x * 2).sin() + 1, backend="openxla")
    x = torch.randn(4)

    def under_run() -> None:
        with dynamo_backends.run():
            compiled(x)
            compiled(x)

    assert "compilations" not in counted(under_run)

    beside = torch.compile(
        lambda x: (x * 3).sin() + 1, backend="openxla", options={"while_compiling": "eager"}
    )
    assert counted(lambda: beside(x))["eager_calls"] == 1


def test_changed_weights_are_counted():
    layer = torch.nn.Linear(4, 4)
    compiled = torch.compile(layer, backend="onnxrt")

    def change() -> None:
        layer.weight.mul_(2)
        torch.testing.assert_close(compiled(x), layer(x))

    x = torch.randn(2, 4)
    with torch.no_grad():
        compiled(x)
        assert counted(change)["rebinds"] == 1


def test_a_step_is_a_compilation():
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def train(x: Tensor) -> Tensor:
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = dynamo_backends.compile_step(train, model=layer, optimizer=optimizer)
    step(torch.randn(2, 4))  # in eager
    grew = counted(lambda: step(torch.randn(2, 4)))
    assert (grew["compilations"], grew["executables"]) == (1, 1)


def test_counts_of_several_threads_add_up():
    counts = Counters()
    threads = [
        threading.Thread(target=lambda: [counts.add(failed=1) for _ in range(2000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts.failed == 8000


def test_every_count_is_a_number_and_the_page_has_it():
    counters = dynamo_backends.counters()
    assert all(isinstance(value, int | float) for value in counters.values())
    page = (ROOT / "docs/explain.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert [name for name in counters if not any(f"`{name}`" in row for row in rows)] == []
