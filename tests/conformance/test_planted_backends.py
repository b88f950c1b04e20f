"""What backends do wrong shows as what it is, and no run stops."""

import json
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing._internal.opinfo.core import SampleInput

from dynamo_backends.cli import main
from dynamo_backends.conformance.catalogue import CheckRunner, Settings, checks, run
from dynamo_backends.conformance.operators import running
from dynamo_backends.conformance.outcomes import Check, Outcome
from tests.conformance import planted
from tests.conformance.planted import SLOW_S

MODULE = planted.__name__

ADD = Check("operators", "add", "float32")
MUTATES = Check("semantics", "operators in place change the callers tensors")
WEIGHTS = Check("weights", "changed: in place")
SIZES = Check("traffic", "sizes of one and none")


def outcome(backend: str, check: Check) -> Outcome:
    return run(check, Settings(f"{MODULE}:{backend}"))


@pytest.mark.parametrize("check", [ADD, MUTATES, WEIGHTS, SIZES], ids=str)
def test_a_right_backend_passes(check: Check):
    found = outcome("right", check)
    assert (found.status, found.reason) == ("native", "")


@pytest.mark.parametrize(
    ("backend", "check", "status", "reason"),
    [
        ("wrong", ADD, "wrong", "output 0 differs from eager by up to"),
        ("wrong", Check("gradients", "tanh", "float32"), "wrong", "output 0 differs from eager"),
        ("wrong", Check("models", "control_flow/branch_on_shape, training"), "wrong", "differs"),
        ("single", Check("operators", "special.bessel_j0", "float64"), "wrong", "in float64"),
        ("single", Check("gradients", "tanh", "float64"), "wrong", "in float64"),
        ("raising", ADD, "raises", "RuntimeError: no licence"),
        ("raising", WEIGHTS, "raises", "RuntimeError: no licence"),
        ("raising_later", MUTATES, "raises", "AssertionError: inputs are not supported"),
        ("forgetful", MUTATES, "wrong", "input 0 differs from eager by up to"),
        ("stale", WEIGHTS, "wrong", "the weights from before the change: in place"),
        ("static", SIZES, "raises", "RuntimeError: compiled for [torch.Size([3, 4])]"),
        ("seedless", Check("semantics", "random numbers equal eagers"), "random", "not eager's"),
    ],
    ids=str,
)
def test_what_is_wrong_has_a_name(backend: str, check: Check, status: str, reason: str):
    found = outcome(backend, check)
    assert found.status == status, found
    assert reason in found.reason


def test_an_operators_own_random_numbers_are_not_wrong():
    """Those of the database set the seed themselves, so this one is made up."""
    ones = [torch.ones(n, dtype=torch.float64) for n in (3, 4)]
    op: Any = SimpleNamespace(
        name="draws",
        variant_test_name="",
        op=torch.rand_like,
        sample_inputs=lambda *_, **__: [SampleInput(x) for x in ones],
    )
    found = running.run(op, torch.float64, f"{MODULE}:seedless")
    assert (found.status, found.reason) == ("random", "random numbers are not eager's")
    assert running.run(op, torch.float64, f"{MODULE}:right").status == "native"


@pytest.mark.parametrize(
    ("backend", "passes"),
    [("forgetful", {WEIGHTS, SIZES}), ("stale", {MUTATES, SIZES}), ("static", {MUTATES, WEIGHTS})],
)
def test_what_is_not_concerned_passes(backend: str, passes: Collection[Check]):
    assert {check: outcome(backend, check).status for check in passes} == dict.fromkeys(
        passes, "native"
    )


def command(backend: str, folder: Path, *more: str) -> tuple[int, dict[str, Any]]:
    status = main(["conformance", f"{MODULE}:{backend}", "--output", str(folder), *more])
    (file,) = folder.glob("*.json")
    return status, json.loads(file.read_text())


def test_a_crash_is_shown_with_its_signal(tmp_path: Path):
    only = ("--groups", "semantics", "--only", "in place on a view*")
    status, found = command("crashing", tmp_path, *only)
    assert status == 1
    assert [x["status"] for x in found["results"]] == ["crash"]
    assert all("the process died of SIGABRT" in str(x["reasons"]) for x in found["results"])
    (page,) = tmp_path.glob("*.md")
    text = page.read_text(encoding="utf-8")
    assert "1 of 1 checks fail: 1 crash." in text
    assert "| `semantics/in place on a view of an input` | crash | the process died of" in text


def test_a_run_goes_on_after_a_crash_that_comes_from_earlier_checks(tmp_path: Path):
    only = ("--groups", "semantics", "--only", "dtypes*int*", "dtypes*float16")
    status, found = command("crashing_at_last", tmp_path, *only)
    assert status == 1
    statuses = [x["status"] for x in found["results"]]
    assert statuses == ["native"] * 4 + ["crash"] + ["native"] * 2
    reasons = str(found["results"][4]["reasons"])
    assert "after other checks; in a process of its own: native" in reasons


def test_what_does_not_end_is_a_timeout(tmp_path: Path):
    only = ("--groups", "weights", "--only", "tied*", "moved*4")
    status, found = command("hanging", tmp_path, *only, "--time-limit", "1")
    assert status == 1
    assert {x["name"]: x["status"] for x in found["results"]} == {
        "tied weights": "timeout",
        "moved to: float64": "timeout",
    }
    assert "did not finish within 1 s" in str(found["results"])


def test_a_run_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    first, both = ("--groups", "semantics", "--only", "none*"), ("an input*",)
    command("right", tmp_path, *first)
    assert main(["conformance", f"{MODULE}:right", "--output", str(tmp_path), *first]) == 2
    assert "Pass --resume to continue this run" in capsys.readouterr().err
    status, found = command("right", tmp_path, *first, *both, "--resume")
    assert status == 0
    assert {x["name"] for x in found["results"]} == {
        "none and nested outputs",
        "an input returned as it is",
    }
    (journal,) = tmp_path.glob("*.jsonl")
    assert len(journal.read_text().splitlines()) == 3, "what it depends on, and each once"
    other = ["--samples", "3", "--resume", "--output", str(tmp_path)]
    assert main(["conformance", f"{MODULE}:right", *other]) == 2
    assert "were obtained under other conditions: samples is 3 and was 1" in capsys.readouterr().err


def test_what_is_slow_is_timed():
    work = CheckRunner(Settings(f"{MODULE}:slow", threads=torch.get_num_threads()))
    assert work(MUTATES).seconds >= SLOW_S


def test_nothing_matches(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["conformance", "eager", "--only", "nothing", "--output", str(tmp_path)]) == 2
    assert "no check matches --groups" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_names_of_checks_are_unique():
    found = checks(Settings("eager", groups=("semantics", "weights", "traffic", "models")))
    assert len(set(map(str, found))) == len(found)
