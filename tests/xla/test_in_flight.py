"""How much a device is asked for before somebody waits."""

from dynamo_backends.xla.arrays import InFlight


class Array:
    """A result that notes whether somebody waited for it."""

    def __init__(self, size: int, fails: bool = False, deleted: bool = False):
        self.size = size
        self.waits = 0
        self._fails = fails
        self._deleted = deleted

    def is_deleted(self) -> bool:
        return self._deleted

    def block_until_ready(self) -> None:
        self.waits += 1
        if self._fails:
            raise RuntimeError("out of coffee")


def test_the_oldest_launch_is_waited_for_by_its_smallest_result():
    bound = InFlight(most=2)
    launches = [(Array(5), Array(1)) for _ in range(4)]
    for launch in launches:
        bound.note(launch)
    assert [small.waits for _, small in launches] == [1, 1, 0, 0]
    assert not any(large.waits for large, _ in launches)


def test_failures_and_what_was_given_away_are_left_to_those_who_read():
    bound = InFlight(most=0)
    bound.note([Array(1, fails=True)])
    gone = Array(1, deleted=True)
    bound.note([gone])
    bound.note([])
    assert not gone.waits
