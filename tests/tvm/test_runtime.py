"""Programs and weights: memory, changes, the disk cache, processes."""

import gc
import os
from functools import partial

import pytest
import torch
from torch import nn

from dynamo_backends.graph.layouts import row_major_strides
from dynamo_backends.interface.errors import CompileError, ForkedProcessError
from dynamo_backends.runtime.freed_memory import return_free_memory
from dynamo_backends.tvm import session
from dynamo_backends.tvm.ranged import executable_class
from dynamo_backends.tvm.runtime import TvmExecutable
from dynamo_backends.tvm.session import Settings
from dynamo_backends.workers.memory import rss_bytes
from tests import backend_checks as checks
from tests.backend_checks import mlp
from tests.checking import check

compiled = partial(checks.compiled, "tvm")


def test_inputs_are_read_where_they_are_and_each_call_has_results_of_its_own():
    x = torch.randn(4, 6)
    function, _, executable = compiled(mlp(), x)
    assert executable._inputs[0](x).data_ptr() == x.data_ptr()
    checks.each_call_has_results_of_its_own(function, x)


@pytest.mark.parametrize("offset", range(4))
def test_tensors_at_addresses_that_vector_instructions_do_not_take(offset: int):
    x = torch.randn(64 * 8 + offset)[offset:].view(64, 8)
    module = nn.Sequential(nn.Linear(8, 16), nn.Sigmoid())
    check(module.eval(), x, backend="tvm")
    with torch.no_grad():
        storage = torch.randn(8 * 16 + offset)
        module[0].weight.set_(storage[offset:].view(16, 8))
        torch.testing.assert_close(torch.compile(module, backend="tvm")(x), module(x))


def test_strides_that_do_not_matter():
    x = torch.empty_strided((1, 3, 1), (77, 1, 5)).normal_()
    check(lambda x: (x.permute(2, 1, 0) * 2 + 1).sum(), x, backend="tvm", min_block_size=1)
    assert row_major_strides((2, 3, 4)) == (12, 4, 1)
    empty = torch.empty(2, 0, 4)
    check(lambda x: torch.cat([x, x + 1]), empty, backend="tvm", min_block_size=1)


def test_weights_are_prepared_when_they_are_bound():
    model, x = mlp(), torch.randn(4, 6)
    _, _, executable = compiled(model, x)
    assert len(executable.program.weights) == 4
    # Both matrices are transposed; biases are read where they are.
    assert sorted(executable.program.transformed) == [False, False, True, True]


def test_prepared_weights_go_with_the_compiled_model():
    """The pool of TVM's machines would keep their memory."""
    compiled_model = torch.compile(nn.Linear(4096, 4096), backend="tvm")
    with torch.no_grad():
        compiled_model(torch.randn(2, 4096))
    gc.collect()
    return_free_memory()  # the heap of this process may keep what earlier tests have freed
    before = rss_bytes()
    del compiled_model
    torch._dynamo.reset()
    gc.collect()
    return_free_memory()
    assert before - rss_bytes() > 100 * 2**20, "64 MiB of the weight, and as many prepared"


def test_a_weight_that_is_not_prepared_is_never_copied():
    model, x = mlp(), torch.randn(4, 6)
    function, report, _ = compiled(model, x)
    with torch.no_grad():
        model[0].bias.detach().numpy()[...] += 1
        torch.testing.assert_close(function(x), model(x))
        model[0].weight.data.mul_(2)
        torch.testing.assert_close(function(x), model(x))
    assert report.rebinds == 1


def test_a_second_process_would_find_the_program():
    model, x = mlp(), torch.randn(4, 6)
    assert compiled(model, x)[1].cache_hits == 0
    other = mlp()
    function, report, _ = compiled(other, x)
    assert report.cache_hits == 1
    with torch.no_grad():  # weights are no part of what is kept
        torch.testing.assert_close(function(x), other(x))


def test_damaged_programs_are_refused():
    x = torch.randn(4, 6)
    _, report, executable = compiled(mlp(), x)
    parts, graph = executable.dump(), report.executable._graph
    assert isinstance(TvmExecutable.load(parts, graph, Settings(), executable_class), TvmExecutable)
    for name in parts:
        for damaged in ({**parts, name: parts[name][: len(parts[name]) // 2]}, {}):
            with pytest.raises(CompileError, match="the cached TVM program cannot be used"):
                TvmExecutable.load(damaged, graph, Settings(), executable_class)


def test_threads_are_torchs_and_do_not_spin(monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[int, int, dict[str, str]]] = []

    def configure(mode: int, count: int) -> None:
        seen.append((mode, count, {k: v for k, v in os.environ.items() if k.startswith("TVM_")}))

    monkeypatch.setattr(session, "_configure", lambda: configure)
    monkeypatch.setattr(session, "_pool", type("Pool", (), {})())
    monkeypatch.delenv("TVM_NUM_THREADS", raising=False)
    session.use_threads(Settings().threads)
    session.use_threads(Settings().threads)
    session.use_threads(3)
    variables = {"TVM_BIND_THREADS": "0", "TVM_THREAD_POOL_SPIN_COUNT": "0"}
    torchs = torch.get_num_threads()
    assert seen == [
        (1, torchs, {**variables, "TVM_NUM_THREADS": str(torchs)}),
        (1, 3, {**variables, "TVM_NUM_THREADS": str(max(3, torchs))}),
    ]
    assert "TVM_NUM_THREADS" not in os.environ


def test_several_threads_give_the_same_results():
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 1)).eval()
    x = torch.randn(2, 3, 20, 20)
    with torch.no_grad():
        check(model, x, backend="tvm", num_threads=2)


def test_a_forked_child_is_told(monkeypatch: pytest.MonkeyPatch):
    _, _, executable = compiled(mlp(), torch.randn(4, 6))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(ForkedProcessError, match=r"before os\.fork\(\)"):
        executable.bind(())


def test_memory_of_sizes_that_have_passed_is_given_back():
    """TVM's pool would keep a block for each."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.exp().sum(1, keepdim=True) + x).flip(0).cumsum(1)

    call, sizes = torch.compile(function, backend="tvm", dynamic=True), range(4096, 1024, -128)
    for rows in sizes[:4]:
        call(torch.ones(rows, 1024))
    return_free_memory()
    before = rss_bytes()
    for rows in sizes:
        call(torch.ones(rows, 1024))
    return_free_memory()
    grown = rss_bytes() - before  # 500 MB if a block were kept for each of 24 sizes
    assert grown < 8 * sizes[0] * 1024 * 4
