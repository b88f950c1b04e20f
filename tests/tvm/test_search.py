"""Schedules that are proposed: different ones, which another process can make again."""

import json

import pytest

from dynamo_backends.tvm import search
from dynamo_backends.tvm.schedules import apply_default_schedule
from dynamo_backends.tvm.search import Proposal, Search, replayed, structural_fingerprint
from dynamo_backends.tvm.session import vector_lanes
from tests.tvm.tuning_checks import ADD, MATMUL, isolated, parsed

__all__ = ["isolated"]
pytestmark = pytest.mark.usefixtures("isolated")


def proposals(text: str, count: int) -> list[Proposal]:
    finding = Search(parsed(text), 1, 1)
    found = []
    for _ in range(count):
        one = finding.propose()
        if one is None:
            break
        finding.tell(one, 1.0 + len(found))
        found.append(one)
    return found


def test_they_differ_and_none_is_the_default_one():
    found = proposals(MATMUL, 24)
    default = structural_fingerprint(apply_default_schedule(parsed(MATMUL), 1, vector_lanes()))
    assert len({p.mark for p in found} | {default}) == 25
    assert {type(p.trace) for p in found} == {dict, list}


def test_another_process_makes_the_same_of_their_traces():
    function = parsed(parsed(MATMUL).script())
    for proposal in proposals(MATMUL, 12):
        trace = json.loads(json.dumps(proposal.trace))
        assert replayed(function, trace, 1).mark == proposal.mark


def test_fast_ones_are_changed_a_little(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(search, "_AT_RANDOM", 0)
    monkeypatch.setattr(search, "_OFTEN", 1 << 30)
    finding = Search(parsed(MATMUL), 1, 1)
    finding._tiles.clear()
    parent = finding.propose()
    assert parent is not None
    finding.tell(parent, 1.0)
    for _ in range(5):
        child = finding.propose()
        assert child is not None
        _, decisions = child.trace
        changed = [d for d in decisions if d not in parent.trace[1]]
        assert 1 <= len(changed) <= 3
        assert len(decisions) > 3


def test_a_small_space_is_exhausted():
    assert len(proposals(ADD, 100)) < 20


def test_names_of_variables_make_no_other_function():
    assert structural_fingerprint(parsed(MATMUL)) == structural_fingerprint(
        parsed(MATMUL.replace("a[", "first[").replace("a:", "first:"))
    )
    assert structural_fingerprint(parsed(MATMUL)) != structural_fingerprint(
        parsed(MATMUL.replace("24", "28"))
    )
