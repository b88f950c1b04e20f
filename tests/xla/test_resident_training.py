"""Training on a device that shares no memory with torch: what stays there, and what moves."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamo_backends import compile_step
from dynamo_backends._torch_private import accumulate_grad_node
from dynamo_backends.interface.errors import StepDeviceError
from dynamo_backends.runtime.device_tensor import DeviceTensor
from dynamo_backends.xla import to_device
from tests.doubles.remote import RemoteDouble
from tests.xla.checkpoints import go_on_from_checkpoints

OPTIONS = {"fallback": "error"}
WORDS = 20


class Words(nn.Module):
    """An encoder of a few words, without the bias of keys, whose gradient is rounding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))
        self.out = nn.Linear(8, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.embed(ids)
        attended = F.scaled_dot_product_attention(embedded, embedded, embedded)
        return self.out(self.inner(attended))


class Few(nn.Module):
    """A model with little to compile."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.out = nn.Linear(8, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.embed(ids).tanh())


def batch() -> tuple[Tensor, Tensor]:
    """Words and targets."""
    return torch.randint(WORDS, (4, 5)), torch.randint(WORDS, (4, 5))


def trainer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    """A step of training."""

    def train(ids: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train


def pair(
    make: Callable[[Any], torch.optim.Optimizer], kind: type[nn.Module] = Few
) -> tuple[Any, ...]:
    """A model on the double and a step of it, and the same in eager."""
    eager = kind()
    model = to_device(copy.deepcopy(eager), "remote")
    optimizers = make(model.parameters()), make(eager.parameters())
    step = compile_step(trainer(model, optimizers[0]), model=model, optimizer=optimizers[0])
    return model, optimizers[0], step, eager, optimizers[1], trainer(eager, optimizers[1])


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of most tests."""
    return torch.optim.AdamW(parameters, 1e-2)


def equal_parameters(model: nn.Module, eager: nn.Module) -> None:
    """Checks that two models have been trained alike."""
    for found, expected in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-3, atol=1e-4)


def test_fifty_steps_upload_batches_and_download_losses_that_were_read(device: RemoteDouble):
    model, optimizer, step, eager, _, expected = pair(adamw, Words)
    for _ in range(2):  # recorded, compiled
        first = batch()
        step(*first)
        expected(*first)
    losses = []
    with device.traffic.counted() as traffic:
        for turn in range(50):
            given = batch()
            loss, reference = step(*given), expected(*given)
            if turn % 10 == 9:
                losses.append((loss.item(), reference.item()))
    assert traffic.uploads == [(4, 5)] * 100
    assert traffic.downloads == [()] * 5
    for loss, reference in losses:
        assert loss == pytest.approx(reference, rel=1e-3)
    assert step.compilations == 1
    equal_parameters(model, eager)
    state = [x for entries in optimizer.state.values() for x in entries.values()]
    assert all(isinstance(x, DeviceTensor) for x in (*model.parameters(), *state))
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.RMSprop(p, 1e-3),
        lambda p: torch.optim.Adagrad(p, 1e-2),
    ],
    ids=["SGD", "RMSprop", "Adagrad"],
)
def test_other_optimizers(device: RemoteDouble, make: Callable[..., Any]):
    model, _, step, eager, _, expected = pair(make)
    for _ in range(4):
        given = batch()
        assert step(*given).item() == pytest.approx(expected(*given).item(), rel=1e-3)
    equal_parameters(model, eager)


def test_schedulers_and_edits_between_steps_are_seen(device: RemoteDouble):
    model, optimizer, step, eager, reference, expected = pair(adamw)
    for turn in range(6):
        given = batch()
        step(*given)
        expected(*given)
        for o in (optimizer, reference):
            o.param_groups[0]["lr"] *= 0.8
        if turn == 2:
            with torch.no_grad():
                for m in (model, eager):
                    m.out.weight[0].zero_()
                    m.embed.weight.mul_(0.5)
    assert step.compilations == 1
    equal_parameters(model, eager)


def test_checkpoints_go_on_in_eager_and_come_back(device: RemoteDouble):
    go_on_from_checkpoints(pair(adamw), batch, equal_parameters)


def test_a_compiled_model_reads_what_a_step_wrote(device: RemoteDouble):
    model, _, step, eager, _, expected = pair(adamw)
    run = torch.compile(model, backend="openxla", options=OPTIONS)
    ids = to_device(batch()[0], "remote")
    with torch.no_grad():
        run(ids)
    for _ in range(2):
        given = batch()
        step(*given)
        expected(*given)
        with torch.no_grad(), device.traffic.counted() as traffic:
            result = run(ids)
        assert not traffic.uploads
        assert not traffic.downloads
        torch.testing.assert_close(result, eager(ids.host()), rtol=1e-3, atol=1e-4)


def test_a_copy_of_a_parameter_keeps_its_contents(device: RemoteDouble):
    model, _, step, *_ = pair(adamw)
    step(*batch())
    weight = model.out.weight
    with device.traffic.counted() as traffic:
        kept, view = weight.detach().clone(), weight[0].detach()
    assert not traffic.downloads
    before = weight.tolist()
    step(*batch())
    assert kept.tolist() == before
    assert view.tolist() == weight[0].tolist() != before[0]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_backward_through_two_graphs_keeps_gradients_on_the_device(device: RemoteDouble):
    eager = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 3)])
    model = to_device(copy.deepcopy(eager), "remote")
    halves = [torch.compile(m, backend="openxla", options=OPTIONS) for m in model]
    for turn in range(3):
        x = torch.randn(5, 4)
        expected = eager[1](eager[0](x).relu()).square().sum()
        given, gradient = to_device(x, "remote"), to_device(torch.ones(()), "remote")
        with device.traffic.counted() as traffic:
            result = _loss(halves[1], _hidden(halves[0], given))
            result.backward(gradient)
        if turn:
            assert not traffic.uploads
            assert not traffic.downloads
        expected.backward()
        torch.testing.assert_close(result, expected)
        for found, reference in zip(model.parameters(), eager.parameters(), strict=True):
            assert isinstance(found.grad, DeviceTensor)
            torch.testing.assert_close(found.grad, reference.grad)
            found.grad = reference.grad = None


@torch.compile(backend="openxla", options=OPTIONS)
def _hidden(half: nn.Module, x: Tensor) -> Tensor:
    return half(x).relu()


@torch.compile(backend="openxla", options=OPTIONS)
def _loss(half: nn.Module, x: Tensor) -> Tensor:
    return half(x).square().sum()


def test_eager_training_runs_on_the_device(device: RemoteDouble):
    eager = Few()
    model = to_device(copy.deepcopy(eager), "remote")
    trainers = [trainer(m, adamw(m.parameters())) for m in (model, eager)]
    for turn in range(3):
        given = batch()
        moved = to_device(given, "remote")
        with device.traffic.counted() as traffic:
            loss = trainers[0](*moved)
        assert not traffic.downloads
        assert turn == 0 or set(traffic.uploads) <= {()}  # numbers that changed
        assert loss.item() == pytest.approx(trainers[1](*given).item(), rel=1e-4)
    equal_parameters(model, eager)


def test_hooks_on_nodes_move_with_their_leaves(device: RemoteDouble):
    model, eager = to_device(nn.Linear(2, 1), "remote"), nn.Linear(2, 1)
    to_device(model, "cpu")
    seen: list[Any] = []
    nodes = [accumulate_grad_node(m.weight) for m in (model, eager)]
    for node in nodes:
        node.register_prehook(lambda gradients: (gradients[0] * 2,))
        node.register_hook(lambda _, gradients: seen.append(gradients[0].tolist()))
    for device_name in ("remote", "cpu"):
        to_device(model, device_name)
        for m in (model, eager):
            m(torch.ones(3, 2)).sum().backward()
        assert model.weight.grad.tolist() == eager.weight.grad.tolist() == [[6.0, 6.0]]
        for m in (model, eager):
            m.zero_grad()
    assert seen == [[[6.0, 6.0]]] * 4
    nodes.clear()
    model(torch.ones(3, 2)).sum().backward()
    assert len(seen) == 4, "as in eager, a node without a holder loses its hooks"


def test_ordinary_leaves_get_ordinary_gradients(device: RemoteDouble):
    run = torch.compile(
        lambda x, w: (x @ w).relu(), backend="openxla", options={"device": "remote"}
    )
    x, w = torch.randn(3, 4), torch.randn(4, 2, requires_grad=True)
    for _ in range(2):
        w.grad = None
        run(x, w).sum().backward()
        reference = w.detach().requires_grad_()
        (x @ reference).relu().sum().backward()
        assert type(w.grad) is Tensor
        torch.testing.assert_close(w.grad, reference.grad)


def test_a_batch_can_be_on_its_way_while_the_host_goes_on(device: RemoteDouble):
    _, _, step, *_ = pair(adamw)
    given = batch()
    gate = threading.Event()
    held = device.link.submit(gate.wait, 60)  # nothing else moves meanwhile
    moved = to_device(given, "remote")
    assert not held.done()
    gate.set()
    for _ in range(2):
        step(*to_device(batch(), "remote"))
    with device.traffic.counted() as traffic:
        step(*moved)
    assert not traffic.uploads


def test_hooks_for_saved_tensors_see_contents(device: RemoteDouble):
    eager = nn.Linear(4, 3)
    model = to_device(copy.deepcopy(eager), "remote")
    run = torch.compile(lambda m, x: m(x).sin().sum(), backend="openxla", options=OPTIONS)
    x = torch.randn(5, 4)
    for _ in range(2):
        with torch.autograd.graph.save_on_cpu():
            run(model, to_device(x, "remote")).backward()
        eager(x).sin().sum().backward()
        torch.testing.assert_close(model.weight.grad, eager.weight.grad)


def test_other_backends_refuse_steps_of_what_lives_elsewhere(device: RemoteDouble):
    model = to_device(nn.Linear(2, 2), "remote")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()

    step = compile_step(train, model=model, optimizer=optimizer, backend="inductor")
    with pytest.raises(StepDeviceError, match="was called with tensors on remote:0"):
        step(torch.ones(1, 2))
