"""Decisions on disk: found by other processes, ignored when damaged, carried to other machines."""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynamo_backends
from dynamo_backends.aot.traces import FOLDER as TRACES
from dynamo_backends.autotune.candidates import SPLIT, Candidate
from dynamo_backends.autotune.decisions import FORMAT, Decision, DecisionStore
from dynamo_backends.cli.main import main
from dynamo_backends.interface.report import CandidateReport
from dynamo_backends.openvino.backend import OpenVINO
from dynamo_backends.runtime.cache import DiskCache, cache_folder
from dynamo_backends.tvm.records import Record, Records
from dynamo_backends.workers.contention import Contention
from dynamo_backends.workers.progress import Counts
from dynamo_backends.workers.race import Race
from tests.autotune.planted import Slow

PROGRAM = """
import json
import torch
import dynamo_backends
from dynamo_backends.workers.progress import COUNTS
from tests.autotune.planted import Slow

torch.manual_seed(0)
model, x = Slow(), torch.ones(40, 50)
options = {"candidates": ["good", "ts_trace"], "isolate": "off"}
with torch.no_grad(), dynamo_backends.record() as reports:
    result = torch.compile(model, backend="autotune", options=options)(x)[0]
    torch.testing.assert_close(result, model(x)[0])
names = [row.name for row in reports[0].candidates]
print(json.dumps([vars(COUNTS), reports[0].chosen, names]))
"""


def decision(key: str = "a" * 64, **more: Any) -> Decision:
    rows = (CandidateReport("openxla", speedup=(1.5, 1.4, 1.6)), CandidateReport("eager", "slow"))
    given = {"graph": "inference", "ops": 3, "inputs": ("float32[2]",), "mutated": (1,)}
    given |= {"candidates": rows, "objective": "latency", "precision": "float32", "created": 5.0}
    return Decision(key, "openxla", **{**given, **more})


@pytest.mark.usefixtures("plant")
def test_another_process_measures_nothing_and_compiles_the_winner_alone(
    planted_folder: Path, capsys: pytest.CaptureFixture[str]
):
    exec(PROGRAM, {})
    here = capsys.readouterr().out
    path = os.pathsep.join((str(planted_folder), str(Path(__file__).parents[2])))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(out.splitlines()[-1]) for out in (here, done.stdout)]
    (first, chosen, names), (second, chosen_again, names_again) = found
    assert first["sessions"] == 1
    assert first["compiled"] == 2
    assert first["samples"] > 0
    nothing = {"sessions": 0, "verified": 0, "samples": 0, "replaced": 0}
    assert second == {"remembered": 1, "compiled": 1, **nothing}
    assert chosen == chosen_again == "good"
    assert sorted(names) == sorted(names_again) == ["eager", "good", "ts_trace"]


def tune(**options: Any) -> str:
    torch._dynamo.reset()
    options = {"candidates": ["good"], "isolate": "off", **options}
    model, x = Slow(), torch.ones(40, 50)
    with torch.no_grad(), dynamo_backends.record() as reports:
        compiled = torch.compile(model, backend="autotune", options=options)
        torch.testing.assert_close(compiled(x), model(x))
    return reports[0].chosen


def _shorten(path: Path) -> None:
    path.write_text(path.read_text()[:-40])


def _rename_winner(path: Path) -> None:
    path.write_text(path.read_text().replace('"winner": "openxla"', '"winner": "nobody"'))


def _of_another_graph(path: Path) -> None:
    path.write_text(path.read_text().replace(path.stem, "b" * 64))


def _other_format(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": FORMAT + 1}))


def _foreign(path: Path) -> None:
    path.write_bytes(b"\x80\x04]\x94.")


_PARTS = ("candidates", "graph", "ops", "inputs", "environment", "created")


@pytest.mark.parametrize("part", _PARTS)
def test_a_part_of_a_wrong_type_is_ignored(part: str):
    DecisionStore().put(decision())
    path = DecisionStore().folder / f"{'a' * 64}.json"
    told = json.loads(path.read_text())
    for wrong in (None, {"a": 1} if part != "environment" else [1]):
        path.write_text(json.dumps({**told, part: wrong}))
        assert DecisionStore().get("a" * 64) is None


@pytest.mark.parametrize(
    "damage", [_shorten, _rename_winner, _of_another_graph, _other_format, _foreign]
)
def test_a_damaged_or_foreign_file_is_ignored_with_a_warning(
    damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
):
    DecisionStore().put(decision())
    path = DecisionStore().folder / f"{'a' * 64}.json"
    assert DecisionStore().get("a" * 64) == decision()
    damage(path)
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        assert DecisionStore().get("a" * 64) is None
    assert f"ignored an unusable decision of autotune, {path}" in caplog.text
    assert DecisionStore().all() == []


@pytest.mark.usefixtures("plant")
def test_a_graph_with_a_damaged_decision_is_tuned_anew(
    counts: Counts, caplog: pytest.LogCaptureFixture
):
    assert tune() == "good"
    (path,) = DecisionStore().folder.glob("*.json")
    _shorten(path)
    assert tune() == "good"
    assert "ignored an unusable decision" in caplog.text
    assert counts.sessions == 2
    assert tune() == "good"
    assert counts.sessions == 2, "it was not written anew"


def test_a_vendors_version_counts_for_its_own_candidates(monkeypatch: pytest.MonkeyPatch):
    competing = [Candidate(name, name, "ours") for name in ("onnxrt", "ov", "ofi", SPLIT)]
    before = [c.dependency_versions() for c in competing]
    monkeypatch.setattr(OpenVINO, "versions", lambda self: {"openvino": "9999.1"})
    after = [c.dependency_versions() for c in competing]
    changed = [c.name for c, old, new in zip(competing, before, after, strict=True) if old != new]
    assert changed == ["ov", SPLIT]
    assert after[1] == "openvino 9999.1"


@pytest.mark.usefixtures("plant")
def test_what_the_decision_depends_on(counts: Counts, monkeypatch: pytest.MonkeyPatch):
    tune()
    tune()
    assert counts.sessions == 1
    tune(objective="throughput")
    tune(candidates=["good", "wrong_alias"])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    tune()
    assert counts.sessions == 4
    tune(cache=False)
    assert counts.sessions == 5
    assert counts.remembered == 1


@pytest.mark.usefixtures("plant")
def test_the_fingerprint_tells_graphs_apart_and_not_weights(counts: Counts):
    linear, other = nn.Linear(4, 4), nn.Linear(4, 4)
    for model in (linear, other, nn.Sequential(linear, nn.ReLU())):
        torch._dynamo.reset()
        options = {"candidates": ["eager"]}
        with torch.no_grad():
            torch.compile(model, backend="autotune", options=options)(torch.ones(2, 4))
    assert (counts.sessions, counts.remembered) == (2, 1)


def test_a_decision_survives_json():
    given = decision(short_of_s=1.5, disturbed=2)
    assert Decision.from_dict(json.loads(json.dumps(given.to_dict()))) == given


@pytest.mark.parametrize(
    ("disturbed", "age_s", "holds"),
    [(0, 1e6, True), (1, 60, True), (1, 7200, False), (2, 7200, False), (3, 1e6, True)],
)
def test_a_decision_of_a_busy_machine_is_made_again(disturbed: int, age_s: float, holds: bool):
    made = decision(disturbed=disturbed, created=time.time() - age_s)
    assert made.is_valid_for({"openxla"}, 60) is holds


@pytest.mark.usefixtures("plant")
def test_a_session_on_a_busy_machine_says_so(monkeypatch: pytest.MonkeyPatch):
    busy = Contention(of_others=1.0, preempted=1.0)
    monkeypatch.setattr(Race, "_contention", lambda *_: busy)
    monkeypatch.setattr(Race, "_clear", lambda *_: False)
    model, options = nn.Linear(4, 4), {"candidates": ["eager"]}
    for expected in (1, 2):
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(model, backend="autotune", options=options)(torch.ones(2, 4))
        (found,) = DecisionStore().all()
        assert found.disturbed == expected
        DecisionStore().put(replace(found, created=5.0))


def test_nothing_is_read_from_a_folder_that_others_can_write_to(caplog: pytest.LogCaptureFixture):
    decisions = DecisionStore()
    assert decisions.put(decision())
    assert decisions.get("a" * 64) == decision()
    decisions.folder.chmod(0o777)
    assert decisions.get("a" * 64) is None
    assert "is not used: others can write to" in caplog.text


def test_export_and_import_carry_decisions(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    DecisionStore().put(decision())
    DecisionStore().put(decision("c" * 64, created=9.0))
    file = tmp_path / "fleet.json"
    assert main(["cache", "export", str(file)]) == 0
    assert main(["cache", "clear"]) == 0
    assert DecisionStore().all() == []
    newer = decision("c" * 64, created=10.0)
    DecisionStore().put(newer)
    assert main(["cache", "import", str(file)]) == 0
    assert "imported 1 decisions, skipped 1 that are not newer" in capsys.readouterr().out
    assert DecisionStore().all() == [newer, decision()]


def test_the_key_of_an_import_is_no_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    DecisionStore().put(decision())
    file = tmp_path / "fleet.json"
    assert main(["cache", "export", str(file)]) == 0
    file.write_text(file.read_text().replace("a" * 64, "../" + "a" * 61))
    assert main(["cache", "import", str(file)]) == 2
    assert "its key is not a hash" in capsys.readouterr().err
    assert not list(DecisionStore().folder.parent.glob("aaa*"))


def test_clear_forgets_schedules_and_on_request_executables(capsys: pytest.CaptureFixture[str]):
    compiled = DiskCache(cache_folder())
    DecisionStore().put(decision())
    compiled.put("graph", {"code": b"1"})
    traced = DiskCache(cache_folder() / TRACES)
    traced.put("graph", {"graph": b"1"})
    records = Records("this machine")
    records.put("function", Record(None, ""))
    assert main(["cache", "clear"]) == 0
    assert "removed 1 tuned schedules" in capsys.readouterr().out
    assert (DecisionStore().all(), records.get("function")) == ([], None)
    assert None not in (compiled.get("graph"), traced.get("graph"))
    assert main(["cache", "clear", "--executables"]) == 0
    said = capsys.readouterr().out
    assert "removed 1 compiled graphs" in said
    assert "removed 1 traced graphs" in said
    assert compiled.get("graph") is traced.get("graph") is None


def test_ls_and_show(capsys: pytest.CaptureFixture[str]):
    DecisionStore().put(decision())
    DecisionStore().put(decision("ab" * 32))
    assert main(["cache", "ls"]) == 0
    listed = capsys.readouterr().out
    assert "a" * 12 in listed
    assert "1.50" in listed
    assert main(["cache", "show", "aaa", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["winner"] == "openxla"
    assert main(["cache", "show", "aaa"]) == 0
    shown = capsys.readouterr().out
    assert "slow" in shown
    assert "tuning took: compile 0.00 s" in shown


@pytest.mark.parametrize(
    ("key", "problem"), [("a", "2 decisions have a key"), ("f", "no decision")]
)
def test_a_key_that_is_not_unique_or_not_there(
    key: str, problem: str, capsys: pytest.CaptureFixture[str]
):
    DecisionStore().put(decision())
    DecisionStore().put(decision("ab" * 32))
    assert main(["cache", "show", key]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert "`dynamo-backends cache ls` to list the 2 keys" in error


@pytest.mark.parametrize("text", ["{", "[]", '{"decisions": [{"format": 0}]}'])
def test_a_file_that_is_no_export(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "x.json"
    file.write_text(text)
    assert main(["cache", "import", str(file)]) == 2
    assert "Pass a file that `dynamo-backends cache export` has written" in capsys.readouterr().err
