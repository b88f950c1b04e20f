"""Verdicts of trials are found once, also by later processes."""

import os
from typing import Any

import pytest
import torch

from dynamo_backends.runtime import verdicts
from dynamo_backends.runtime.verdicts import Verdict, Verdicts


class Trial:
    """A trial that counts how often it is made."""

    def __init__(self, verdict: Verdict):
        self.verdict = verdict
        self.count = 0

    def __call__(self) -> Verdict:
        self.count += 1
        assert not torch.is_grad_enabled()
        return self.verdict


@pytest.mark.parametrize("verdict", [Verdict(), Verdict("it is wrong"), Verdict(decomposed=True)])
def test_another_process_finds_what_was_kept(verdict: Verdict):
    trial = Trial(verdict)
    known = Verdicts("onnxrt", ())
    assert [known("add", trial, keep=True) for _ in range(2)] == [verdict, verdict]
    assert Verdicts("onnxrt", ())("add", trial, keep=True) == verdict  # as a new process would
    assert trial.count == 1


def test_what_is_not_to_be_kept_is_not():
    trial = Trial(Verdict())
    Verdicts("onnxrt", ())("add", trial, keep=False)
    Verdicts("onnxrt", ())("add", trial, keep=True)
    Verdicts("onnxrt", ())("add", trial, keep=False)
    assert trial.count == 3


def test_verdicts_hold_for_one_vendor_version_and_processor(monkeypatch: pytest.MonkeyPatch):
    trial = Trial(Verdict())
    Verdicts("onnxrt", ())("add", trial, keep=True)
    Verdicts("ov", ())("add", trial, keep=True)
    monkeypatch.setattr(verdicts, "processor", lambda: "another one")
    Verdicts("onnxrt", ())("add", trial, keep=True)
    monkeypatch.setattr(verdicts, "source_digest", lambda *parts, **_: "another one")
    Verdicts("onnxrt", ())("add", trial, keep=True)
    assert trial.count == 4


def test_a_damaged_entry_is_found_anew(caplog: pytest.LogCaptureFixture):
    trial = Trial(Verdict("it is wrong"))
    Verdicts("onnxrt", ())("add", trial, keep=True)
    (path,) = (verdicts.cache_folder() / verdicts.FOLDER).glob("*.bin")
    path.write_bytes(path.read_bytes()[:-1])
    assert Verdicts("onnxrt", ())("add", trial, keep=True) == Verdict("it is wrong")
    assert trial.count == 2
    assert "damaged" in caplog.text


def test_a_trial_that_fails_leaves_no_verdict():
    def fail() -> Verdict:
        raise MemoryError

    with pytest.raises(MemoryError):
        Verdicts("onnxrt", ())("add", fail, keep=True)
    trial = Trial(Verdict())
    assert Verdicts("onnxrt", ())("add", trial, keep=True) == Verdict()
    assert trial.count == 1


def test_keeping_a_verdict_does_not_look_through_those_that_are_kept(
    monkeypatch: pytest.MonkeyPatch,
):
    seen: list[Any] = []
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: seen.append(folder) or scan(folder))
    known = Verdicts("onnxrt", ())
    for i in range(20):
        known.put(f"add {i}", Verdict(), keep=True)
    assert len(seen) == 1  # when the folder is opened
    assert Verdicts("onnxrt", ()).get("add 19", keep=True) == Verdict()
