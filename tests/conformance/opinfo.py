"""Drives PyTorch's own operator database through a backend and judges every result."""

import contextlib
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import BinaryUfuncInfo, OpInfo, UnaryUfuncInfo
from torch.utils import _pytree as pytree

import dynamo_backends
from dynamo_backends.interface.logs import silenced
from dynamo_backends.verify import difference
from tests.conformance.differences import declared, excused
from tests.conformance.extremes import extreme_difference, variants

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.complex64,
)

EXTREME_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
)
"""Of inputs that can hold extremes."""

DIVISIONS = {"div", "floor_divide", "fmod", "remainder", "__rmod__", "__rdiv__", "true_divide",
             "divide", "gcd", "lcm", "unravel_index"}  # fmt: skip

# Of NaN and infinities they give whatever the processor does.
TO_INTEGERS = {"byte", "char", "int", "long", "short"}

# Which of two zeros these choose is open.
CHOICES = {"clamp", "clamp_max", "clamp_min", "fmax", "fmin", "maximum", "minimum", "max", "min",
           "nn.functional.hardtanh", "nn.functional.relu", "nn.functional.relu6",
           "nn.functional.threshold"}  # fmt: skip

# Eager itself ends the process when they are given extremes.
FRAGILE = {"linalg.eigvals", "linalg.ldl_solve", "nn.functional.ctc_loss"}

# Their results are memory that nobody wrote: only shape and dtype can be compared.
UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty",
                 "new_empty_strided", "resize_", "resize_as_"}  # fmt: skip

# Eager does not look whether positions are within the dimension; if not, anything may happen.
UNCHECKED = {"_segment_reduce", "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate"}

# Eager itself differs from call to call or is undefined on these samples.
UNDEFINED = {
    "jiterator_unary": "runs on CUDA only",
    "jiterator_binary": "runs on CUDA only",
    "jiterator_4inputs_with_extra_args": "runs on CUDA only",
    "jiterator_binary_return_by_ref": "runs on CUDA only",
    "jiterator_2inputs_2outputs": "runs on CUDA only",
}


NOISY = ("dynamo_backends", "torch._subclasses.fake_tensor")

TOGETHER = 12  # samples that are compiled as one graph, for as long as nothing is amiss

# Which of several equal elements these name is open; what counts is the element's value.
INDICES_ALONG = {
    "argsort": 0,
    "kthvalue": 1,
    "mode": 0,
    "sort": 0,
    "topk": 1,
}  # position of `dim` among the arguments after the input


@dataclass
class Outcome:
    """What became of one operator with one dtype.

    Attributes:
        op: OpInfo's full name.
        dtype: Of the sample inputs.
        samples: How many were run.
        status: "native" (every sample ran whole on the backend), "fallback", "declared" (different
            as docs/differences.md says), "wrong", "crash", or "no samples" where eager accepts
            none.
        reasons: Why parts ran in eager, counted; or what was wrong.
        declared: What docs/differences.md calls the differences.
    """

    op: str
    dtype: str
    samples: int = 0
    status: str = "no samples"
    reasons: Counter[str] = field(default_factory=Counter)
    declared: list[str] = field(default_factory=list)

    def settle(self) -> None:
        """Sets the status of what is not wrong."""
        right = "fallback" if self.reasons else "native"
        self.status = "declared" if self.declared else right


def cases(dtypes: tuple[torch.dtype, ...] = DTYPES) -> Iterator[tuple[OpInfo, torch.dtype]]:
    """Every operator of the database with every dtype that it has on the CPU."""
    for op in op_db:
        if op.name in UNDEFINED:
            continue
        for dtype in dtypes:
            if dtype in op.supported_dtypes("cpu"):
                yield op, dtype


def full_name(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def run(
    op: OpInfo,
    dtype: torch.dtype,
    backend: str,
    limit: int | None = None,
    extremes: bool = False,
) -> Outcome:
    """Runs an operator's samples.

    Args:
        op: From `op_db`.
        dtype: Of the inputs.
        backend: Name of the backend.
        limit: At most so many samples, spread over all of them.
        extremes: Each with extreme values in its tensors.
    """
    outcome = Outcome(full_name(op), str(dtype).removeprefix("torch."))
    compiler = dynamo_backends.compiler(backend, cache=False, verify="off")
    torch.manual_seed(0)
    with warnings.catch_warnings(), silenced(*NOISY), torch.no_grad():
        warnings.simplefilter("ignore")
        samples = choose(list(op.sample_inputs("cpu", dtype, requires_grad=False)), limit)
        if extremes and _takes_extremes(op, dtype):
            accepted = functools.partial(_is_accepted, op)
            planted = variants(samples, accepted, divides(op), op.name not in UNCHECKED)
            samples = [_with_ascending_bounds(op, sample) for sample in planted]
        size = group_size(op)
        for start in range(0, len(samples), size):
            group = samples[start : start + size]
            if not _native_together(_Call(op, group, extremes), compiler, outcome):
                calls = [_Call(op, [sample], extremes) for sample in group]
                _run_one_by_one(calls, compiler, outcome, backend)
            if outcome.status in ("wrong", "crash"):
                break
    torch._dynamo.reset()
    return outcome


def broke_down(op: OpInfo, dtype: torch.dtype, exit_code: int) -> Outcome:
    """The outcome of an operator during which the process ended."""
    reason = f"the process ended with exit code {exit_code}"
    name = str(dtype).removeprefix("torch.")
    return Outcome(full_name(op), name, 1, "crash", Counter({reason: 1}))


def choose(samples: list[Any], limit: int | None) -> list[Any]:
    """At most so many samples, spread over all of them."""
    step = -(-len(samples) // limit) if limit and samples else 1
    return samples[::step]


def _takes_extremes(op: OpInfo, dtype: torch.dtype) -> bool:
    if op.name in FRAGILE:
        return False
    return not (dtype.is_floating_point and op.name in TO_INTEGERS)


def divides(op: OpInfo) -> bool:
    return op.name in DIVISIONS


def _is_accepted(op: OpInfo, sample: Any) -> bool:
    return bool(_Call(op, [sample]).samples)


def _with_ascending_bounds(op: OpInfo, sample: Any) -> Any:
    """A sample with what is searched in order, as operators that search need it."""
    if op.name == "bucketize":
        bounds, *others = sample.args
        sample.args = (bounds.sort().values, *others)
    elif op.name == "searchsorted":
        if sample.kwargs.get("sorter") is None:
            sample.input = sample.input.sort().values
        else:
            sample.kwargs = {**sample.kwargs, "sorter": sample.input.argsort()}
    return sample


def group_size(op: OpInfo) -> int:
    return 1 if op.name in INDICES_ALONG else TOGETHER


class _Call:
    """Calls of one operator on some samples, as a function of all values in them.

    Args:
        op: The operator.
        samples: Those that eager accepts are used.
        extremes: They hold extreme values, which are judged one by one.
    """

    def __init__(self, op: OpInfo, samples: Sequence[Any], extremes: bool = False):
        self.op = op
        self.extremes = extremes
        self.samples: list[Any] = []
        self._parts: list[tuple[int, Any]] = []
        self.flat: list[Any] = []
        for sample in samples:
            flat, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
            if _eager(lambda values, spec=spec: self._one(values, spec), flat) is not None:
                self.samples.append(sample)
                self._parts.append((len(flat), spec))
                self.flat += flat

    def _one(self, values: list[Any], spec: Any) -> list[Any]:
        input, args, kwargs = pytree.tree_unflatten(values, spec)
        return pytree.tree_leaves(self.op.op(input, *args, **kwargs))

    def __call__(self, values: list[Any]) -> list[Any]:
        """All results, one after the other."""
        results = []
        start = 0
        for count, spec in self._parts:
            results += self._one(values[start : start + count], spec)
            start += count
        return results

    def eager(self) -> list[Any]:
        results = _eager(self, self.flat)
        assert results is not None
        return results

    def compiled(self, compiler: Any, **options: Any) -> list[Any]:
        torch._dynamo.reset()
        torch.manual_seed(7)
        function = torch.compile(lambda values: self(values), backend=compiler, **options)
        return function(_clone(self.flat))


def _native_together(call: _Call, compiler: Any, outcome: Outcome) -> bool:
    """Whether samples compiled as one graph are right and run whole on the backend."""
    if not call.samples:
        return True
    if len(call.samples) == 1:
        return False
    with dynamo_backends.record() as reports:
        try:
            results = call.compiled(compiler, fullgraph=True)
        except Exception:
            return False
    if any(r.fallbacks or r.runtime_fallbacks for r in reports):
        return False
    if _judge(call, call.eager(), results) is not None:
        return False
    outcome.samples += len(call.samples)
    outcome.settle()
    return True


def _run_one_by_one(calls: Sequence[_Call], compiler: Any, outcome: Outcome, backend: str) -> None:
    for call in calls:
        _run_sample(call, compiler, outcome, backend)
        if outcome.status in ("wrong", "crash"):
            break


def _run_sample(call: _Call, compiler: Any, outcome: Outcome, backend: str) -> None:
    if not call.samples:
        return
    expected = call.eager()
    outcome.samples += 1
    with dynamo_backends.record() as reports:
        try:
            results = _compile_sample(call, compiler, outcome)
        except Exception as error:
            outcome.status = "crash"
            outcome.reasons[f"{type(error).__name__}: {headline(error)}"] += 1
            return
    wrong = _judge(call, expected, results)
    if wrong is not None and not (
        _is_declared(call, expected, results, outcome, backend)
        # Dynamo itself rewrote the operator into a less exact form.
        or _judge(call, call.compiled("aot_eager"), results) is None
    ):
        outcome.status = "wrong"
        outcome.reasons = Counter({f"{wrong} ({describe(call.samples[0])})": 1})
        return
    note_fallbacks(outcome, reports)


def _is_declared(
    call: _Call, expected: list[Any], results: list[Any], outcome: Outcome, backend: str
) -> bool:
    """Whether results are right but for what is declared, which is noted."""
    rows = declared(backend, outcome.op, call.flat)
    right = excused(rows, dense(expected), dense(results))
    if not rows or _judge(call, expected, right) is not None:
        return False
    outcome.declared = sorted({*outcome.declared, *(row.bullet for row in rows)})
    return True


def note_fallbacks(outcome: Outcome, reports: Sequence[dynamo_backends.GraphReport]) -> None:
    """Adds what ran in eager to an outcome that is right."""
    for report in reports:
        for fallback in report.fallbacks:
            outcome.reasons[f"{fallback.op}: {fallback.reason}"] += 1
        for reason in report.runtime_fallbacks:
            outcome.reasons[reason] += 1
    outcome.settle()


def _eager(call: Callable[[list[Any]], list[Any]], flat: list[Any]) -> list[Any] | None:
    torch.manual_seed(7)
    with contextlib.suppress(Exception):
        return call(_clone(flat))
    return None


def _compile_sample(call: _Call, compiler: Any, outcome: Outcome) -> list[Any]:
    """In one graph, unless Dynamo itself cannot: then in parts, and noted so."""
    try:
        return call.compiled(compiler, fullgraph=True)
    except Exception as error:
        if not _fails_in_torch(call):
            raise
        outcome.reasons[f"Dynamo does not capture it whole: {headline(error)}"] += 1
    return call.compiled(compiler)


def _fails_in_torch(call: _Call) -> bool:
    try:
        call.compiled("aot_eager", fullgraph=True)
    except Exception:
        return True
    return False


def _named(sample: Any, name: str, index: torch.Tensor) -> torch.Tensor:
    """The elements that indices along `dim` name."""
    place = INDICES_ALONG[name]
    dim = sample.args[place] if len(sample.args) > place else sample.kwargs.get("dim", -1)
    keep = index.ndim == sample.input.ndim
    named = sample.input.gather(dim, index if keep else index.unsqueeze(dim))
    return named if keep else named.squeeze(dim)


def _judge(call: _Call, expected: list[Any], results: list[Any]) -> str | None:
    name = call.op.name
    if name in UNINITIALISED:
        expected, results = _shapes(expected), _shapes(results)
        return None if expected == results else f"{results} instead of {expected}"
    expected, results = dense(expected), dense(results)
    precise = _eager(call, [widen(x) for x in call.flat])
    precise = expected if precise is None else dense(precise)
    if [getattr(p, "shape", None) for p in precise] != [
        getattr(e, "shape", None) for e in expected
    ]:
        precise = expected
    stable = call.samples[0].kwargs.get("stable", False)
    if name in INDICES_ALONG and not stable:
        expected, results, precise = (
            [*values, _named(call.samples[0], name, index)]
            for *values, index in (expected, results, precise)
        )
        precise = [widen(x) for x in precise]
    if call.extremes:
        signs = isinstance(call.op, UnaryUfuncInfo | BinaryUfuncInfo) and name not in CHOICES
        return extreme_difference(expected, results, precise, signs)
    return difference(expected, results, precise)


def _clone(flat: list[Any]) -> list[Any]:
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in flat]


_WIDER = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
}


def widen(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return _WIDER.get(value, value)
    if isinstance(value, torch.Tensor):
        return value.to(_WIDER.get(value.dtype, value.dtype), copy=True)
    return value


def dense(values: list[Any]) -> list[Any]:
    return [
        x.to_dense() if isinstance(x, torch.Tensor) and x.layout is not torch.strided else x
        for x in values
    ]


def _shapes(values: list[Any]) -> list[Any]:
    return [(x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in values]


def describe(sample: Any) -> str:
    text = str(sample.summary()).replace("\n", " ")
    return text if len(text) < 300 else text[:300] + "..."


def headline(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else "")[:160]
