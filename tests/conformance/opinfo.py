"""Drives PyTorch's own operator database through a backend and judges every result."""

import contextlib
import itertools
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils import _pytree as pytree

import dynamo_backends
from dynamo_backends.verify import difference

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.bool,
    torch.complex64,
)

# Their results are memory that nobody wrote: only shape and dtype can be compared.
UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty",
                 "new_empty_strided", "resize_", "resize_as_"}  # fmt: skip

# Eager itself differs from call to call or is undefined on these samples.
UNDEFINED = {
    "jiterator_unary": "runs on CUDA only",
    "jiterator_binary": "runs on CUDA only",
    "jiterator_4inputs_with_extra_args": "runs on CUDA only",
    "jiterator_binary_return_by_ref": "runs on CUDA only",
    "jiterator_2inputs_2outputs": "runs on CUDA only",
}


@dataclass
class Outcome:
    """What became of one operator with one dtype.

    Attributes:
        op: OpInfo's full name.
        dtype: Of the sample inputs.
        samples: How many were run.
        status: "native" (every sample ran whole on the backend), "fallback", "wrong", "crash", or
            "no samples" where eager accepts none.
        reasons: Why parts ran in eager, counted; or what was wrong.
    """

    op: str
    dtype: str
    samples: int = 0
    status: str = "no samples"
    reasons: Counter[str] = field(default_factory=Counter)


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


def run(op: OpInfo, dtype: torch.dtype, backend: str, limit: int | None = None) -> Outcome:
    """Runs an operator's samples.

    Args:
        op: From `op_db`.
        dtype: Of the inputs.
        backend: Name of the backend.
        limit: At most so many samples, spread over all of them.
    """
    outcome = Outcome(full_name(op), str(dtype).removeprefix("torch."))
    compiler = dynamo_backends.compiler(backend, cache=False)
    torch.manual_seed(0)
    with warnings.catch_warnings(), _silence(), torch.no_grad():
        warnings.simplefilter("ignore")
        samples = list(op.sample_inputs("cpu", dtype, requires_grad=False))
        step = max(1, len(samples) // limit) if limit else 1
        for sample in itertools.islice(samples, 0, None, step):
            _run_sample(op, sample, compiler, outcome)
            if outcome.status in ("wrong", "crash"):
                break
    torch._dynamo.reset()
    return outcome


def _run_sample(op: OpInfo, sample: Any, compiler: Any, outcome: Outcome) -> None:
    flat, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))

    def call(values: list[Any]) -> list[Any]:
        input, args, kwargs = pytree.tree_unflatten(values, spec)
        return pytree.tree_leaves(op.op(input, *args, **kwargs))

    expected = _eager(call, flat)
    if expected is None:
        return
    outcome.samples += 1
    torch._dynamo.reset()
    with dynamo_backends.record() as reports:
        try:
            torch.manual_seed(7)
            try:
                results = torch.compile(call, backend=compiler, fullgraph=True)(_clone(flat))
            except torch._dynamo.exc.TorchDynamoException as error:
                outcome.reasons[f"Dynamo does not capture it whole: {_headline(error)}"] += 1
                torch._dynamo.reset()
                torch.manual_seed(7)
                results = torch.compile(call, backend=compiler)(_clone(flat))
        except Exception as error:
            outcome.status = "crash"
            outcome.reasons[f"{type(error).__name__}: {_headline(error)}"] += 1
            return
    wrong = _judge(op, call, flat, expected, results)
    if wrong is not None:
        outcome.status = "wrong"
        outcome.reasons = Counter({f"{wrong} ({_describe(sample)})": 1})
        return
    for report in reports:
        for fallback in report.fallbacks:
            outcome.reasons[f"{fallback.op}: {fallback.reason}"] += 1
        for reason in report.runtime_fallbacks:
            outcome.reasons[reason] += 1
    outcome.status = "fallback" if outcome.reasons else "native"


def _eager(call: Callable[[list[Any]], list[Any]], flat: list[Any]) -> list[Any] | None:
    torch.manual_seed(7)
    with contextlib.suppress(Exception):
        return call(_clone(flat))
    return None


def _judge(
    op: OpInfo,
    call: Callable[[list[Any]], list[Any]],
    flat: list[Any],
    expected: list[Any],
    results: list[Any],
) -> str | None:
    if op.name in UNINITIALISED:
        expected, results = _shapes(expected), _shapes(results)
        return None if expected == results else f"{results} instead of {expected}"
    expected, results = _dense(expected), _dense(results)
    precise = _eager(call, [_widen(x) for x in flat])
    precise = expected if precise is None else _dense(precise)
    if [getattr(p, "shape", None) for p in precise] != [
        getattr(e, "shape", None) for e in expected
    ]:
        precise = expected
    return difference(expected, results, precise)


def _clone(flat: list[Any]) -> list[Any]:
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in flat]


def _widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.dtype in (torch.float32, torch.bfloat16, torch.float16):
            return value.double()
        if value.dtype == torch.complex64:
            return value.to(torch.complex128)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _dense(values: list[Any]) -> list[Any]:
    return [
        x.to_dense() if isinstance(x, torch.Tensor) and x.layout is not torch.strided else x
        for x in values
    ]


def _shapes(values: list[Any]) -> list[Any]:
    return [(x.shape, x.dtype) if isinstance(x, torch.Tensor) else x for x in values]


def _describe(sample: Any) -> str:
    text = str(sample.summary()).replace("\n", " ")
    return text if len(text) < 300 else text[:300] + "..."


def _headline(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else "")[:160]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    loggers = [logging.getLogger(n) for n in ("dynamo_backends", "torch._subclasses.fake_tensor")]
    levels = [x.level for x in loggers]
    for x in loggers:
        x.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for x, level in zip(loggers, levels, strict=True):
            x.setLevel(level)
