"""What a compiled training step checks before each call: parameters, gradients, modules, Python.

python benchmarks/step_guards.py
python benchmarks/step_guards.py --parameters 200 --values 100
"""

import argparse
import statistics
import timeit
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

import harness
from dynamo_backends import compile_step
from dynamo_backends.aot.step.recording import numbers_of


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--parameters", type=int, default=200, help="of linear layers (default: 200)"
    )
    parser.add_argument("--values", type=int, default=100, help="read in Python (default: 100)")
    parser.add_argument("--json", metavar="FILE", help="save the results")
    args = parser.parse_args()
    console = harness.announce()
    layers = [nn.Linear(2, 2) for _ in range(args.parameters // 2)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    settings = SimpleNamespace(**{f"value_{i}": float(i) for i in range(args.values)})

    def train(x: Tensor) -> Tensor:
        weight = 0.0
        for i in range(args.values):
            weight += getattr(settings, f"value_{i}")
        loss = model(x).mean() * (1 + 0 * weight)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = compile_step(train, model=model, optimizer=optimizer, backend="aot_eager")
    x = torch.randn(2, 2)
    for _ in range(3):
        step(x)
    records = measure(step, x, args.values)
    console.print(table(records))
    if args.json:
        harness.save_json(args.json, "step guards", records, settings=vars(args))


def measure(step: Any, x: Tensor, values: int) -> list[dict[str, Any]]:
    """What each part of the checks takes, in microseconds."""
    (variant,) = step._all_variants()
    guards, inventory = variant.guards, step._inventory
    tensors = inventory.refresh()
    numbers = tuple(numbers_of(step._definition, [x]))
    assert guards.why_not(tensors, numbers) is None
    parts: dict[str, Callable[[], Any]] = {
        f"{len(tensors)} tensors are the same objects": inventory.refresh,
        "dtypes, layouts, requires_grad": lambda: guards._properties.hold(tensors),
        "gradients are there or not": lambda: [tensors[i].grad is None for i in guards._leaves],
        "attributes of modules": guards._modules.changed,
        f"{values} Python values": guards._python.changed,
        "all of these, hooks and settings": lambda: guards.why_not(tensors, numbers),
    }
    found = []
    for name, call in parts.items():
        times = [t / 200 * 1e6 for t in timeit.repeat(call, number=200, repeat=15)]
        found.append({"check": name, "us": statistics.median(times)})
    return found


def table(records: Sequence[Mapping[str, Any]]) -> Table:
    """The results for people."""
    found = Table("check", "µs per call")
    for r in records:
        found.add_row(r["check"], f"{r['us']:.1f}")
    return found


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results says, for a page."""
    return [table(content["results"])]


if __name__ == "__main__":
    main()
