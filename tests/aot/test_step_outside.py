"""What acts on a step from outside of its record: followed where it can be, refused where not."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook, saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

import dynamo_backends
from dynamo_backends.interface.errors import StepCaptureError
from tests.aot import step_nets as nets
from tests.aot.step_checks import assert_close, assert_one_program


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


AROUND = (before_accumulation, after_accumulation, of_all_modules)


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
    # With hooks, and without: a step in eager each, and a program.
    assert (step.compilations, step.launches, step.eager_steps) == (2, 4, 2)
    assert step.refusals == {}


def test_hooks_on_saved_tensors_are_refused_and_run_by_split() -> None:
    found = []
    for compiled in (False, True):
        model, optimizer = net()
        settings: Any = {"model": model, "optimizer": optimizer, "backend": "aot_eager"}
        step: Any = steps(model, optimizer)
        batches = [(x.double(), y) for x, y in nets.rows(6)]
        if compiled:
            refusing = dynamo_backends.compile_step(step, **settings)
            with (
                of_saved_tensors(model),
                pytest.raises(StepCaptureError, match=r"uses saved-tensor hooks at .*model\(x"),
            ):
                refusing(*batches[0])
            step = dynamo_backends.compile_step(step, **settings, fallback="split")
        with of_saved_tensors(model):
            losses = [step(*batch) for batch in batches[:3]]
        losses += [step(*batch) for batch in batches[3:]]
        found.append(torch.cat([torch.stack(losses), *(p.flatten() for p in model.parameters())]))
    assert_close("losses and parameters", *(x.detach() for x in found))
    assert list(step.refusals.values()) == ["uses saved-tensor hooks"]
    assert (step.eager_steps, step.launches) == (4, 2)


@pytest.mark.parametrize("backend", ["aot_eager", "openxla"])
def test_hooks_that_count_nodes_are_called_at_each_step(backend: str) -> None:
    found = []
    for compiled in (False, True):
        model, optimizer = net()
        counted: list[int] = []
        parameters = list(model.parameters())
        register_multi_grad_hook(parameters, lambda gs, counted=counted: counted.append(len(gs)))
        step: Any = steps(model, optimizer)
        if compiled:
            step = dynamo_backends.compile_step(
                step, model=model, optimizer=optimizer, backend=backend
            )
        losses = [step(x.double(), y) for x, y in nets.rows(4)]
        assert counted == [len(parameters)] * 4
        found.append(torch.stack(losses))
    assert_one_program(step, 4)
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
    assert not compiled or step.refusals
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def refusal_of(kind: str) -> str:
    """What compile_step, or one of two calls, says."""
    model, optimizer = net()
    given: nn.Module = model
    function = steps(model, optimizer)
    if kind == "ddp by closure":
        function = steps(nn.parallel.DistributedDataParallel(model), optimizer)
    elif kind == "fully_shard":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    elif kind in COLLECTIVES:
        communicate = COLLECTIVES[kind]

        def function(x: Tensor, y: Tensor) -> None:
            communicate(x)

    try:
        step = dynamo_backends.compile_step(
            function, model=given, optimizer=optimizer, backend="aot_eager"
        )
        for _ in range(2):
            step(torch.zeros(6, 4, dtype=torch.float64), torch.zeros(6, dtype=torch.long))
    except StepCaptureError as error:
        return str(error)
    return "nothing"


COLLECTIVES = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "all_gather": lambda x: dist.all_gather([torch.empty_like(x)], x),
    "functional": lambda x: functional_collectives.all_reduce(x, "sum", dist.group.WORLD),
    "objects": lambda x: dist.all_gather_object([None], 3),
}

REFUSED = {
    "ddp by closure": "DistributedDataParallel, which averages gradients between processes in C++",
    "fully_shard": "FSDPModule",
    "all_reduce": "dist.all_reduce(x)",
    "broadcast": "dist.broadcast(x, 0)",
    "all_gather": "dist.all_gather([torch.empty_like(x)], x)",
    "functional": "functional_collectives.all_reduce(x",
    "objects": "dist.all_gather_object([None], 3)",
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
    with pytest.raises(StepCaptureError, match="in eager would not average"):
        parallel(batch)


@pytest.mark.usefixtures("alone")
def test_what_processes_exchange_in_a_step_is_refused() -> None:
    for kind, text in REFUSED.items():
        refusal = refusal_of(kind)
        assert text in refusal, kind
        assert 'fallback="split"' in refusal
