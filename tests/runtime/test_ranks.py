"""Whom a process blames if it waits for others in vain."""

import pytest

from dynamo_backends.runtime.rank_monitor import DOUBT, SILENCE, RankHeartbeat, find_failed_rank


def signs(*doing: str, **others: object) -> RankHeartbeat:
    made = RankHeartbeat(process="process 7 on here", **others)  # type: ignore[arg-type]
    for number, what in enumerate(doing, 1):
        made.note_operation(number, what)
    return made


MINE = signs("connects", "takes a step")


def test_nobody_is_blamed_who_does_the_same_or_is_behind_or_ahead():
    others = {1: signs("connects"), 2: signs("connects", "takes a step", "reads a tensor")}
    assert find_failed_rank(0, MINE, others, {1: SILENCE - 1, 2: 0.0}, SILENCE) is None


def test_who_gives_no_sign_of_life_is_blamed():
    others = {1: signs("connects"), 2: signs("connects")}
    found = find_failed_rank(0, MINE, others, {1: 0.0, 2: SILENCE + 1}, SILENCE)
    assert found is not None
    assert found.rank == 2
    assert "rank 2 (process 7 on here) has not responded for 31 seconds" in str(found)


def test_a_broken_connection_makes_silence_tell_earlier():
    others = {1: signs("connects")}
    assert find_failed_rank(0, MINE, others, {1: DOUBT + 1}, SILENCE) is None
    found = find_failed_rank(0, MINE, others, {1: DOUBT + 1}, DOUBT)
    assert found is not None
    assert found.rank == 1


def test_who_has_ended_is_blamed_if_it_did_not_begin_what_is_waited_for():
    ended = {1: signs("connects", has_left=True)}
    found = find_failed_rank(0, MINE, ended, {1: 100.0}, SILENCE)
    assert found is not None
    assert "rank 1 (process 7 on here) exited, while rank 0 takes a step" in str(found)
    done = {1: signs("connects", "takes a step", has_left=True)}
    assert find_failed_rank(0, MINE, done, {1: 100.0}, SILENCE) is None


def test_what_one_has_found_out_all_say():
    others = {1: signs("connects", failure="rank 2 has ended", blamed=2), 2: signs("connects")}
    found = find_failed_rank(0, MINE, others, {1: 0.0, 2: 100.0}, SILENCE)
    assert found is not None
    assert (found.rank, str(found)) == (2, "rank 2 has ended (reported by rank 1)")


def test_ranks_that_do_different_things_at_one_point_are_told_apart():
    others = {1: signs("connects", "reads a tensor", "takes a step")}
    found = find_failed_rank(0, MINE, others, {1: 0.0}, SILENCE)
    assert found is not None
    assert found.rank == 1
    assert "rank 0 takes a step, but rank 1 reads a tensor" in str(found)


@pytest.mark.parametrize("count", [0, 3, 5000])
def test_signs_are_told_as_text_and_most_operations_are_forgotten(count: int):
    told = signs(*(f"takes step {n}" for n in range(count)), has_left=True, blamed=1, beat=3)
    heard = RankHeartbeat.from_json(told.to_json())
    assert heard == told
    assert heard.operation_number == count
    assert len(heard.doing) <= min(count, 8 * 6)


@pytest.mark.parametrize("apart", [1, 10, 100, 1000, 3000])
def test_ranks_far_apart_know_some_operation_of_both(apart: int):
    mine = signs(*["takes a step"] * 5000)
    theirs = {1: signs(*["takes another step"] * (5000 - apart))}
    found = find_failed_rank(0, mine, theirs, {1: 0.0}, SILENCE)
    assert found is not None
    assert "rank 0 takes a step, but rank 1 takes another step" in str(found)
