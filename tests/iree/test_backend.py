"""What torch promises beyond values, memory, indices, threads and processes."""

import threading
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends.interface.errors import ForkedProcessError
from dynamo_backends.iree.session import Device, open_device
from tests import backend_checks as checks
from tests.backend_checks import mlp
from tests.checking import check

compiled = partial(checks.compiled, "iree")


@pytest.mark.parametrize("what", checks.SEMANTICS)
def test_semantics(what: str):
    fn, inputs = checks.SEMANTICS[what]
    with torch.no_grad():
        checks.agree("iree", fn, *inputs(), min_block_size=1)


def test_changed_weights_are_seen_without_compiling_again():
    changes = ["fused optimizer", "p.data", "load_state_dict", "new Parameter", "buffers"]
    assert checks.never_stale("iree", changes) >= len(changes) - 1


def test_dynamic_batch():
    checks.follows_the_batch("iree")


@pytest.mark.parametrize("read", ["sum", "exp"])
def test_values_that_are_scattered_and_read_at_several_sizes(read: str):
    """IREE compiles one executable for all sizes as if there were one row."""

    def f(x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x + 1
        table = torch.zeros(50, 16).index_put((at,), rows, accumulate=True)
        flat = torch.zeros(50, 16).scatter_add(0, at.view(-1, 1).expand(-1, 16), rows.view(-1, 16))
        return (rows.sum(0) if read == "sum" else rows.exp()), table, flat

    backend = dynamo_backends.compiler("iree", min_block_size=1)
    run = torch.compile(f, backend=backend, fullgraph=True, dynamic=True)
    with dynamo_backends.record() as reports:
        for rows, columns in ((2, 5), (4, 7), (3, 3)):
            inputs = torch.randn(rows, columns, 16), torch.randint(50, (rows, columns))
            torch.testing.assert_close(run(*inputs), f(*inputs))
    assert [f for r in reports for f in r.runtime_fallbacks] == []


def test_gradients():
    checks.gradients_agree("iree")


def test_batch_norm_in_training_updates_its_buffers():
    module, twin = (nn.BatchNorm2d(3).train() for _ in range(2))
    x = torch.randn(2, 3, 4, 4)
    compiled = torch.compile(module, backend=dynamo_backends.compiler("iree", min_block_size=1))
    with dynamo_backends.record() as reports:
        torch.testing.assert_close(compiled(x), twin(x))
    assert checks.ran_on_backend(reports)
    for ours, theirs in zip(module.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_random_numbers_equal_eagers():
    def fn(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x * 2, 0.5, training=True) + torch.rand_like(x)

    check(fn, torch.randn(3, 4), ops_in_eager=None, backend="iree")


def test_types_are_kept():
    def fn(x: Tensor, half: Tensor, pixels: Tensor, count: Tensor) -> tuple[Tensor, ...]:
        chosen = (x > 0) & (pixels > 7)
        scaled = pixels.to(torch.float32) / 255
        wide = (x.double() + 1e-12) * 0.1
        more = pixels + pixels
        return chosen, more, half * 2 + 1, x + half, scaled, count * 3, wide, ~chosen

    x, pixels = torch.randn(3, 5), torch.randint(0, 256, (3, 5), dtype=torch.uint8)
    count = torch.tensor([2**40 + 1, -3, 0, 1, 7])
    reports = check(fn, x, x.bfloat16(), pixels, count, backend="iree", min_block_size=1)
    assert checks.ran_on_backend(reports)
    wide = torch.compile(lambda x: (x + 0.1) * 0.1, backend=dynamo_backends.compiler("iree"))
    y = torch.tensor([1 + 2.0**-40], dtype=torch.float64)
    assert abs(wide(y).item() - ((y + 0.1) * 0.1).item()) < 1e-16


def test_inputs_are_read_where_they_are_and_each_call_has_results_of_its_own():
    x = torch.randn(4, 6)
    function, _, executable = compiled(mlp(), x)
    view = executable._device.wrap(x)
    assert executable._device.to_tensor(view).data_ptr() == x.data_ptr()
    checks.each_call_has_results_of_its_own(function, x)


def test_results_share_no_memory_with_inputs_with_each_other_or_with_constants():
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return x * 1.0, x + 1, x + 1 + 0, torch.full((3,), 2.0), torch.arange(4) * 2

    x = torch.randn(4, 6)
    function = torch.compile(fn, backend=dynamo_backends.compiler("iree", min_block_size=1))
    first = function(x)
    addresses = {t.data_ptr() for t in (x, *first)}
    assert len(addresses) == 1 + len(first)
    kept = x.clone()
    for result in first:
        result.add_(1)
    assert torch.equal(x, kept)
    for result, expected in zip(function(x), fn(x), strict=True):
        torch.testing.assert_close(result, expected)


def test_a_tensor_that_does_not_begin_where_iree_can_read_it():
    x = torch.randn(25)[1:].view(4, 6)
    assert x.data_ptr() % 64
    model = mlp()
    function, _, _ = compiled(model, x)
    with torch.no_grad():
        torch.testing.assert_close(function(x), model(x))
        x.add_(1)
        torch.testing.assert_close(function(x), model(x))


def test_weights_that_are_prepared_and_those_that_are_not():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))
            self.register_buffer("mask", torch.tensor([True, False, True, True, False, True]))
            self.register_buffer("order", torch.tensor([5, 0, 2, 1, 4, 3]))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight.t())[:, self.order] * self.mask + 1

    model, x = Mixed().eval(), torch.randn(4, 6)
    function, _, executable = compiled(model, x)
    assert len(executable._parameters) == 1
    assert len(executable._fixed) == 2
    with torch.no_grad():
        torch.testing.assert_close(function(x), model(x))
        model.order.copy_(torch.arange(6))
        model.mask.logical_not_()
        model.weight.data.mul_(2)
        torch.testing.assert_close(function(x), model(x))


def test_inputs_are_not_written_to():
    """IREE scatters into the memory of its input, which gets a copy."""

    def fn(table: Tensor, rows: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        i = i + 0
        return table.index_put((i,), rows), table.scatter(0, i[:, None].expand(-1, 3), rows)

    table, rows = torch.randn(5, 3), torch.randn(4, 3)
    before = table.clone()
    (report,) = check(fn, table, rows, torch.tensor([4, 2, 0, 1]), backend="iree", min_block_size=1)
    assert report.fallbacks == ()
    assert torch.equal(table, before)


def test_indices_are_kept_within_their_dimension():
    def fn(table: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        return (
            torch.nn.functional.embedding(i.abs(), table),
            table[i],
            table.index_select(0, i.abs()),
            table.gather(0, i.abs()[:, None].expand(-1, 3)),
        )

    table = torch.randn(5, 3)
    reports = check(
        fn, table, torch.tensor([4, -2, 0, 1]), backend="iree", min_block_size=1, ops_in_eager=None
    )
    assert checks.ran_on_backend(reports)
    function = torch.compile(fn, backend=dynamo_backends.compiler("iree", min_block_size=1))
    with pytest.raises(IndexError, match="index out of range in self"):
        function(table, torch.tensor([10**9, -2, 0, 1]))


def test_calls_that_are_taken_apart_into_indices():
    """IREE refuses the pooling; that must not take the calls around it to eager."""

    def pooled(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.nn.functional.max_pool1d(x, 2, return_indices=True)

    check(pooled, torch.randn(1, 2, 8), backend="iree", min_block_size=1, ops_in_eager=1)


def test_memory_that_nobody_wrote():
    def window(x: Tensor) -> Tensor:
        return torch.signal.windows.cosine(0) + x

    check(window, torch.ones(1), backend="iree", min_block_size=1, ops_in_eager=0)


@pytest.mark.long
def test_threads_can_share_compiled_models():
    models = [mlp(), nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).eval()]
    functions = [compiled(model, torch.randn(4, 6), num_threads=2)[0] for model in models]
    inputs = [torch.randn(4, 6) for _ in range(6)]
    results: dict[int, Tensor] = {}

    def work(i: int) -> None:
        with torch.no_grad():
            for _ in range(50):
                results[i] = functions[i % 2](inputs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        for i, x in enumerate(inputs):
            torch.testing.assert_close(results[i], models[i % 2](x))


def test_a_device_has_torchs_threads_and_is_shared():
    assert open_device() is open_device(torch.get_num_threads())
    assert open_device(1).has_threads is False
    assert open_device(2).has_threads is True


def test_a_forked_process_gets_an_error_instead_of_waiting_for_threads(
    monkeypatch: pytest.MonkeyPatch,
):
    device = open_device(2)
    device.check_process()
    monkeypatch.setattr(device, "_pid", -1)
    with pytest.raises(ForkedProcessError, match="do not survive a fork"):
        device.check_process()
    Device.check_process(open_device(1))
