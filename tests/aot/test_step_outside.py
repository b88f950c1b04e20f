"""What acts on a step from outside of its trace: followed where it can be, refused where not."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook, saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

import dynamo_backends
from dynamo_backends.interface.errors import StepCaptureError
from tests.aot import step_nets as nets
from tests.aot.step_checks import assert_close


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def function(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return function


def net() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nets.mlp().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


@contextlib.contextmanager
def before_accumulation(model: nn.Module) -> Iterator[None]:
    nodes = [get_gradient_edge(p).node for p in model.parameters()]
    handles = [node.register_prehook(lambda g: (g[0] * 0.5,)) for node in nodes]
    yield
    for handle in handles:
        handle.remove()


@contextlib.contextmanager
def after_accumulation(model: nn.Module) -> Iterator[None]:
    p = next(model.parameters())
    node = p.expand_as(p).grad_fn.next_functions[0][0]
    handle = node.register_hook(lambda *_: halve(p))
    yield
    handle.remove()


def halve(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


@contextlib.contextmanager
def of_all_modules(model: nn.Module) -> Iterator[None]:
    def scale(module: nn.Module, args: Any, output: Any) -> Any:
        return output * 0.5 if isinstance(module, nn.Linear) else None

    handle = register_module_forward_hook(scale)
    yield
    handle.remove()


@contextlib.contextmanager
def of_saved_tensors(model: nn.Module) -> Iterator[None]:
    def pack(x: Tensor) -> Tensor:
        return x * 1.5 if x.is_floating_point() else x

    with saved_tensors_hooks(pack, lambda x: x):
        yield


AROUND = (before_accumulation, after_accumulation, of_all_modules, of_saved_tensors)


@pytest.mark.parametrize(
    ("around", "backend"),
    [
        *((around, "aot_eager") for around in AROUND),
        (after_accumulation, "openxla"),
        (of_all_modules, "inductor"),
    ],
)
def test_hooks_outside_of_modules_and_tensors_are_followed(around: Any, backend: str) -> None:
    found = []
    for compiled in (False, True):
        model, optimizer = net()
        step: Any = steps(model, optimizer)
        if compiled:
            step = dynamo_backends.compile_step(
                step, model=model, optimizer=optimizer, backend=backend
            )
        batches = [(x.double(), y) for x, y in nets.rows(6)]
        with around(model):
            losses = [step(*batch) for batch in batches[:3]]
        losses += [step(*batch) for batch in batches[3:]]
        found.append(torch.cat([torch.stack(losses), *(p.flatten() for p in model.parameters())]))
    assert_close("losses and parameters", *(x.detach() for x in found))
    assert step.compilations == 2
    assert step.launches == 6


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_hooks_that_count_nodes_are_refused_and_run_by_split() -> None:
    found = []
    for compiled in (False, True):
        model, optimizer = net()
        counted: list[int] = []
        parameters = list(model.parameters())
        register_multi_grad_hook(parameters, lambda gs, counted=counted: counted.append(len(gs)))
        settings: Any = {"model": model, "optimizer": optimizer, "backend": "aot_eager"}
        step: Any = steps(model, optimizer)
        if compiled:
            with pytest.raises(StepCaptureError, match="register_multi_grad_hook") as refusal:
                dynamo_backends.compile_step(step, **settings)
            assert "0.weight" in str(refusal.value)
            assert "tensor(" not in str(refusal.value)
            step = dynamo_backends.compile_step(step, **settings, fallback="split")
        losses = [step(x.double(), y) for x, y in nets.rows(3)]
        assert counted == [len(parameters)] * 3
        found.append(torch.stack(losses))
    assert step.is_split
    assert_close("losses", *found)


def test_several_replicas_are_refused() -> None:
    model, optimizer = net()
    parallel = nn.DataParallel(model)
    parallel.device_ids = [0, 1]  # as on a machine with two GPUs
    with pytest.raises(StepCaptureError, match="DataParallel copies the model"):
        dynamo_backends.compile_step(
            steps(model, optimizer), model=parallel, optimizer=optimizer, backend="aot_eager"
        )


def one_process(rank: int, folder: str, backend: str) -> None:
    """Trains in one of two processes, and leaves the parameters in the folder."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    trained = {compiled: train_a_part(rank, backend, compiled) for compiled in (False, True)}
    torch.save(trained, f"{folder}/{rank}")
    dist.destroy_process_group()


def train_a_part(rank: int, backend: str, compiled: bool) -> Tensor:
    model, _ = net()
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5)
    step: Any = steps(parallel, optimizer)
    if compiled:
        step = dynamo_backends.compile_step(
            step, model=parallel, optimizer=optimizer, backend=backend, fallback="split"
        )
    for x, y in nets.rows(10)[rank::2]:
        step(x.double(), y)
    assert not compiled or step.is_split
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def refusal_of(kind: str) -> str:
    """What compile_step, or its first call, says."""
    model, optimizer = net()
    given: nn.Module = model
    function = steps(model, optimizer)
    if kind == "ddp by closure":
        function = steps(nn.parallel.DistributedDataParallel(model), optimizer)
    elif kind == "fully_shard":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    elif kind == "all_reduce":

        def function(x: Tensor, y: Tensor) -> None:
            dist.all_reduce(x)

    try:
        step = dynamo_backends.compile_step(
            function, model=given, optimizer=optimizer, backend="aot_eager"
        )
        step(torch.zeros(6, 4, dtype=torch.float64), torch.zeros(6, dtype=torch.long))
    except StepCaptureError as error:
        return str(error)
    return "nothing"


REFUSED = {
    "ddp by closure": "DistributedDataParallel averages gradients between processes in C++",
    "fully_shard": "FSDPModule",
    "all_reduce": "dist.all_reduce(x)",
}


@pytest.mark.long
def test_processes_that_train_together(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(one_process, (str(tmp_path), "openxla"), nprocs=2)
    first, second = (torch.load(tmp_path / str(rank)) for rank in range(2))
    assert torch.equal(first[False], second[False]), "eager's processes agree"
    assert torch.equal(first[True], second[True]), "and ours"
    assert_close("parameters", first[False], first[True])


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of processes that has this one alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_replica_of_one_process_is_its_module() -> None:
    found = []
    for compiled in (False, True):
        model, optimizer = net()
        parallel = nn.parallel.DistributedDataParallel(model)
        step: Any = steps(parallel, optimizer)
        if compiled:
            step = dynamo_backends.compile_step(
                step, model=parallel, optimizer=optimizer, backend="aot_eager"
            )
        for x, y in nets.rows(3):
            step(x.double(), y)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert_close("parameters", *found)
    batch = nets.rows(1)[0][0].double()
    with torch.no_grad():
        assert torch.equal(parallel(batch), model(batch))
    with pytest.raises(StepCaptureError, match="in eager nobody does"):
        parallel(batch)


@pytest.mark.usefixtures("alone")
def test_what_processes_exchange_in_a_step_is_refused() -> None:
    for kind, text in REFUSED.items():
        refusal = refusal_of(kind)
        assert text in refusal
        assert 'fallback="split"' in refusal
