"""Steps of optimizers in a trace."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from dynamo_backends import _torch_private as private
from dynamo_backends.aot.step.accumulation import override_method
from dynamo_backends.aot.step.program.functionalization import metadata_of
from dynamo_backends.aot.step.program.substitution import Substitution
from dynamo_backends.aot.step.state.unsupported_hooks import has_global_hooks


def take_traced_step(
    substitution: Substitution, optimizer: Any, overflows: Sequence[Tensor]
) -> None:
    """Takes an optimizer's step in a trace; it is taken back where gradients overflowed."""
    formula = traceable_step_of(optimizer)
    with (
        substitution.inside_optimizer_step(optimizer),
        _restoring(substitution.all_fakes, overflows),
        tracing_equal_updates_once(optimizer, substitution.fake, substitution.scalars.forget),
    ):
        if formula is None:
            optimizer.step()
        else:
            formula(optimizer)


@contextlib.contextmanager
def _restoring(
    tensors: Callable[[], Iterable[Tensor]], overflows: Sequence[Tensor]
) -> Iterator[None]:
    """Inside: an optimizer steps; what it writes is taken back where gradients overflowed."""
    if not overflows:
        yield
        return
    with torch.no_grad():
        overflow = torch.stack([f.to("cpu") for f in overflows]).sum() != 0
        before = [(t, t._version, t.clone()) for t in tensors()]  # those unused are dropped
    yield
    with torch.no_grad():
        for tensor, version, contents in before:
            if tensor._version != version:
                tensor.copy_(torch.where(overflow.to(tensor.device), contents, tensor))


# Steps that read values out of tensors in torch, written without: operation by operation as in
# torch; where Python decides between two numbers, `torch.where` does.


def traceable_step_of(optimizer: Optimizer) -> Callable[..., Any] | None:
    """Returns the traceable replacement of an optimizer's `step`; None: it has none."""
    return _FORMULAS.get(type(optimizer))


@Optimizer.profile_hook_step
@torch.no_grad()
def _adafactor(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """Shazeer and Stern, 2018 (arXiv:1804.04235), as torch.optim.Adafactor has it."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    for group in optimizer.param_groups:
        eps1, _ = group["eps"]
        for p in group["params"]:
            if p.grad is None:
                continue
            if eps1 is None:  # that of the first parameter holds for all of a group
                eps1 = torch.finfo(p.dtype).eps
            grad = -p.grad if group["maximize"] else p.grad
            _update(p, grad, optimizer.state[p], {**group, "eps1": eps1})
    return loss


def _update(p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    lr, weight_decay, d, eps1 = group["lr"], group["weight_decay"], group["d"], group["eps1"]
    lr = lr.squeeze() if isinstance(lr, Tensor) and lr.ndim else lr
    step = state["step"]
    step += 1
    count = step.item()
    rho = _min(lr, 1 / (count**0.5))
    alpha = _max(group["eps"][1], p.norm(2).item() / (p.numel() ** 0.5)) * rho
    if weight_decay != 0:
        p.mul_(1 - lr * weight_decay)
    variance = _variance(grad, state, count ** group["beta2_decay"], eps1)
    update = variance.clamp_(min=eps1 * eps1).rsqrt_()
    update.mul_(grad)
    root_mean_square = update.norm(2).item() / ((update.numel() ** 0.5) * d)
    p.add_(update, alpha=-alpha / _max(1.0, root_mean_square))


def _variance(grad: Tensor, state: dict[str, Any], weight: Any, eps1: Any) -> Tensor:
    """The estimate of the squared gradient, by the product of a row and a column if it has them."""
    if grad.dim() <= 1:
        state["variance"].lerp_(grad * grad, weight)
        return state["variance"].clone()
    rows, columns = state["row_var"], state["col_var"]
    for kept, dim in ((rows, -1), (columns, -2)):
        mean = torch.norm(grad, dim=dim, keepdim=True).square_().div_(grad.size(dim))
        kept.lerp_(mean, weight)
    estimate = rows @ columns
    return estimate.div_(rows.mean(dim=-2, keepdim=True).clamp_(min=eps1))


def _min(a: Any, b: Any) -> Any:
    """Python's `min(a, b)` for numbers and what stands for them."""
    return torch.where(b < a, b, a)


def _max(a: Any, b: Any) -> Any:
    """Computes Python's `max(a, b)`."""
    return torch.where(b > a, b, a)


_FORMULAS: dict[type[Optimizer], Callable[..., Any]] = {torch.optim.Adafactor: _adafactor}


_INDEPENDENT = frozenset(
    {"Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop",
     "Rprop", "SGD"}
)  # fmt: skip
"""Optimizers that update each parameter by its own gradient and state alone."""


@contextlib.contextmanager
def tracing_equal_updates_once(
    optimizer: torch.optim.Optimizer,
    fake_of: Callable[[Tensor], Tensor],
    note_write: Callable[[Tensor], None],
) -> Iterator[None]:
    """Traces one of each group of equal updates, copies the rest (context manager).

    Args:
        optimizer: The optimizer.
        fake_of: Gives the tensor of the trace that stands in for one.
        note_write: Called for each tensor that is written to by a copied call.
    """
    if not _is_independent(optimizer):
        yield
        return
    likes: list[_Likes] = []

    def init_group(original: Callable[..., Any], group: Any, *lists: list[Any]) -> Any:
        result = original(group, *lists)
        with torch._C.DisableTorchFunction():
            likes.extend(_take_first(lists, fake_of))
        return result

    graph = private.graph_being_traced()
    last = next(iter(reversed(graph.nodes)))  # torch 2.12 needs the iter()
    with override_method(optimizer, "_init_group", init_group):
        yield
    _find_calls(likes, _nodes_after(graph, last))
    with torch._C.DisableTorchFunction():
        for each in likes:
            each.copy(graph, note_write)


def _is_independent(optimizer: Any) -> bool:
    kind = type(optimizer)
    is_known = kind.__module__.startswith("torch.optim") and kind.__name__ in _INDEPENDENT
    is_differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
    has_hooks = any(private.tables_of_hooks(optimizer)) or has_global_hooks()
    return is_known and not is_differentiable and not has_hooks


class _Likes:
    """Parameters that are alike, each with its gradient and state."""

    def __init__(self, first: Sequence[Tensor], others: Sequence[Sequence[Tensor]]):
        self._first = first
        self._others = others
        self._versions = [t._version for t in first]
        self.nodes = list(map(private.node_of, first))
        self._nodes_of_others = [list(map(private.node_of, other)) for other in others]
        self.calls: list[fx.Node] = []

    def copy(self, graph: fx.Graph, note_write: Callable[[Tensor], None]) -> None:
        """Updates the others by the same calls."""
        for nodes in self._nodes_of_others:
            copies = dict(zip(self.nodes, nodes, strict=True))
            for call in self.calls:
                copies[call] = graph.node_copy(call, lambda n: copies.get(n, n))  # noqa: B023
        for i, (tensor, version) in enumerate(zip(self._first, self._versions, strict=True)):
            if tensor._version != version:
                for other in self._others:
                    torch.autograd.graph.increment_version(other[i])
                    note_write(other[i])


def _take_first(
    lists: Sequence[list[Any]], fake_of: Callable[[Tensor], Tensor]
) -> Iterator[_Likes]:
    """Leaves the first of those that are alike."""
    filled = [each for each in lists if each]
    if len(set(map(len, filled))) != 1:
        return
    rows = [
        [fake_of(x) if isinstance(x, Tensor) else x for x in row]
        for row in zip(*filled, strict=True)
    ]
    traced = [all(private.node_of(x) is not None for x in _tensors(row)) for row in rows]
    likes: dict[Any, list[int]] = {}
    with private.disable_current_modes():
        storages = Counter(private.storage_id(x) for row in rows for x in _tensors(row))
        for i, row in enumerate(rows):
            is_apart = all(storages[private.storage_id(x)] == 1 for x in _tensors(row))
            kind = tuple(map(_kind_of, row)) if is_apart and traced[i] else i
            likes.setdefault(kind, []).append(i)
    for each in filled:
        each[:] = [each[i] for i, *_ in likes.values()]
    for i, *others in likes.values():
        if others:
            yield _Likes(_tensors(rows[i]), [_tensors(rows[j]) for j in others])


def _tensors(row: Iterable[Any]) -> list[Tensor]:
    return [x for x in row if isinstance(x, Tensor)]


def _kind_of(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return repr(value)
    return metadata_of(value), value.requires_grad, value.is_leaf


def _nodes_after(graph: fx.Graph, last: fx.Node) -> list[fx.Node]:
    nodes = []
    for node in reversed(graph.nodes):
        if node is last:
            break
        nodes.append(node)
    return nodes[::-1]


def _find_calls(likes: Sequence[_Likes], nodes: Iterable[fx.Node]) -> None:
    """Finds the calls that update each of the parameters that are updated."""
    owners = {node: each for each in likes for node in each.nodes}
    for node in nodes:
        found = {owners[n] for n in node.all_input_nodes if n in owners}
        if found:
            (owner,) = found  # each parameter is updated by its own gradient and state
            owners[node] = owner
            owner.calls.append(node)
