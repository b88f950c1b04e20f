"""A long run can go on after an interruption."""

from collections import Counter
from pathlib import Path

import pytest

from dynamo_backends.conformance.journal import Journal, LedgerError
from dynamo_backends.conformance.outcomes import FAILURES, Check, Outcome

RIGHT = Outcome("sin", "float32", 3, "fallback", Counter({"because": 2}))
WRONG = Outcome("cos", "float32", 1, "wrong", Counter({"it differs": 1}))


def test_what_is_done_is_found_again_and_failures_if_they_are_not_to_be_tried_again(tmp_path: Path):
    first = Journal(tmp_path / "new" / "j.jsonl", resume=False)
    first.add(RIGHT)
    first.add(WRONG)
    sin, cos = (Check("operators", name, "float32") for name in ("sin", "cos"))
    assert set(first.outcomes) == {sin, cos}
    again = Journal(tmp_path / "new" / "j.jsonl", resume=True, again=FAILURES)
    assert again.outcomes == {sin: RIGHT}
    everything = Journal(tmp_path / "new" / "j.jsonl", resume=True)
    assert everything.outcomes == {sin: RIGHT, cos: WRONG}


def test_a_line_that_was_cut_off_is_ignored(tmp_path: Path):
    path = tmp_path / "j.jsonl"
    Journal(path, resume=False).add(RIGHT)
    text = path.read_text()
    path.write_text(text + text[: len(text) // 2])
    assert list(Journal(path, resume=True).outcomes.values()) == [RIGHT]


def test_a_new_run_starts_anew(tmp_path: Path):
    Journal(tmp_path / "j.jsonl", resume=False).add(RIGHT)
    assert Journal(tmp_path / "j.jsonl", resume=False).outcomes == {}
    assert Journal(tmp_path / "j.jsonl", resume=True).outcomes == {}


def test_results_of_another_context_are_refused(tmp_path: Path):
    path = tmp_path / "j.jsonl"
    Journal(path, resume=False, context={"torch": "1", "samples": None}).add(RIGHT)
    assert len(Journal(path, True, context={"torch": "1", "samples": None}).outcomes) == 1
    with pytest.raises(LedgerError, match="under other conditions: torch is '2' and was '1'"):
        Journal(path, True, context={"torch": "2", "samples": None})
