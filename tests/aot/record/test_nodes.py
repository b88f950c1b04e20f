"""Steps by replay: autograd nodes of results, their hooks, gradients that results retain."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook

from tests.aot.record.checks import Case, Run, assert_equal
from tests.aot.record.test_functions import Swish
from tests.aot.record.test_nested_hooks import hooked
from tests.aot.record.test_training import plain


def _node_hooks(run: Run, hidden: Tensor) -> Tensor:
    node: Any = hidden.grad_fn
    node.register_hook(lambda below, above: run.state.log.append((len(below), above[0].norm())))
    node.register_prehook(lambda above: (above[0] * 2,))
    node.register_prehook(lambda above: run.state.log.append(above[0].norm()))
    node.register_hook(lambda below, above: tuple(g * 0.5 for g in below))
    hidden.register_hook(lambda g: run.state.log.append(("tensor", g.norm())))
    return hidden


def _node_of_several(run: Run, hidden: Tensor) -> Tensor:
    """A node with two results, one of which is not used; and one with three inputs."""
    first, second = hidden.split(3, dim=1)
    assert first.grad_fn is second.grad_fn
    node: Any = first.grad_fn
    node.register_prehook(lambda above: run.state.log.append([g is None for g in above]))
    node.register_prehook(lambda above: (above[0] * 3, None))
    out = F.linear(first, run.model[2].weight[:, :3], run.model[2].bias)
    node = out.grad_fn
    node.register_hook(
        lambda below, above: run.state.log.append([g is None or g.norm() for g in below])
    )
    return torch.cat([first * out[:, :1], first], 1)


def _node_of_a_function(run: Run, hidden: Tensor) -> Tensor:
    hidden = Swish.apply(hidden, 1.0)
    node: Any = hidden.grad_fn
    assert node.name() == "SwishBackward"
    node.register_prehook(lambda above: (above[0].clamp(-0.1, 0.1),))
    node.register_hook(lambda below, above: run.state.log.append((below[0].norm(), above[0].sum())))
    return hidden


def _walks(run: Run, hidden: Tensor) -> Tensor:
    """Looks for the nodes below, as tools that draw graphs do."""
    names, stack, seen = [], [(hidden * 2).grad_fn], set()
    while stack:
        node: Any = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names.append(node.name())
        if hasattr(node, "variable"):
            run.state.log.append([node.variable is p for p in run.model.parameters()])
        stack += [below for below, _ in node.next_functions]
    run.state.log.append(names)
    return hidden


def _below(run: Run, hidden: Tensor) -> Tensor:
    """A hook on the node of a result that nobody has any more."""
    node: Any = torch.sin(hidden * 2).grad_fn
    out = torch.sin(hidden * 3)
    below: Any = out.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    below.register_prehook(lambda above: (above[0] * 2,))
    below.metadata["seen"] = run.state.n
    run.state.log.append((type(node).__name__, below.name(), dict(below.metadata)))
    return out


def _written_to(run: Run, hidden: Tensor) -> Tensor:
    hidden = hidden * 2
    before: Any = hidden.grad_fn
    hidden.mul_(3)
    after: Any = hidden.grad_fn
    assert before is not after
    before.register_hook(lambda below, above: run.state.log.append(("before", below[0].norm())))
    after.register_hook(lambda below, above: run.state.log.append(("after", below[0].norm())))
    return hidden


def _of_leaves(run: Run, hidden: Tensor) -> Tensor:
    """As FullyShardedDataParallel: anew at each step, from within."""
    handles: list[Any] = []
    for name, p in run.model.named_parameters():
        node: Any = p.expand_as(p).grad_fn.next_functions[0][0]
        handle = node.register_hook(
            lambda _, above, name=name: run.state.log.append((name, above[0].norm()))
        )
        handles.append((node, handle))

    def remove(i: int) -> None:
        for _, handle in handles:
            handle.remove()

    run.between = remove
    return hidden


def _several(run: Run, hidden: Tensor) -> Tensor:
    other = torch.sin(hidden)
    unused = torch.cos(hidden)
    tensors = (hidden, other, unused, run.model[2].weight)

    def hook(gradients: Any) -> None:
        run.state.log.append([g is None or g.norm() for g in gradients])

    handle = register_multi_grad_hook(tensors, hook)
    run.between = lambda i: handle.remove()
    register_multi_grad_hook(
        (other, hidden), lambda g: run.state.log.append(("any", g.norm())), mode="any"
    )
    return hidden + other


def _several_functions(run: Run, hidden: Tensor) -> Tensor:
    first, second = Swish.apply(hidden, 1.0), Swish.apply(hidden, 0.5)
    register_multi_grad_hook(
        (first, second), lambda gs: run.state.log.append([g is None or g.norm() for g in gs])
    )
    return first if run.state.n % 2 else first + second


def _callback_of_a_result(run: Run, hidden: Tensor) -> Tensor:
    engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]

    def hook(g: Tensor) -> None:
        engine.queue_callback(
            lambda: run.state.log.append([p.grad.norm() for p in run.model.parameters()])
        )

    hidden.register_hook(hook)
    return hidden


class Queues(torch.autograd.Function):
    """Its backward asks for a callback."""

    log: Any = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        engine.queue_callback(lambda: Queues.log.append(gradient.norm()))
        return gradient * 2


def _callback_of_a_function(run: Run, hidden: Tensor) -> Tensor:
    Queues.log = run.state.log
    result: Tensor = Queues.apply(hidden)
    return result


def _logs_gradients(run: Run, *tensors: Tensor) -> None:
    """After the step."""

    def log(i: int) -> None:
        run.state.log += [t.grad.clone() for t in tensors if t.grad is not None]

    run.between = log


def _retains(run: Run, hidden: Tensor) -> Tensor:
    hidden.retain_grad()
    hidden.retain_grad()
    hidden.register_hook(lambda g: g * 2)  # comes before
    run.state.log.append(hidden.retains_grad)
    squared = hidden * hidden
    squared.retain_grad()
    hidden.register_hook(lambda g: run.state.log.append(g.norm()))
    _logs_gradients(run, hidden, squared)
    return squared + hidden


def _retains_what_is_written_to(run: Run, hidden: Tensor) -> Tensor:
    hidden = hidden * 2
    hidden.retain_grad()
    hidden.mul_(3)
    _logs_gradients(run, hidden)
    return hidden


def _retains_of_a_function(run: Run, hidden: Tensor) -> Tensor:
    hidden = Swish.apply(hidden, 1.0)
    hidden.retain_grad()
    _logs_gradients(run, hidden)
    return hidden


ONE_PROGRAM = (
    _node_hooks, _node_of_several, _node_of_a_function, _walks, _below, _written_to, _several,
    _of_leaves, _callback_of_a_result, _callback_of_a_function, _retains,
    _retains_what_is_written_to, _retains_of_a_function,
)  # fmt: skip


def retains_a_gradient(run: Run) -> Any:
    def step(x: Tensor, y: Tensor) -> Any:
        out = run.model(x)
        out.retain_grad()
        loss = F.cross_entropy(out, y)
        loss.backward(retain_graph=True)
        first = out.grad.clone()
        (loss * 2).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss, first, out.grad

    return step


def asks_for_a_gradient(run: Run) -> Any:
    """Of a result that retains it, too."""

    def step(x: Tensor, y: Tensor) -> Any:
        hidden = run.model[0](x)
        hidden.retain_grad()
        loss = F.cross_entropy(run.model[2](hidden), y)
        (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
        penalty = hidden.grad.square().sum()
        hidden.grad = None
        (loss + gradient.square().sum() + penalty).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss, gradient, hidden.grad

    return step


def retains_of_leaves(run: Run) -> Any:
    """Which does nothing, as in eager."""

    def step(x: Tensor, y: Tensor) -> Any:
        x = x.detach().requires_grad_()
        x.retain_grad()
        loss = F.cross_entropy(run.model(x), y)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.state.x = x
        return loss, x.grad

    run.between = lambda i: vars(run.state).update({f"gradient {i}": run.state.x.grad})
    return step


@pytest.mark.parametrize("loop", [retains_a_gradient, asks_for_a_gradient, retains_of_leaves])
def test_gradients_of_results_are_part_of_one_program(loop: Any) -> None:
    step = assert_equal(Case(loop))
    assert (step.compilations, step.cuts) == (1, 0)
    assert step.eager_steps == 1, step.divergences


def test_what_has_no_gradient_retains_none() -> None:
    def loop(run: Run) -> Any:
        def step(x: Tensor, y: Tensor) -> Any:
            with pytest.raises(RuntimeError, match="can't retain_grad"):
                (x * 2).retain_grad()
            return plain(run)(x, y)

        return step

    assert_equal(Case(loop))


@pytest.mark.parametrize("register", ONE_PROGRAM)
def test_nodes_of_results_are_part_of_one_program(register: Any) -> None:
    step = assert_equal(Case(hooked(register)))
    assert (step.compilations, step.cuts) == (1, 0)
    assert step.eager_steps == 1, step.divergences


def test_hooks_on_several_results_that_differ() -> None:
    step = assert_equal(Case(hooked(_several_functions), most_eager=2))
    assert (step.compilations, step.cuts) == (2, 0)
