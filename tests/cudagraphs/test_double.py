"""The double fails where CUDA would: else nothing that is tested with it means anything."""

import pytest
import torch

from tests.cudagraphs.double import DoubleCuda, Graph, IllegalAccess, Race, Stream


def record(cuda: DoubleCuda, function, *inputs: torch.Tensor, pool=None) -> tuple[Graph, list]:
    """Runs a function on the side stream, then records it."""
    side, graph = cuda.side_stream(0), cuda.new_graph()
    with cuda.mode:
        side.wait_stream(cuda.main)
        with cuda.use(side):
            function(*inputs)
        cuda.main.wait_stream(side)
        with cuda.capture(graph, pool or cuda.new_pool(), side):
            outputs = function(*inputs)
    return graph, outputs


def test_a_replay_computes_what_recording_did_not(double: DoubleCuda):
    x, y = torch.ones(3), torch.zeros(3)

    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        y.add_(x)
        return [(x * 2).exp(), y.view(3, 1) + 1]

    graph, (first, second) = record(double, function, x, y)
    assert torch.equal(y, torch.ones(3)), "written to by the warm-up alone"
    assert first.isnan().all()
    x.fill_(3)
    graph.replay()
    assert torch.equal(first, torch.full((3,), 6.0).exp())
    assert torch.equal(y, torch.full((3,), 4.0))
    assert torch.equal(second, torch.full((3, 1), 5.0))


def test_random_numbers_are_drawn_by_replays_alone(double: DoubleCuda):
    x = torch.ones(4)
    graph, (noise,) = record(double, lambda x: [torch.rand_like(x)], x)
    torch.manual_seed(5)
    graph.replay()
    first = noise.clone()
    graph.replay()
    assert not torch.equal(first, noise)
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(4))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [x.sum().item()],
        lambda x: [x.nonzero()],
        lambda x: [x[x > 0]],
        lambda x: [x.unique()],
    ],
    ids=["item", "nonzero", "mask", "unique"],
)
def test_waiting_for_the_device_ends_a_capture_and_its_pool(double: DoubleCuda, function):
    pool = double.new_pool()
    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
        record(double, function, torch.ones(3), pool=pool)
    with pytest.raises(RuntimeError, match="already recording to this pool"):
        record(double, lambda x: [x + 1], torch.ones(3), pool=pool)
    record(double, lambda x: [x + 1], torch.ones(3))


def test_what_was_not_warmed_up_cannot_be_recorded(double: DoubleCuda):
    x = torch.ones(2)
    capture = double.capture(double.new_graph(), double.new_pool(), double.side_stream(0))
    with pytest.raises(RuntimeError, match=r"initialises itself .* aten.cos"), double.mode, capture:
        x.cos()


def test_memory_that_was_given_back_is_not_read(double: DoubleCuda):
    x = torch.ones(3)
    graph, (result,) = record(double, lambda x: [x * 2], x)
    graph.replay()
    assert torch.equal(result, torch.full((3,), 2.0))
    del x
    with pytest.raises(IllegalAccess):
        graph.replay()


def test_graphs_of_one_pool_overwrite_each_other(double: DoubleCuda):
    pool, x = double.new_pool(), torch.ones(3)
    first, (a,) = record(double, lambda x: [x * 2], x, pool=pool)
    second, (b,) = record(double, lambda x: [x * 3], x, pool=pool)
    first.replay()
    second.replay()
    assert torch.equal(a, x * 2), "results that are held are not given to a later graph"
    assert torch.equal(b, x * 3)
    first.replay()
    assert b.isnan().all(), "what the first graph had freed may be the second one's result"


def test_an_unordered_access_is_a_race(double: DoubleCuda):
    other, x = Stream("other"), torch.ones(3)
    with double.mode:
        x.add_(1)
        with double.use(other), pytest.raises(Race, match="other did not wait for a write on main"):
            x.clone()
        other.wait_stream(double.main)
        with double.use(other):
            y = x.clone()
        with pytest.raises(Race, match="main writes to what other may be reading"):
            x.mul_(2)
        double.main.wait_stream(other)
        assert torch.equal(x.mul_(2), 2 * y)
