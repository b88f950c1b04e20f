"""Two runs side by side."""

from dataclasses import replace
from pathlib import Path

import pytest

from dynamo_backends.bench import saved_run
from dynamo_backends.bench.cells import Outcome, Run, Speedup
from dynamo_backends.bench.comparison import compare_runs
from dynamo_backends.cli import main
from dynamo_backends.workers.statistics import speedup
from tests.bench.made_up import failing, passing, run_of

BEFORE = run_of(
    {
        ("same", "x"): passing(1.5, seed=1),
        ("slower", "x"): passing(1.5, seed=2),
        ("faster", "x"): passing(1.5, seed=3),
        ("little", "x"): passing(1.5, seed=4),
        ("noisy", "x"): passing(1.5, seed=5, rounds=5, noise=0.5),
        ("broke", "x"): passing(1.5, seed=6),
        ("mended", "x"): failing("timeout"),
        ("eager", "x"): passing(1.5, seed=7),
        ("gone", "x"): passing(1.5, seed=8),
    }
)
AFTER = run_of(
    {
        ("same", "x"): passing(1.5, seed=11),
        ("slower", "x"): passing(1.2, seed=12),
        ("faster", "x"): passing(1.8, seed=13),
        ("little", "x"): passing(1.45, seed=14),
        ("noisy", "x"): passing(1.3, seed=15, rounds=5, noise=0.5),
        ("broke", "x"): failing("fail_accuracy", "output 0 differs"),
        ("mended", "x"): passing(1.5, seed=16),
        ("eager", "x"): failing("eager_fail_to_run", stage="load"),
        ("new", "x"): passing(1.5, seed=17),
    }
)


def test_what_changes_clearly_is_found_and_what_does_not_is_left_alone():
    found = compare_runs(BEFORE, AFTER)
    by: dict[str, set[str]] = {}
    for change in found.changes:
        by.setdefault(change.verdict, set()).add(change.cell.model)
    assert by == {
        "regression": {"slower", "broke"},
        "improvement": {"faster", "mended"},
        "same": {"same", "little", "noisy", "eager"},
    }
    slower = next(c for c in found.changes if c.cell.model == "slower")
    assert slower.ratio == pytest.approx(0.8, abs=0.02)
    assert slower.low is not None
    assert slower.high is not None
    assert slower.low < slower.ratio < slower.high < 1
    assert [c.model for c in found.missing] == ["gone"]
    assert [c.model for c in found.new] == ["new"]
    assert found.headline == "2 regressions and 2 improvements in 8 cells that both runs have."


def slowed(outcome: Outcome, eager: float, backend: float) -> Outcome:
    """The outcome on a machine on which other programs run."""
    first, second = ([t * by for t in times] for times, by in
                     ((outcome.eager_s, eager), (outcome.backend_s, backend)))  # fmt: skip
    found = speedup(first, second)
    return replace(
        outcome,
        eager_s=tuple(first),
        backend_s=tuple(second),
        load=1.7,
        speedup=Speedup(found.value, found.low, found.high, 0.001),
    )


def test_what_a_busy_machine_does_to_eager_is_no_improvement():
    quiet = passing(1.5, seed=1)
    before = run_of({("same code", "x"): quiet, ("faster", "x"): quiet})
    after = run_of(
        {("same code", "x"): slowed(quiet, 2.9, 1.1), ("faster", "x"): slowed(quiet, 1.5, 0.7)}
    )
    changes = {c.cell.model: c for c in compare_runs(before, after).changes}
    assert {name: c.verdict for name, c in changes.items()} == {
        "same code": "same",
        "faster": "improvement",
    }
    assert changes["same code"].text.endswith(
        "eager took 2.90 times as long (other processes used 0.1 and 1.7 CPUs)"
    )
    assert "eager" not in compare_runs(before, before).changes[0].text.partition("×")[2][7:]
    other = replace(after, context={**after.context, "processor": "a slower one"})
    assert not [c for c in compare_runs(before, other).changes if c.verdict == "same"]


def test_a_smaller_threshold_finds_smaller_changes():
    found = compare_runs(BEFORE, AFTER, threshold=0.01)
    assert "little" in {c.cell.model for c in found.of("regression")}


def save(run: Run, path: Path) -> str:
    saved_run.save(run, path)
    return str(path)


def test_the_command_prints_writes_a_page_and_exits_by_what_it_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    before, after = save(BEFORE, tmp_path / "a.json"), save(AFTER, tmp_path / "b.json")
    assert main(["bench", "compare", before, before]) == 0
    assert "no regressions and no improvements in 9 cells" in capsys.readouterr().out
    page = tmp_path / "comparison.html"
    assert main(["bench", "compare", before, after, "--html", str(page)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "pass → fail_accuracy (output 0 differs)" in said
    assert "2 regressions and 2 improvements" in said
    assert "pass → fail_accuracy (output 0 differs)" in page.read_text(encoding="utf-8")


def test_other_machines_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    other = Run({**AFTER.context, "processor": "another"}, AFTER.cells, AFTER.outcomes)
    before, after = save(BEFORE, tmp_path / "a.json"), save(other, tmp_path / "b.json")
    main(["bench", "compare", before, after])
    said = " ".join(capsys.readouterr().out.split())
    assert "the runs differ: processor is 'another' and was 'a processor'" in said


def test_two_files_are_needed(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "compare", "one.json"]) == 2
    assert "bench compare BEFORE.json AFTER.json" in capsys.readouterr().err
    assert main(["bench", "compare", "one.json", "none.json"]) == 2
    assert "one.json cannot be read: No such file or directory." in capsys.readouterr().err
