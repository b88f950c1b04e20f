"""Work that breaks a process down costs one item."""

import os

from dynamo_backends.conformance import workers


def _square(x: int) -> tuple[int, int]:
    if x == 3:
        os.abort()
    return x, x * x


def _lost(x: int, exit_code: int | str) -> tuple[int, int | str]:
    return x, exit_code


def test_every_item_is_done_but_the_one_that_broke_down():
    done = dict(workers.map_in_processes(_square, range(9), _lost, lifetime=2))
    assert done == {x: -6 if x == 3 else x * x for x in range(9)}


def test_fewer_items_than_processes():
    assert list(workers.map_in_processes(_square, [5], _lost)) == [(5, 25)]
    assert list(workers.map_in_processes(_square, [], _lost)) == []
