"""Drives the gradients of PyTorch's operator database through a backend and judges each."""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private.testing import OpInfo
from dynamo_backends.conformance.operators import database, running
from dynamo_backends.conformance.operators.calls import dense, far_apart, widen
from dynamo_backends.conformance.operators.running import NOISY
from dynamo_backends.conformance.outcomes import Outcome
from dynamo_backends.conformance.subject import OPERATORS, compiler_of
from dynamo_backends.interface.errors import brief_error, first_line
from dynamo_backends.interface.logs import silence_loggers
from dynamo_backends.interface.report import record
from dynamo_backends.verify import describe_difference

DTYPES = (torch.float32, torch.float64)
"""Of inputs."""

Tensors = list[torch.Tensor]


def cases(
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> Iterator[tuple[OpInfo, torch.dtype]]:
    """Yields every operator with every dtype in which it has a gradient on the CPU."""
    for op, dtype in database.cases(dtypes):
        if op.supports_autograd and dtype in op.supported_backward_dtypes("cpu"):
            yield op, dtype


def run(op: OpInfo, dtype: torch.dtype, backend: str, limit: int | None = None) -> Outcome:
    """Compares gradients of an operator's samples with eager's.

    Args:
        op: From `op_db`.
        dtype: Dtype of the inputs.
        backend: Name of the backend.
        limit: Largest number of samples, spread over all of them.
    """
    outcome = Outcome(database.full_name(op), database.name_of(dtype), group="gradients")
    compiler = compiler_of(backend, **OPERATORS)
    torch.manual_seed(0)
    with warnings.catch_warnings(), silence_loggers(*NOISY):
        warnings.simplefilter("ignore")
        samples = database.choose(list(op.sample_inputs("cpu", dtype, requires_grad=True)), limit)
        size = running.TOGETHER
        for start in range(0, len(samples), size):
            group = samples[start : start + size]
            if not _native_together(op, group, compiler, outcome):
                for sample in group:
                    _run_sample(_Call(op, [sample]), compiler, outcome)
                    if outcome.failed:
                        break
            if outcome.failed:
                break
    torch._dynamo.reset()
    return outcome


@dataclass
class _Gradients:
    """Differentiable results, gradients of the inputs, and the gradients these were made of."""

    results: Tensors
    gradients: Tensors
    cotangents: Tensors

    @property
    def all(self) -> Tensors:
        return dense([*self.results, *self.gradients])


class _Call:
    """Calls of one operator on some samples, as a function of all values in them.

    Args:
        op: The operator.
        samples: Sample inputs.
    """

    def __init__(self, op: OpInfo, samples: Sequence[Any]):
        self.op = op
        self.samples = list(samples)
        self._parts: list[tuple[int, Any]] = []
        self.flat: list[Any] = []
        for sample in samples:
            flat, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
            self._parts.append((len(flat), spec))
            self.flat += flat

    def __call__(self, values: list[Any]) -> list[Any]:
        """Computes each sample, with its gradients."""
        results = []
        start = 0
        for count, spec in self._parts:
            input, args, kwargs = pytree.tree_unflatten(values[start : start + count], spec)
            results.append(self.op.op(input, *args, **kwargs))
            start += count
        return results

    def compiled(self, compiler: Any, cotangents: Tensors, **options: Any) -> _Gradients:
        torch._dynamo.reset()
        function = torch.compile(lambda values: self(values), backend=compiler, **options)
        return self.differentiate(function, self.flat, cotangents)

    def eager(self) -> _Gradients | None:
        """None where eager itself has none."""
        with contextlib.suppress(Exception):
            found = self.differentiate(self, self.flat, None)
            return found if found.results else None
        return None

    def precise(self, cotangents: Tensors) -> _Gradients | None:
        """Computes in float64; None if the operator cannot."""
        with contextlib.suppress(Exception):
            wide = [widen(g) for g in cotangents]
            return self.differentiate(self, [widen(x) for x in self.flat], wide)
        return None

    def differentiate(
        self,
        function: Callable[[list[Any]], list[Any]],
        flat: list[Any],
        cotangents: Tensors | None,
    ) -> _Gradients:
        """Gradients with respect to every input that requires one.

        Args:
            function: This call, or what it was compiled to.
            flat: Its inputs.
            cotangents: Gradients of the differentiable results; None: random ones.
        """
        leaves = [_leaf(x) for x in flat]
        wanted = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
        torch.manual_seed(7)
        results: Tensors = []
        for sample, result in zip(self.samples, function(leaves), strict=True):
            chosen = pytree.tree_leaves(sample.output_process_fn_grad(result))
            results += [x for x in chosen if isinstance(x, torch.Tensor) and x.requires_grad]
        if cotangents is None:
            cotangents = [torch.randn_like(x) for x in results]
        found: Tensors = []
        if results:
            # where a result is not differentiable in one, the numbers of results differ
            used = results[: len(cotangents)]
            found = list(
                torch.autograd.grad(
                    used, wanted, cotangents[: len(used)], allow_unused=True, materialize_grads=True
                )
            )
        return _Gradients([x.detach() for x in results], found, cotangents)


def _leaf(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _native_together(op: OpInfo, samples: Sequence[Any], compiler: Any, outcome: Outcome) -> bool:
    """Returns whether samples compiled as one graph are right and run whole on the backend."""
    if len(samples) == 1:
        return False
    samples = [s for s in samples if _Call(op, [s]).eager() is not None]
    call = _Call(op, samples)
    expected = call.eager() if samples else None
    if expected is None:
        return True
    with record() as reports:
        try:
            results = call.compiled(compiler, expected.cotangents, fullgraph=True)
        except Exception:
            return False
    if any(r.fallbacks or r.runtime_fallbacks for r in reports):
        return False
    if _judge(call, expected, results) is not None:
        return False
    outcome.samples += len(samples)
    outcome.status = "fallback" if outcome.reasons else "native"
    return True


def _run_sample(call: _Call, compiler: Any, outcome: Outcome) -> None:
    expected = call.eager()
    if expected is None:
        return
    outcome.samples += 1
    with record() as reports:
        try:
            results = _compile_sample(call, compiler, expected, outcome)
        except Exception as error:
            if _fails_in_torch(call, expected, fullgraph=False):
                outcome.reasons[f"torch.compile itself fails: {first_line(error)}"] += 1
                outcome.status = "fallback"
                return
            outcome.fail("raises", brief_error(error))
            return
    wrong = _judge(call, expected, results)
    if wrong is not None:
        # Dynamo or AOT Autograd may have turned the operator into a less exact form.
        captured = call.compiled("aot_eager", expected.cotangents)
        if _judge(call, captured, results) is not None:
            outcome.fail("wrong", f"{wrong} ({database.describe(call.samples[0])})")
            return
    running.note_fallbacks(outcome, reports)


def _compile_sample(
    call: _Call, compiler: Any, expected: _Gradients, outcome: Outcome
) -> _Gradients:
    """Compiles a sample in one graph; in parts, with a note, if Dynamo cannot."""
    try:
        return call.compiled(compiler, expected.cotangents, fullgraph=True)
    except Exception as error:
        if not _fails_in_torch(call, expected, fullgraph=True):
            raise
        outcome.reasons[f"Dynamo does not capture it whole: {first_line(error)}"] += 1
    return call.compiled(compiler, expected.cotangents)


def _fails_in_torch(call: _Call, expected: _Gradients, fullgraph: bool) -> bool:
    try:
        call.compiled("aot_eager", expected.cotangents, fullgraph=fullgraph)
    except Exception:
        return True
    return False


def _judge(call: _Call, expected: _Gradients, results: _Gradients) -> str | None:
    theirs, ours = expected.all, results.all
    if any(x.dtype in (torch.float64, torch.complex128) for x in theirs):
        return describe_difference(theirs, ours, theirs) or far_apart(theirs, ours)
    precise = call.precise(expected.cotangents)
    reference = theirs if precise is None else precise.all
    if [p.shape for p in reference] != [e.shape for e in theirs]:
        reference = theirs
    return describe_difference(theirs, ours, reference)
