"""Steps by replay: hooks on parameters."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from dynamo_backends import compile_step
from dynamo_backends.runtime import weight_binding
from tests.aot.record.checks import Case, Run, assert_equal, batches, network, update_by_gradients
from tests.aot.record.test_training import accumulates, clips, plain, reads_the_loss


def counts(run: Run) -> Any:
    run.state.calls = 0

    def hook(gradient: Tensor) -> Tensor:
        run.state.calls += 1
        return gradient * run.state.calls

    run.model[0].weight.register_hook(hook)
    return plain(run)


def keeps_the_order(run: Run) -> Any:
    run.state.order = []
    for name, parameter in run.model.named_parameters():
        parameter.register_hook(lambda g, name=name: run.state.order.append(name))
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: run.state.order.append((name, p.grad.norm()))
        )
    return plain(run)


def several_on_one(run: Run) -> Any:
    weight = run.model[2].weight
    run.state.kept = []
    weight.register_hook(lambda g: g.clamp(-0.1, 0.1))
    weight.register_hook(run.state.kept.append)
    weight.register_hook(lambda g: g * 2)
    return clips(run)


def keeps_the_gradient_itself(run: Run) -> Any:
    run.state.kept = []
    run.model[0].weight.register_hook(run.state.kept.append)
    return clips(run)  # which changes .grad in place


def changes_it_in_place(run: Run) -> Any:
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    run.model[0].bias.register_post_accumulate_grad_hook(hook)
    return plain(run)


def hooked_and_accumulated(run: Run) -> Any:
    run.state.norms = []
    run.model[0].weight.register_hook(lambda g: run.state.norms.append(g.norm()))
    run.model[0].weight.register_hook(lambda g: g + 0.01)
    return accumulates(run)


def masks_rows(run: Run) -> Any:
    mask = torch.arange(3) > 0
    run.model[2].weight.register_hook(lambda g: g * mask[:, None].to(g))
    return plain(run)


def reads_values(run: Run) -> Any:
    run.state.norms = []
    run.model[0].weight.register_hook(lambda g: run.state.norms.append(g.norm().item()))
    return plain(run)


def goes_by_value(run: Run) -> Any:
    def hook(gradient: Tensor) -> Any:
        return gradient * 0.5 if gradient.norm() > 0.2 else None

    run.model[0].weight.register_hook(hook)
    return plain(run)


def comes_and_goes(run: Run) -> Any:
    run.state.n = 0

    def step(x: Tensor, y: Tensor) -> Any:
        run.state.n += 1
        handle = None
        if run.state.n % 2:
            handle = run.model[0].weight.register_hook(lambda g: g * 3)
        loss = plain(run)(x, y)
        if handle is not None:
            handle.remove()
        return loss

    return step


def steps_in_the_backward_pass(run: Run) -> Any:
    """An optimizer for each parameter, which steps as soon as there is a gradient."""
    for parameter in run.model.parameters():
        optimizer = torch.optim.SGD([parameter], 0.1, momentum=0.5)
        run.optimizers.append(optimizer)

        def hook(p: Tensor, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(hook)

    def step(x: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        return loss

    return step


def logs_the_loss(run: Run) -> Any:
    run.model[0].weight.register_hook(lambda g: g * 0.9)
    return reads_the_loss(run)


def two_passes(run: Run) -> Any:
    run.model[0].weight.register_hook(lambda g: g * 0.9)

    def step(x: Tensor, y: Tensor) -> Any:
        out = run.model(x)
        first, second = F.cross_entropy(out, y), out.square().mean()
        first.backward(retain_graph=True)
        torch.autograd.backward([second], [torch.tensor(0.5, dtype=out.dtype)])
        run.optimizer.step()
        run.optimizer.zero_grad()
        return first, second

    return step


class Tied(nn.Module):
    """A weight that is used twice, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.unused = nn.Linear(2, 2)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.first(torch.tanh(self.first(x)))))
        return result


def on_all(run: Run) -> Any:
    run.state.calls = []
    for name, parameter in run.model.named_parameters():
        parameter.register_hook(lambda g, name=name: run.state.calls.append((name, g.sum())))
    return plain(run)


def looks_at_other_gradients(run: Run) -> Any:
    """Gradients of leaves that come later are not there yet, or those of the step before."""
    run.state.found = []

    def hook(_: Tensor) -> None:
        gradients = [p.grad for p in run.model.parameters()]
        run.state.found.append([None if g is None else g.norm() for g in gradients])

    run.model[2].weight.register_post_accumulate_grad_hook(hook)
    return plain(run)


def accumulates_beside_a_hook(run: Run) -> Any:
    run.model[2].weight.register_hook(lambda g: g * 0.5)
    return accumulates(run)


CASES: dict[str, Case] = {
    **{f.__name__: Case(f) for f in (
        looks_at_other_gradients, accumulates_beside_a_hook, keeps_the_order, several_on_one,
        keeps_the_gradient_itself, changes_it_in_place,
        masks_rows, reads_values, logs_the_loss, two_passes, steps_in_the_backward_pass,
    )},
    **{f.__name__: Case(f, most_eager=6) for f in (
        counts, hooked_and_accumulated, goes_by_value, comes_and_goes,
    )},
    "tied": Case(on_all, model=lambda: Tied().double()),
}  # fmt: skip


ONE_PROGRAM = (
    "keeps_the_order", "several_on_one", "masks_rows", "changes_it_in_place", "two_passes",
    "steps_in_the_backward_pass",
)  # fmt: skip


@pytest.mark.parametrize("name", sorted(CASES.keys() - set(ONE_PROGRAM)))
def test_hooks_on_parameters_are_those_of_eager(name: str) -> None:
    assert_equal(CASES[name])


@pytest.mark.parametrize("name", ONE_PROGRAM)
def test_such_a_step_is_one_program(name: str) -> None:
    step = assert_equal(CASES[name])
    assert (step.compilations, step.cuts) == (1, 0)


# Hooks that belong to the pass as a whole, and those of the nodes that accumulate.


def node_of(leaf: Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(leaf).node


def on_several(run: Run) -> Any:
    run.state.calls = []

    def hook(gradients: Any) -> None:
        run.state.calls.append([g is None or g.norm() for g in gradients])

    torch.autograd.graph.register_multi_grad_hook(tuple(run.model.parameters()), hook)
    return plain(run)


def on_any_of_several(run: Run) -> Any:
    run.state.calls = []
    torch.autograd.graph.register_multi_grad_hook(
        tuple(run.model.parameters()), lambda g: run.state.calls.append(g.norm()), mode="any"
    )
    return two_passes(run)


def on_several_of_two_passes(run: Run) -> Any:
    """Some of them are used in one of the passes only."""
    run.state.calls = []
    leaves = [run.model[0].weight, run.model[2].weight, run.model[2].bias]

    def hook(gradients: Any) -> None:
        run.state.calls.append([g is None or g.norm() for g in gradients])

    torch.autograd.graph.register_multi_grad_hook(leaves, hook)

    def step(x: Tensor, y: Tensor) -> Any:
        hidden = run.model[0](x)
        hidden.square().mean().backward(retain_graph=True)
        loss = F.cross_entropy(run.model[2](run.model[1](hidden)), y)
        loss.backward(inputs=[run.model[2].bias, run.model[0].weight])
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss

    return step


def engine() -> Any:
    return torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]


def queues_a_callback(run: Run) -> Any:
    run.state.calls = []

    def last() -> None:
        run.state.calls.append(("last", torch.is_grad_enabled()))

    def callback() -> None:
        total = sum(p.grad.sum() for p in run.model.parameters())
        run.state.calls.append(("end", total, torch.is_grad_enabled()))
        engine().queue_callback(last)

    def hook(gradient: Tensor) -> None:
        run.state.calls.append(gradient.norm())
        engine().queue_callback(callback)

    run.model[0].weight.register_hook(hook)
    return two_passes(run)


def reduces_in_buckets(run: Run) -> Any:
    """As DistributedDataParallel: hooks fill buckets, the last one asks for a callback."""
    parameters = list(run.model.parameters())
    buckets = [torch.zeros(p.numel(), dtype=p.dtype) for p in parameters]
    run.state.ready = 0
    run.nodes = list(map(node_of, parameters))  # type: ignore[attr-defined]

    def finish() -> None:
        for p, bucket in zip(parameters, buckets, strict=True):
            p.grad.copy_(bucket.view_as(p) / 2)
        run.state.ready = 0

    def on_node(i: int, *_: Any) -> None:
        buckets[i].copy_(parameters[i].grad.reshape(-1))
        run.state.ready += 1
        if run.state.ready == len(parameters):
            engine().queue_callback(finish)

    for i, node in enumerate(run.nodes):  # type: ignore[attr-defined]
        node.register_hook(functools.partial(on_node, i))
    return plain(run)


def on_nodes(run: Run) -> Any:
    run.state.calls = []
    run.nodes = []  # type: ignore[attr-defined]
    for name, p in run.model.named_parameters():
        node = p.expand_as(p).grad_fn.next_functions[0][0]
        run.nodes.append(node)  # type: ignore[attr-defined]
        node.register_hook(
            lambda below, above, name=name, p=p: run.state.calls.append(
                (name, "after", len(below), above[0].norm(), p.grad.norm())
            )
        )
        node.register_prehook(lambda above: (above[0] * 2,))
        node.register_prehook(
            lambda above, name=name: run.state.calls.append((name, "before", above[0].norm()))
        )
        p.register_hook(lambda g, name=name: run.state.calls.append((name, g.norm())))
        p.register_post_accumulate_grad_hook(
            lambda p, name=name: run.state.calls.append((name, "done", p.grad.norm()))
        )
    return plain(run)


def on_a_node_of_two_passes(run: Run) -> Any:
    run.nodes = [node_of(run.model[0].weight)]  # type: ignore[attr-defined]
    run.nodes[0].register_prehook(lambda above: (above[0].clamp(-0.1, 0.1),))  # type: ignore[attr-defined]
    return two_passes(run)


def on_a_node_whose_gradient_is_asked_for(run: Run) -> Any:
    """Which does not reach the node."""
    run.state.calls = []
    run.nodes = [node_of(run.model[0].weight)]  # type: ignore[attr-defined]
    run.nodes[0].register_prehook(lambda above: run.state.calls.append("node"))  # type: ignore[attr-defined]
    run.model[0].weight.register_hook(lambda g: run.state.calls.append("tensor"))

    def step(x: Tensor, y: Tensor) -> Any:
        return update_by_gradients(run, F.cross_entropy(run.model(x), y))

    return step


PASS_HOOKS = (
    on_several, on_any_of_several, on_several_of_two_passes, queues_a_callback,
    reduces_in_buckets, on_nodes, on_a_node_of_two_passes, on_a_node_whose_gradient_is_asked_for,
)  # fmt: skip


@pytest.mark.parametrize("loop", PASS_HOOKS)
def test_hooks_of_passes_and_nodes_are_part_of_one_program(loop: Callable[[Run], Any]) -> None:
    step = assert_equal(Case(loop))
    assert (step.compilations, step.cuts) == (1, 0)
    assert step.eager_steps == 1, step.divergences


def _scales(gradient: Tensor) -> Tensor:
    return gradient * 3


def _tensor_hook(run: Run) -> Any:
    return run.model[0].weight.register_hook(_scales)


def _accumulated(run: Run) -> Any:
    def hook(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    return run.model[0].weight.register_post_accumulate_grad_hook(hook)


def _node_prehook(run: Run) -> Any:
    run.node = node_of(run.model[0].weight)  # type: ignore[attr-defined]
    return run.node.register_prehook(lambda above: (above[0] * 3,))  # type: ignore[attr-defined]


def _node_hook(run: Run) -> Any:
    run.node = node_of(run.model[0].weight)  # type: ignore[attr-defined]
    return run.node.register_hook(lambda _, above: run.state.calls.append(above[0].norm()))  # type: ignore[attr-defined]


def _several(run: Run) -> Any:
    return torch.autograd.graph.register_multi_grad_hook(
        list(run.model.parameters()),
        lambda gradients: run.state.calls.append([g.norm() for g in gradients]),
    )


def _module_hook(run: Run) -> Any:
    return run.model[2].register_full_backward_hook(lambda m, below, above: (below[0] * 2,))


def _module_prehook(run: Run) -> Any:
    return run.model[2].register_full_backward_pre_hook(lambda m, above: (above[0] * 2,))


def _old_module_hook(run: Run) -> Any:
    return run.model[2].register_backward_hook(
        lambda m, below, above: run.state.calls.append(above[0].norm())
    )


def _global_module_hook(run: Run) -> Any:
    return nn.modules.module.register_module_full_backward_hook(
        lambda m, below, above: run.state.calls.append(above[0].norm())
    )


LATER = (
    _tensor_hook, _accumulated, _node_prehook, _node_hook, _several, _module_hook, _module_prehook,
    _old_module_hook, _global_module_hook,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("register", LATER)
def test_hooks_that_come_and_go_between_steps(register: Callable[[Run], Any]) -> None:
    """Registered when steps are replayed already, removed, replaced and there again."""

    def loop(run: Run) -> Any:
        run.state.calls = []
        handles: list[Any] = []

        def between(i: int) -> None:
            if i in (2, 6):
                handles.append(register(run))
            elif i in (4, 8):
                handles.pop().remove()
            elif i == 7:
                handles.append(register(run))
                handles.pop(0).remove()

        run.between = between
        return plain(run)

    step = assert_equal(Case(loop, steps=11, most_eager=3))
    assert step.cuts == 0


@pytest.mark.parametrize(
    "result", [1, torch.ones(2), torch.ones(6, 4)], ids=["a number", "a shape", "a dtype"]
)
def test_a_hook_with_a_wrong_result_raises_as_in_eager(result: Any) -> None:
    def error(is_compiled: bool) -> BaseException:
        model: Any = network()
        run = Run(model, torch.optim.SGD(model.parameters(), 0.1))
        handle = model[0].weight.register_hook(lambda g: None)
        step = plain(run)
        if is_compiled:
            step = compile_step(step, model=model, optimizer=run.optimizer, backend="aot_eager",
                                python="replay")  # fmt: skip
            generator = torch.Generator().manual_seed(0)
            for i in range(2):
                step(*batches(i, generator))
        handle.remove()
        model[0].weight.register_hook(lambda g: result)
        with pytest.raises((TypeError, RuntimeError)) as caught:
            step(*batches(0, torch.Generator().manual_seed(0)))
        return caught.value

    expected, raised = error(False), error(True)
    assert type(raised) is type(expected)


@pytest.mark.parametrize("of_user", [False, True])
def test_hooks_of_all_optimizers(of_user: bool) -> None:
    """Frozen weights have one, for the rest of the process; a user's is called at each step."""
    weight_binding._watch_optimizers()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    calls: list[Any] = []

    def train(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = compile_step(
        train, model=model, optimizer=optimizer, backend="aot_eager", python="replay"
    )
    watch = register_optimizer_step_post_hook if of_user else lambda _: contextlib.ExitStack()
    handle: Any = watch(lambda *args: calls.append(args[0]))
    with handle:
        for _ in range(4):
            step(torch.ones(3, 4))
    assert calls == [optimizer] * 4 * of_user
    assert of_user or step.eager_steps == 1, step.divergences


def test_a_method_of_the_users_on_an_optimizer_runs_at_every_call() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    take, calls = optimizer.step, []

    def counted() -> None:
        calls.append(len(calls))
        take()

    optimizer.step = counted  # type: ignore[method-assign, assignment]

    def train(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step = compile_step(
        train, model=model, optimizer=optimizer, backend="aot_eager", python="replay"
    )
    for _ in range(4):
        step(torch.ones(3, 4))
    assert calls == [0, 1, 2, 3]
    assert optimizer.step is counted
    assert step.eager_steps == 1, step.divergences
