"""The tables of the operator database in docs/, one document per backend."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch

from dynamo_backends.interface.registry import get_backend
from tests.conformance.opinfo import Outcome

_HEAD = """# Operators: PyTorch's own database through {backend}

Made by `make conformance` with torch {torch} and {vendor} on the CPU. {operators} of
`torch.testing._internal.common_methods_invocations.op_db` is compiled with
`torch.compile(backend="{backend}")` on {samples} and
compared with eager by `torch._dynamo.utils.same` against a float64 reference; integer results must
be equal. Where Dynamo itself rewrites an operator into a less exact form (`addcdiv` with a value),
what it captured is what counts.

- **native**: every sample ran whole on the backend.
- **fallback**: right, with at least one part of one sample in eager.
- **wrong**, **crash**: results that are not as accurate as eager's, or an error.

"""

GRADIENTS = """# Gradients of operators: PyTorch's own database through {backend}

Made by `make conformance` with torch {torch} and {vendor} on the CPU. Every operator of
`torch.testing._internal.common_methods_invocations.op_db` that has gradients on the CPU is compiled
with `torch.compile(backend="{backend}")` on {samples}. Its differentiable results, and the
gradients of all inputs for random incoming gradients, are compared with eager's: in float32 by
`torch._dynamo.utils.same` against a float64 reference, in float64 to 1e-9 of each tensor's largest
element.

- **native**: forward and backward of every sample ran whole on the backend.
- **fallback**: right, with at least one part of one sample in eager, or torch.compile itself cannot
  compile a sample, with any backend.
- **wrong**, **crash**: gradients that are not as accurate as eager's, or an error.

"""


def native_share(outcomes: Sequence[Outcome], dtype: str) -> float:
    """The share of a dtype's operators that ran without any fallback."""
    ran = [o for o in outcomes if o.dtype == dtype and o.samples]
    return sum(o.status == "native" for o in ran) / len(ran)


def _vendor(backend: str) -> str:
    """The first of the packages behind a backend, with its version."""
    found = get_backend(backend).versions()
    (name, version), *_ = [*found.items(), ("torch", torch.__version__)]
    return f"{name} {version}"


def render(
    outcomes: Sequence[Outcome],
    backend: str = "openxla",
    vendor: str = "",
    limit: int | None = None,
    head: str = _HEAD,
    operators: str = "Every operator",
) -> str:
    """The whole document.

    Args:
        outcomes: Of every operator and dtype.
        backend: Which one ran them.
        vendor: What runs it, where that is not the first of the packages behind it.
        limit: How many samples of each were run at most.
        head: What stands above the tables, with the names of the settings in braces.
        operators: Which were run, in words.
    """
    by_dtype: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.samples:
            by_dtype[outcome.dtype].append(outcome)
    settings = {
        "backend": backend,
        "torch": torch.__version__.split("+")[0],
        "vendor": vendor or _vendor(backend),
        "operators": operators,
        "samples": f"at most {limit} of its sample inputs" if limit else "its sample inputs",
    }
    lines = [head.format(**settings)]
    lines.append(
        "| dtype | operators | samples | native | fallback | wrong | crash | native share |"
    )
    lines.append("|---|---|---|---|---|---|---|---|")
    for dtype, rows in by_dtype.items():
        count = Counter(o.status for o in rows)
        samples = sum(o.samples for o in rows)
        lines.append(
            f"| {dtype} | {len(rows)} | {samples} | {count['native']} | {count['fallback']} "
            f"| {count['wrong']} | {count['crash']} | {native_share(rows, dtype):.1%} |"
        )
    lines.append("\n## Operators that are not native\n")
    lines.append("| operator | dtypes | why |")
    lines.append("|---|---|---|")
    grouped: dict[tuple[str, str], list[str]] = defaultdict(list)
    for o in outcomes:
        if o.samples and o.status != "native":
            reason = next((r for r, _ in o.reasons.most_common() if "its block" not in r), o.status)
            grouped[o.op, reason.replace("|", "\\|")].append(o.dtype)
    for (op, reason), dtypes in sorted(grouped.items()):
        lines.append(f"| {op} | {', '.join(dtypes)} | {reason} |")
    return "\n".join(lines) + "\n"
