"""Verdicts of trials are found once, also by later processes."""

import os
from typing import Any

import pytest
import torch

from dynamo_backends.runtime import verdicts
from dynamo_backends.runtime.verdicts import TrialVerdict, VerdictStore


class Trial:
    """A trial that counts how often it is made."""

    def __init__(self, verdict: TrialVerdict):
        self.verdict = verdict
        self.count = 0

    def __call__(self) -> TrialVerdict:
        self.count += 1
        assert not torch.is_grad_enabled()
        return self.verdict


@pytest.mark.parametrize(
    "verdict", [TrialVerdict(), TrialVerdict("it is wrong"), TrialVerdict(decomposed=True)]
)
def test_another_process_finds_what_was_kept(verdict: TrialVerdict):
    trial = Trial(verdict)
    known = VerdictStore("onnxrt", ())
    assert [known("add", trial, keep=True) for _ in range(2)] == [verdict, verdict]
    assert VerdictStore("onnxrt", ())("add", trial, keep=True) == verdict  # as a new process would
    assert trial.count == 1


def test_what_is_not_to_be_kept_is_not():
    trial = Trial(TrialVerdict())
    VerdictStore("onnxrt", ())("add", trial, keep=False)
    VerdictStore("onnxrt", ())("add", trial, keep=True)
    VerdictStore("onnxrt", ())("add", trial, keep=False)
    assert trial.count == 3


def test_verdicts_hold_for_one_vendor_version_and_processor(monkeypatch: pytest.MonkeyPatch):
    trial = Trial(TrialVerdict())
    VerdictStore("onnxrt", ())("add", trial, keep=True)
    VerdictStore("ov", ())("add", trial, keep=True)
    monkeypatch.setattr(verdicts, "cpu_cache_key", lambda: "another one")
    VerdictStore("onnxrt", ())("add", trial, keep=True)
    monkeypatch.setattr(verdicts, "source_digest", lambda *parts, **_: "another one")
    VerdictStore("onnxrt", ())("add", trial, keep=True)
    assert trial.count == 4


def test_a_damaged_entry_is_found_anew(caplog: pytest.LogCaptureFixture):
    trial = Trial(TrialVerdict("it is wrong"))
    VerdictStore("onnxrt", ())("add", trial, keep=True)
    (path,) = (verdicts.cache_folder() / verdicts.FOLDER).glob("*.bin")
    path.write_bytes(path.read_bytes()[:-1])
    assert VerdictStore("onnxrt", ())("add", trial, keep=True) == TrialVerdict("it is wrong")
    assert trial.count == 2
    assert "damaged" in caplog.text


def test_a_trial_that_fails_leaves_no_verdict():
    def fail() -> TrialVerdict:
        raise MemoryError

    with pytest.raises(MemoryError):
        VerdictStore("onnxrt", ())("add", fail, keep=True)
    trial = Trial(TrialVerdict())
    assert VerdictStore("onnxrt", ())("add", trial, keep=True) == TrialVerdict()
    assert trial.count == 1


def test_keeping_a_verdict_does_not_look_through_those_that_are_kept(
    monkeypatch: pytest.MonkeyPatch,
):
    seen: list[Any] = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: seen.append(folder) or scan(folder))
    known = VerdictStore("onnxrt", ())
    for i in range(20):
        known.put(f"add {i}", TrialVerdict(), keep=True)
    assert len(seen) == 1  # when the folder is opened
    assert VerdictStore("onnxrt", ()).get("add 19", keep=True) == TrialVerdict()
