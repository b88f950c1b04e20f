"""The table of the operator database in docs/conformance.md."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import jax
import torch

from tests.conformance.opinfo import Outcome

_HEAD = """# Operators: PyTorch's own database through openxla

Made by `make conformance` with torch {torch} and jax {jax} on the CPU. Every operator of
`torch.testing._internal.common_methods_invocations.op_db` is compiled with
`torch.compile(backend="openxla")` on each of its sample inputs and compared with eager by
`torch._dynamo.utils.same` against a float64 reference; integer results must be equal.

- **native**: every sample ran whole on XLA.
- **fallback**: right, with at least one part of one sample in eager.
- **wrong**, **crash**: results that are not as accurate as eager's, or an error.

"""


def native_share(outcomes: Sequence[Outcome], dtype: str) -> float:
    """The share of a dtype's operators that ran without any fallback."""
    ran = [o for o in outcomes if o.dtype == dtype and o.samples]
    return sum(o.status == "native" for o in ran) / len(ran)


def render(outcomes: Sequence[Outcome]) -> str:
    """The whole document."""
    by_dtype: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.samples:
            by_dtype[outcome.dtype].append(outcome)
    lines = [_HEAD.format(torch=torch.__version__.split("+")[0], jax=jax.__version__)]
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
