"""Functions that are recorded: right results, memory, addresses, streams, refusals."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dynamo_backends.cudagraphs import captured, device
from dynamo_backends.cudagraphs.captured import GraphedFunction
from dynamo_backends.cudagraphs.slots import StaticInputs
from tests.cudagraphs.conftest import Machine
from tests.cudagraphs.double import DoubleCuda, Race


class Counts:
    """Notes that count."""

    def __init__(self) -> None:
        self.graphs = 0
        self.reasons: list[str] = []

    def captured(self) -> None:
        self.graphs += 1

    def refused(self, reason: str) -> None:
        self.reasons.append(reason)


def wrap(function: Callable[[list[Any]], Any], **how: Any) -> tuple[GraphedFunction, Counts]:
    counts = Counts()
    return GraphedFunction(function, 0, how.pop("warmup", 2), counts, **how), counts


def polynomial(inputs: list[Tensor]) -> list[Tensor]:
    x, w = inputs
    y = (x @ w).relu()
    return [y * 2 + x.sum(), y.t(), (y > 0).sum(1)]


def agree(
    function: GraphedFunction, plain: Callable[[list[Any]], Any], inputs: list[Tensor]
) -> list:
    expected = plain([x.clone() for x in inputs])
    results = function(inputs)
    for e, r in zip(expected, results, strict=True):
        torch.testing.assert_close(r, e, rtol=1e-6, atol=1e-6, equal_nan=False)
        assert r.stride() == e.stride()
    return list(results)


def test_each_call_gives_eagers_results_in_memory_of_its_own(machine: Machine):
    function, counts = wrap(polynomial)
    kept = []
    for _ in range(6):
        inputs = [torch.randn(4, 5, device=machine.device) for _ in range(2)]
        inputs[1] = inputs[1].t().contiguous()
        results = agree(function, polynomial, inputs)
        kept.append((results, [r.clone() for r in results]))
    assert counts.graphs == 1
    for results, copies in kept:
        assert all(torch.equal(r, c) for r, c in zip(results, copies, strict=True))
    if machine.double is not None:
        assert [g.replays for g in machine.double.graphs] == [4]


def test_the_number_of_warm_up_calls(machine: Machine):
    function, counts = wrap(polynomial, warmup=4)
    seen = []
    for _ in range(6):
        agree(function, polynomial, [torch.randn(3, 3, device=machine.device) for _ in range(2)])
        seen.append(counts.graphs)
    assert seen == [0, 0, 0, 0, 1, 1]


def test_results_can_be_left_in_the_graphs_memory(machine: Machine):
    function, _ = wrap(polynomial, reuse=True)
    inputs = [torch.randn(3, 3, device=machine.device) for _ in range(2)]
    for _ in range(3):
        first = function(inputs)
    copy = first[0].clone()
    inputs[0] += 1
    second = function(inputs)
    assert second[0] is not first[0]
    assert second[0].data_ptr() == first[0].data_ptr()
    assert torch.equal(first[0], second[0])
    assert not torch.equal(copy, second[0])


@pytest.mark.parametrize("reuse", [False, True])
def test_graphs_that_share_memory_do_not_harm_each_other(machine: Machine, reuse: bool):
    def other(inputs: list[Tensor]) -> list[Tensor]:
        return [inputs[0].exp() - 1, inputs[0].cumsum(0)]

    first, _ = wrap(polynomial, reuse=reuse)
    second, _ = wrap(other, reuse=reuse)
    for _ in range(5):
        inputs = [torch.randn(4, 4, device=machine.device) for _ in range(2)]
        expected, more = polynomial(inputs), other(inputs)
        results, rest = first(inputs), second(inputs)
        again = first(inputs)
        for e, r in zip([*expected, *more, *expected], [*results, *rest, *again], strict=True):
            torch.testing.assert_close(r, e, rtol=1e-6, atol=1e-6)


STRIDED: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(4, 6).t(),
    "gaps": lambda: torch.randn(6, 10)[:, ::3],
    "expanded": lambda: torch.randn(6, 1).expand(6, 4),
    "scalar expanded": lambda: torch.randn(()).expand(6, 4),
    "channels last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "0-d": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 4),
    "size 1": lambda: torch.randn(5, 1, 3)[:, :, 1:2],
}


@pytest.mark.parametrize("kind", STRIDED)
def test_inputs_and_outputs_of_any_strides(machine: Machine, kind: str):
    def plain(inputs: list[Tensor]) -> list[Tensor]:
        (x,) = inputs
        return [x * 2, x.expand(3, *x.shape), (x + 1).permute(list(reversed(range(x.ndim))))]

    function, counts = wrap(plain)
    for _ in range(5):
        x = STRIDED[kind]().to(machine.device)
        expected, results = plain([x]), function([x])
        for e, r in zip(expected, results, strict=True):
            assert torch.equal(e, r)
            assert e.stride() == r.stride()
    assert (counts.graphs, counts.reasons) == (1, [])


def test_overlapping_inputs_are_refused(machine: Machine):
    function, counts = wrap(lambda inputs: [inputs[0] * 2])
    for _ in range(4):
        x = torch.randn(8, device=machine.device).as_strided((5, 4), (1, 1))
        assert torch.equal(function([x])[0], x * 2)
    assert counts.graphs == 0
    (reason,) = counts.reasons
    assert reason == (
        "an input cannot be copied to static memory: a tensor of shape (5, 4) and strides (1, 1) "
        "has overlapping elements"
    )


def linear(inputs: list[Tensor]) -> list[Tensor]:
    x, w = inputs
    return [x @ w]


def test_baked_inputs_are_read_where_they_are(machine: Machine):
    function, counts = wrap(linear, baked=[1])
    w = torch.randn(3, 3, device=machine.device)
    for i in range(6):
        w.mul_(1.1 if i % 2 else -1)
        agree(function, linear, [torch.randn(2, 3, device=machine.device), w])
    assert counts.graphs == 1
    if machine.double is not None:
        (graph,) = machine.double.graphs
        assert any(a.data_ptr() == w.data_ptr() for a in graph.foreign.values())


def test_a_baked_input_that_moved_is_recorded_again_and_copied_in_the_end(machine: Machine):
    function, counts = wrap(linear, baked=[1])
    graphs = []
    for _ in range(8):
        w = torch.randn(3, 3, device=machine.device)
        for _ in range(3):
            agree(function, linear, [torch.randn(2, 3, device=machine.device), w])
            graphs.append(counts.graphs)
        kept = w  # noqa: F841 - so that the next one is elsewhere
    assert max(graphs) == 1 + captured.MOVES
    assert graphs[-9:] == [1 + captured.MOVES] * 9


def test_memory_of_a_moved_input_is_not_kept_alive(machine: Machine):
    import weakref

    function, _ = wrap(linear, baked=[1])
    x, w = torch.randn(2, 3, device=machine.device), torch.randn(3, 3, device=machine.device)
    for _ in range(4):
        function([x, w])
    gone = weakref.ref(w)
    w = torch.randn(3, 3, device=machine.device)
    assert gone() is None
    agree(function, linear, [x, w])


def test_saved_tensors_are_baked_only_if_they_stay(machine: Machine):
    stays = torch.randn(3, 3, device=machine.device)

    def plain(inputs: list[Tensor]) -> list[Tensor]:
        return [inputs[0] @ inputs[1] + inputs[2]]

    function, counts = wrap(plain, hopeful=[0, 1], warmup=2)
    kept = []
    for _ in range(5):
        moves = torch.randn(2, 3, device=machine.device)
        kept.append(moves)
        agree(function, plain, [moves, stays, torch.randn(2, 3, device=machine.device)])
    assert counts.graphs == 1
    moved = stays.clone()
    for w in (moved, moved, stays):
        agree(function, plain, [kept[0], w, kept[1]])
    assert counts.graphs == 2


@pytest.mark.parametrize("baked", [(), (0, 1)], ids=["copied", "baked"])
def test_inputs_that_are_written_to(machine: Machine, baked: tuple[int, ...]):
    def plain(inputs: list[Tensor]) -> list[Tensor]:
        x, state = inputs
        state.mul_(0.5).add_(x)
        return [state * 2]

    function, counts = wrap(plain, baked=baked, written=[1])
    x, state = (torch.randn(4, device=machine.device) for _ in range(2))
    twin = state.clone()
    for i in range(6):
        x.fill_(i)
        version = state._version
        (expected,), (result,) = plain([x, twin]), function([x, state])
        assert torch.equal(result, expected)
        assert torch.equal(state, twin), i
        assert state._version > version
    assert counts.graphs == 1


def test_random_numbers_are_eagers_and_differ_per_call(machine: Machine):
    def plain(inputs: list[Tensor]) -> list[Tensor]:
        return [torch.nn.functional.dropout(inputs[0], 0.5), torch.randn_like(inputs[0])]

    function, counts = wrap(plain)
    x = torch.ones(64, device=machine.device)
    torch.manual_seed(3)
    expected = [plain([x]) for _ in range(6)]
    torch.manual_seed(3)
    results = [function([x]) for _ in range(6)]
    assert counts.graphs == 1
    for e, r in zip(expected, results, strict=True):
        assert all(map(torch.equal, e, r))
    assert not torch.equal(results[-1][1], results[-2][1])


def test_other_values_than_tensors_are_part_of_the_graph(machine: Machine):
    function, counts = wrap(lambda inputs: [inputs[0] * inputs[1], None, inputs[1]])
    x = torch.ones(3, device=machine.device)
    for number in (2, 2, 2, 2, 5, 5):
        product, nothing, same = function([x, number])
        assert torch.equal(product, x * number)
        assert (nothing, same) == (None, number)
    assert counts.graphs == 2


def test_values_that_differ_at_every_call_end_the_recording(machine: Machine):
    function, counts = wrap(lambda inputs: [inputs[0] * inputs[1]])
    x = torch.ones(3, device=machine.device)
    for number in range(20):
        assert torch.equal(function([x, number])[0], x * number)
    assert counts.graphs == captured.RECORDINGS
    assert counts.reasons == ["the storage of a captured tensor changes at every call"]


def test_another_shape_is_no_broadcast(machine: Machine):
    function, _ = wrap(linear)
    inputs = [torch.randn(3, 3, device=machine.device) for _ in range(2)]
    for _ in range(4):
        function(inputs)
    with pytest.raises(ValueError, match=r"recorded for \[3, 3\], got \[1, 3\]"):
        function([inputs[0][:1], inputs[1]])
    agree(function, linear, inputs)


@pytest.mark.parametrize(
    "wait",
    [lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: x[x > 0]],
    ids=["item", "nonzero", "mask"],
)
def test_waiting_for_the_device_is_refused_and_harms_nobody(machine: Machine, wait):
    def plain(inputs: list[Tensor]) -> list[Tensor]:
        wait(inputs[0])
        return [inputs[0] * 2]

    function, counts = wrap(plain)
    for i in range(5):
        x = torch.full((4,), float(i), device=machine.device)
        assert torch.equal(function([x])[0], x * 2)
    assert counts.graphs == 0
    (reason,) = counts.reasons
    assert "capturing" in reason or "capture" in reason
    other, others = wrap(linear)
    for _ in range(4):
        agree(other, linear, [torch.randn(3, 3, device=machine.device) for _ in range(2)])
    assert others.graphs == 1
    torch.manual_seed(1)
    torch.rand(3, device=machine.device)  # the generator still works


@pytest.mark.parametrize("place", ["input", "output"])
def test_tensors_elsewhere_are_refused(machine: Machine, place: str):
    elsewhere = "meta" if machine.double is not None else "cpu"

    def plain(inputs: list[Tensor]) -> list[Tensor]:
        more = [torch.empty(2, device=elsewhere)] if place == "output" else []
        return [inputs[0] * 2, *more]

    function, counts = wrap(plain)
    inputs = [torch.ones(2, device=machine.device)]
    if place == "input":
        inputs.append(torch.empty(2, device=elsewhere))
    for _ in range(4):
        assert torch.equal(function(inputs)[0], inputs[0] * 2)
    (reason,) = counts.reasons
    assert reason.startswith(f"an {place} is on {elsewhere} instead of {machine.device.type}:0")


def test_errors_of_a_warm_up_reach_the_caller_and_streams_stay_ordered(machine: Machine):
    def plain(inputs: list[Tensor]) -> list[Tensor]:
        inputs[0].add_(1)
        raise ValueError("broken")

    function, _ = wrap(plain)
    x = torch.zeros(3, device=machine.device)
    with pytest.raises(ValueError, match="broken"):
        function([x])
    assert torch.equal(x, torch.ones_like(x))


def test_inside_somebody_elses_capture_the_function_itself_runs(double: DoubleCuda):
    function, counts = wrap(linear)
    inputs = [torch.randn(3, 3) for _ in range(2)]
    for _ in range(4):
        function(inputs)
    graph = double.new_graph()
    with double.mode, double.capture(graph, double.new_pool(), double.side_stream(0)):
        (result,) = function(inputs)
    inputs[0].copy_(torch.eye(3))
    graph.replay()
    assert torch.equal(result, inputs[1])
    assert counts.graphs == 1


def test_inference_tensors_and_gradients(machine: Machine):
    function, counts = wrap(linear)
    for i in range(6):
        inputs = [torch.randn(3, 3, device=machine.device) for _ in range(2)]
        with torch.inference_mode(i % 2 == 0):
            inputs[0] = inputs[0] + 1
            expected = linear(inputs)
            assert torch.equal(function(inputs)[0], expected[0])
    assert counts.graphs == 1


def test_calls_on_other_streams_wait_for_each_other(machine: Machine):
    function, counts = wrap(polynomial)
    streams = [machine.current(), *(machine.stream(f"s{i}") for i in range(2))]
    home = machine.current()
    for i in range(9):
        inputs = [torch.randn(4, 4, device=machine.device) for _ in range(2)]
        expected = polynomial(inputs)
        stream = streams[i % 3]
        stream.wait_stream(home)
        with machine.on(stream):
            results = function(inputs)
        home.wait_stream(stream)
        for e, r in zip(expected, results, strict=True):
            torch.testing.assert_close(r, e, rtol=1e-6, atol=1e-6)
    assert counts.graphs == 1


def test_threads_share_a_function(machine: Machine):
    function, counts = wrap(linear)
    inputs = [[torch.randn(3, 3, device=machine.device) for _ in range(2)] for _ in range(4)]
    wrong: list[int] = []

    def work(i: int) -> None:
        expected = linear(inputs[i])[0]
        results = [function(inputs[i])[0] for _ in range(30)]
        wrong.extend(i for r in results if not torch.allclose(r, expected))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert counts.graphs == 1


def test_without_the_order_of_streams_the_double_finds_a_race(
    double: DoubleCuda, monkeypatch: pytest.MonkeyPatch
):
    function, _ = wrap(polynomial)
    inputs = [torch.randn(4, 4) for _ in range(2)]
    for _ in range(3):
        function(inputs)
    from tests.cudagraphs.double import Stream

    other = Stream("other")
    monkeypatch.setattr(device.Order, "enter", lambda self: double.current_stream(0))
    with double.use(other), pytest.raises(Race):
        function(inputs)


def test_without_the_copy_to_slots_results_are_wrong(
    double: DoubleCuda, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(StaticInputs, "fill", lambda self, inputs: None)
    function, _ = wrap(linear)
    for _ in range(2):
        agree(function, linear, [torch.randn(3, 3) for _ in range(2)])
    with pytest.raises(AssertionError):
        agree(function, linear, [torch.randn(3, 3) for _ in range(2)])


def test_without_the_check_of_addresses_results_are_wrong(
    double: DoubleCuda, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(captured.Recording, "is_for", lambda self, inputs: True)
    function, _ = wrap(linear, baked=[1])
    x, w = torch.randn(2, 3), torch.randn(3, 3)
    for _ in range(4):
        function([x, w])
    with pytest.raises(AssertionError):
        agree(function, linear, [x, torch.randn(3, 3)])
    assert w.shape == (3, 3)


def test_without_a_private_pool_left_results_are_destroyed(
    double: DoubleCuda, monkeypatch: pytest.MonkeyPatch
):
    shared = double.new_pool()
    monkeypatch.setattr(double, "new_pool", lambda: shared)
    with pytest.raises(AssertionError):
        test_graphs_that_share_memory_do_not_harm_each_other(
            Machine(torch.device("cpu"), double), reuse=True
        )
