"""What calls are tried on."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from dynamo_backends.verify.trials.samples import extreme_integers, make_samples

aten = torch.ops.aten
NAN, INF = float("nan"), float("inf")


def given(target: Any, *args: Any) -> list[list[Tensor]]:
    """The samples of a call."""
    graph = fx.Graph()
    places = []
    for i, value in enumerate(args):
        places.append(graph.placeholder(f"x{i}") if isinstance(value, Tensor) else value)
        if isinstance(value, Tensor):
            places[-1].meta["val"] = value
    node = graph.call_function(target, tuple(places))
    node.meta["val"] = target(*(v.zero_() if isinstance(v, Tensor) else v for v in args))
    return list(make_samples(node))


def test_they_are_the_same_each_time():
    x = torch.empty(40), torch.empty(40, dtype=torch.int64)
    for one, other in zip(given(aten.add.Tensor, *x), given(aten.add.Tensor, *x), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("size", [1, 2, 5, 16, 400])
def test_elementwise_calls_get_all_that_is_special_however_small_they_are(size: int):
    found = torch.cat([x for (x,) in given(aten.sin.default, torch.empty(size))])
    assert found.isnan().any()
    assert {INF, -INF, 0.5, 2.5, -1e4} <= set(found.tolist())
    assert (found[found == 0].signbit()).any()
    assert not (found[found == 0].signbit()).all()


@pytest.mark.parametrize("size", [7, 60])
def test_special_numbers_meet_each_other(size: int):
    pairs = set()
    for x, y in given(aten.atan2.default, torch.empty(size), torch.empty(size)):
        pairs |= {(str(a), str(b)) for a, b in zip(x.tolist(), y.tolist(), strict=True)}
    for a in ("0.0", "-0.0", "nan", "inf", "-inf"):
        for b in ("0.0", "-0.0", "nan", "inf", "-inf"):
            assert (a, b) in pairs


@pytest.mark.parametrize("shape", [(5,), (2, 5), (7, 5), (3, 4, 5)])
def test_rows_that_are_reduced_have_nan_at_each_place(shape: tuple[int, ...]):
    rows = torch.cat([x.view(-1, 5) for (x,) in given(aten.amax.default, torch.empty(shape), [-1])])
    places = {
        i for row in rows if row.isnan().sum() == 1 for i in row.isnan().nonzero().tolist()[0]
    }
    assert {0, 2, 4} <= places
    assert (rows == INF).any()
    assert (rows == -INF).all(-1).any()
    assert rows.isfinite().all(-1).any()


@pytest.mark.parametrize("size", [1, 40])
@pytest.mark.parametrize("target", [torch.int64, torch.int32, torch.uint8])
def test_casts_to_integers_get_numbers_of_every_size(size: int, target: torch.dtype):
    fake = torch.empty(size)
    graph = fx.Graph()
    place = graph.placeholder("x")
    place.meta["val"] = fake
    node = graph.call_function(aten._to_copy.default, (place,), {"dtype": target})
    node.meta["val"] = fake.to(target)
    found = torch.cat([x for (x,) in make_samples(node)]).double()
    bits = torch.iinfo(target).bits
    assert found.max() > 2.0 ** (bits - 3)
    assert torch.equal(found.to(target).double(), found.trunc())  # eager has a result for each


@pytest.mark.parametrize("op", [aten.adaptive_max_pool2d, aten.fractional_max_pool2d])
def test_windows_of_maxima_have_nan(op: Any):
    x = torch.empty(2, 3, 8, 8)
    more = ([2, 2],) if op is aten.adaptive_max_pool2d else ([2, 2], [4, 4], torch.empty(2, 3, 2))
    assert any(args[0].isnan().any() for args in given(op.default, x, *more))


def test_rows_whose_first_largest_element_counts_have_several():
    found = given(aten.argmax.default, torch.empty(4, 9), 1)
    assert any(((x == x.amax(1, keepdim=True)).sum(1) > 1).any() for (x,) in found)
    tied = [(x == x.amax(1, keepdim=True)).sum(1) for (x,) in given(aten.topk.default,
            torch.empty(4, 9), 2)]  # fmt: skip
    assert all((count <= 1).all() for count in tied)


def test_nan_is_in_what_is_moved_and_not_in_sums_of_products():
    x = torch.empty(6, 6)
    for moves in (aten.t.default, aten.diagonal_copy.default):
        assert any(t.isnan().any() for (t,) in given(moves, x))
    assert all(t.isfinite().all() for pair in given(aten.mm.default, x, x) for t in pair)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
@pytest.mark.parametrize("size", [1, 30])
def test_integers_are_at_their_bounds_and_beyond_what_floats_hold(dtype: torch.dtype, size: int):
    found = given(aten.mul.Tensor, *[torch.empty(size, dtype=dtype)] * 2)
    seen = set(torch.cat([x for x, _ in found]).tolist())
    assert set(extreme_integers(dtype)) <= seen
    if dtype == torch.int64:
        assert {2**53 + 1, 2**63 - 1} <= seen
    large = torch.iinfo(dtype).max // 3
    assert any((x.abs() >= large).any() and (y.abs() < 8).all() for x, y in found)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_integers_at_bounds_meet_each_other_and_small_ones(dtype: torch.dtype):
    pairs = set()
    for x, y in given(aten.minimum.default, *[torch.empty(40, dtype=dtype)] * 2):
        pairs |= set(zip(x.tolist(), y.tolist(), strict=True))
    for large in extreme_integers(dtype):
        assert {(3, large), (large, 3), (large, torch.iinfo(dtype).max)} <= pairs


def test_each_integer_input_is_at_its_bounds_alone():
    x = torch.empty(4, 5, dtype=torch.int64)
    found = given(aten.clamp.Tensor, x, torch.empty(5, dtype=torch.int64), x)
    alone = [tuple(bool((t.abs() > 8).any()) for t in three) for three in found]
    assert {(True, False, False), (False, True, False), (False, False, True)} <= set(alone)


@pytest.mark.parametrize("integers", [1, 2, 4])
def test_integers_at_bounds_beside_floats(integers: int):
    floats, column = torch.empty(integers, 3), torch.empty(integers, 1, dtype=torch.int64)
    found = given(aten.add.Tensor, floats, column)
    assert {n for _, y in found for n in y.flatten().tolist()} >= set(extreme_integers(torch.int64))


def test_positions_stay_positions():
    table, places = torch.empty(4, 3), torch.empty(5, dtype=torch.int64)
    for _, index in given(aten.embedding.default, table, places):
        assert set(index.tolist()) <= set(range(-4, 4))


def test_positions_in_a_dimension_of_one_are_0():
    """On a GPU an index out of bounds ends all that the process does there."""
    rows, places = torch.empty(1, 3), torch.empty(5, dtype=torch.int64)
    grid = torch.empty(2, 3, dtype=torch.int64)
    calls: list[tuple[Any, ...]] = [
        (aten.embedding.default, rows, places),
        (aten.index_select.default, rows, 0, places),
        (aten.gather.default, torch.empty(3, 1), -1, grid),
        (aten.index_select.default, rows.view(3, 1), 1, places),
    ]
    for call in calls:
        for found in given(*call):
            assert not found[-1].any(), call[0]
            call[0](*[found.pop(0) if isinstance(x, Tensor) else x for x in call[1:]])
    for _, index in given(aten.index_select.default, rows, 1, places):
        assert index.any(), "there are three"


@pytest.mark.parametrize("masked", [False, True])
def test_positions_of_an_index_belong_to_its_dimensions(masked: bool):
    graph = fx.Graph()
    x, first, last = (graph.placeholder(name) for name in ("x", "first", "last"))
    x.meta["val"] = torch.empty(1, 1, 3) if masked else torch.empty(1, 3)
    first.meta["val"] = torch.ones(1, 1, dtype=torch.bool) if masked else torch.empty(4).long()
    last.meta["val"] = torch.empty(1 if masked else 4).long()
    node = graph.call_function(aten.index.Tensor, (x, [first, last]))
    node.meta["val"] = torch.empty(1 if masked else 4)
    found = list(make_samples(node))
    assert all(one.dtype == torch.bool if masked else not one.any() for _, one, _ in found)
    assert any(three.any() for *_, three in found) or masked


def test_strides_are_those_of_the_call():
    x = torch.empty(4, 6, 5).permute(2, 0, 1)
    for found in given(aten.amax.default, x, [0]):
        assert found[0].stride() == x.stride()


def test_nan_is_searched_for_and_among_what_is_searched():
    found = given(aten.bucketize.Tensor, torch.empty(4, 5), torch.empty(7))
    assert any(x.isnan().any() for x, _ in found)
    assert any(bounds.isnan().any() for _, bounds in found)
    assert all(torch.equal(b.sort().values.isnan(), b.isnan()) for _, b in found)


def test_offsets_ascend_from_0():
    table, places = torch.zeros(4, 3), torch.zeros(9, dtype=torch.int64)
    offsets = torch.zeros(5, dtype=torch.int64)
    for _, _, found in given(aten._embedding_bag_forward_only.default, table, places, offsets):
        assert found[0] == 0
        assert (found.diff() >= 0).all()


@pytest.mark.parametrize("strides", [(0, 0), (0, 1), (1, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_elements_that_share_memory_are_equal(strides: tuple[int, int], dtype: torch.dtype):
    """As those of a gradient that was expanded."""
    memory = torch.zeros(6, dtype=dtype)
    for (x,) in given(aten.t.default, memory.as_strided((5, 3), strides)):
        assert x.shape == (5, 3)
        assert [s == 0 for s in x.stride()] == [s == 0 for s in strides]
        known = x.nan_to_num(7.0) if x.is_floating_point() else x
        assert (known == known[:1]).all() or strides[0]
        assert (known == known[:, :1]).all() or strides[1]


@pytest.mark.parametrize("op", [aten.bitwise_left_shift.Tensor, aten.bitwise_right_shift.Tensor])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_counts_of_shifts_reach_beyond_the_width(op: Any, dtype: torch.dtype):
    found = given(op, *[torch.empty(40, dtype=dtype)] * 2)
    bits = torch.iinfo(dtype).bits
    counts = {n for _, y in found for n in y.tolist()}
    assert {0, 1, bits - 1, bits, bits + 1, 33} <= counts
    assert dtype == torch.uint8 or -1 in counts
    assert any(x.abs().max() > torch.iinfo(dtype).max // 3 for x, _ in found)


def test_positions_reach_the_end_of_each_dimension_from_both_sides():
    graph = fx.Graph()
    x, first, last = (graph.placeholder(name) for name in ("x", "first", "last"))
    x.meta["val"] = torch.empty(5, 9)
    first.meta["val"] = last.meta["val"] = torch.empty(4).long()
    node = graph.call_function(aten.index.Tensor, (x, [first, last]))
    node.meta["val"] = torch.empty(4)
    found = list(make_samples(node))
    for place, size in ((1, 5), (2, 9)):
        seen = {n for args in found for n in args[place].tolist()}
        assert {0, size - 1, -1} <= seen
        assert min(seen) >= -size
    for args in found:
        x.meta["val"][args[1], args[2]]  # eager takes them all


def test_means_are_large_and_products_without_zeros():
    (means,) = (x for (x,) in given(aten.var.correction, torch.empty(4, 30), [1]) if x.min() > 900)
    assert means.std() < 3
    (small,) = (x for (x,) in given(aten.prod.default, torch.empty(25, dtype=torch.uint8))
                if not (x == 0).any() and x.max() < 8)  # fmt: skip
    assert small.prod() > 2**32


def test_rows_have_numbers_of_all_sizes():
    found = given(aten._softmax.default, torch.empty(6, 20), 1, False)
    assert any(x.isfinite().all() and x.max() > 1e19 for (x,) in found)


def test_means_beside_variances_have_no_infinity():
    """Eager's are NaN or infinite, depending on the position."""
    x = torch.ones(4)
    for rows in (x.index_fill(0, torch.tensor(0), INF), x.index_fill(0, torch.tensor(3), INF)):
        assert torch.var_mean(rows, 0)[0].isnan()
    found = torch.cat([x.view(-1) for (x,) in given(aten.var_mean.correction, torch.empty(4, 5))])
    assert found.isnan().any()
    assert not found.isinf().any()
