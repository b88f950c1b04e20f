"""What is kept of many values: those that were used last."""

from dynamo_backends.runtime.cache import LRU


def test_what_was_used_least_recently_leaves():
    kept: LRU[str, int] = LRU(2)
    kept.put("a", 1)
    kept.put("b", 2)
    assert kept.get("a") == 1
    kept.put("c", 3)
    assert [kept.get(key) for key in "abc"] == [1, None, 3]
    assert len(kept) == 2


def test_a_value_that_is_put_anew_is_used():
    kept: LRU[str, int] = LRU(2)
    for key, value in (("a", 1), ("b", 2), ("a", 3), ("c", 4)):
        kept.put(key, value)
    assert list(kept.values()) == [3, 4]


def test_to_ask_whether_it_is_there_is_no_use():
    kept: LRU[str, int] = LRU(2)
    kept.put("a", 1)
    kept.put("b", 2)
    assert "a" in kept
    assert list(kept.values()) == [1, 2]
    kept.put("c", 3)
    assert "a" not in kept


def test_a_smaller_bound_holds_from_the_next_value_on():
    kept: LRU[int, int] = LRU(8)
    for key in range(8):
        kept.put(key, key)
    kept.most = 3
    kept.put(8, 8)
    assert list(kept.values()) == [6, 7, 8]
    kept.clear()
    assert not len(kept)
