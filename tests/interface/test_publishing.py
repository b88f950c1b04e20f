"""What torch's structured logs (`TORCH_TRACE`) get, under which compilation of Dynamo's."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo_backends.interface.publishing import log_structured_trace
from dynamo_backends.interface.report import CandidateReport, GraphReport, isolate_trial_reports
from tests.bench.programs import ROOT

PROGRAM = """
import torch

@torch.compile(backend="openxla", options={"keep_in_eager": ("aten.tanh",), "min_block_size": 1})
def first(x):
    return (x.sin() @ x).tanh().cos()

@torch.compile(backend="openxla", dynamic=True)
def second(x):
    return x.sin() + x

@torch.compile(backend="autotune", options={"candidates": ("openxla",), "budget_s": 5})
def third(x):
    return (x @ x).exp()

with torch.no_grad():
    first(torch.randn(4, 4))
    second(torch.randn(5))
    second(torch.randn(7))
    third(torch.randn(64, 64))
"""


def documents(folder: Path) -> list[tuple[str, str, Any]]:
    """Dynamo's id of the compilation, name and contents of each document of this package's."""
    found = []
    for log in folder.glob("*.log"):
        records = log.read_text().split("\nV")
        for record in records:
            head, _, payload = record.partition("\n\t")
            told = json.loads(head[head.index("{") :])
            name = told.get("artifact", {}).get("name", "")
            if name.startswith("dynamo_backends_"):
                number = f"{told['frame_id']}/{told['frame_compile_id']}"
                contents = json.loads(payload.replace("\n\t", "\n"))
                found.append((number, name.removeprefix("dynamo_backends_"), contents))
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str, Any]]:
    folder = tmp_path_factory.mktemp("trace")
    program = folder / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "TORCH_TRACE": str(folder), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, program], env=environment, check=True, timeout=300)
    return documents(folder)


def test_a_graph_is_told_with_what_runs_where_and_why(told: list[tuple[str, str, Any]]):
    (report,) = [told for number, name, told in told if (number, name) == ("0/0", "graph")]
    assert [part["runs_on"] for part in report["parts"]] == ["openxla", "eager", "openxla"]
    assert report["fallbacks"][0]["reason"] == "the option keep_in_eager names it"
    assert report["compile_id"] == "0/0"


def test_sizes_are_told_after_the_compilation_under_its_id(told: list[tuple[str, str, Any]]):
    sizes = [told for number, name, told in told if (number, name) == ("1/0", "sizes")]
    assert sizes
    assert sizes[0]["served"][0]["shapes"] != []
    assert list(sizes[0]["symbols"].values()) != []


def test_a_decision_of_autotune_is_told(told: list[tuple[str, str, Any]]):
    (decision,) = [told for number, name, told in told if (number, name) == ("2/0", "autotune")]
    assert {c["name"] for c in decision["candidates"]} == {"eager", "openxla"}
    assert decision["chosen"] in ("eager", "openxla")


def test_errors_that_are_no_numbers_are_told_as_words(monkeypatch: pytest.MonkeyPatch):
    payloads: list[Callable[[], Any]] = []
    monkeypatch.setattr(
        "dynamo_backends._torch_private.trace_artifact",
        lambda _name, payload, _id: payloads.append(payload),
    )
    wrong = CandidateReport("openxla", "wrong", error=math.inf), CandidateReport("ov", error=0.5)
    log_structured_trace(GraphReport("autotune", "inference", candidates=wrong), "autotune")
    told = json.loads(json.dumps(payloads[0](), allow_nan=False))
    assert [c["error"] for c in told["candidates"]] == ["Infinity", 0.5]


def test_nothing_is_told_of_graphs_on_trial(monkeypatch: pytest.MonkeyPatch):
    names: list[str] = []
    monkeypatch.setattr(
        "dynamo_backends._torch_private.trace_artifact", lambda name, *_: names.append(name)
    )
    with isolate_trial_reports():
        log_structured_trace(GraphReport("openxla", "inference"), "graph")
    assert names == []
    log_structured_trace(GraphReport("openxla", "inference"), "graph")
    assert names == ["dynamo_backends_graph"]
