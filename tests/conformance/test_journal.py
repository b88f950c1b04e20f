"""A long run can go on after an interruption."""

from collections import Counter
from pathlib import Path

from tests.conformance.journal import Journal
from tests.conformance.opinfo import Outcome

RIGHT = Outcome("sin", "float32", 3, "fallback", Counter({"because": 2}))
WRONG = Outcome("cos", "float32", 1, "wrong", Counter({"it differs": 1}))


def test_what_is_done_is_found_again_and_failures_are_not(tmp_path: Path):
    first = Journal(tmp_path / "new" / "j.jsonl", resume=False)
    first.add(RIGHT)
    first.add(WRONG)
    assert set(first.outcomes) == {("sin", "torch.float32"), ("cos", "torch.float32")}
    again = Journal(tmp_path / "new" / "j.jsonl", resume=True)
    assert again.outcomes == {("sin", "torch.float32"): RIGHT}


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
