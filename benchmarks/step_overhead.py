"""What a compiled step costs at each call besides its program: Python, and the comparison.

    python benchmarks/step_overhead.py
    python benchmarks/step_overhead.py --models mlp-sgd mlp-adamw --python frozen

The program is replaced by one that returns the tensors of an earlier call. Shown is the least CPU
time of a call; kinds of calls take turns.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

import harness
from dynamo_backends import compile_step
from networks import resnet18

Batch = tuple[Tensor, Tensor]


def mlp() -> tuple[nn.Module, Batch]:
    """Two layers."""
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return net, (torch.randn(4, 8), torch.randint(0, 4, (4,)))


def resnet() -> tuple[nn.Module, Batch]:
    """ResNet-18, narrow."""
    return resnet18(8), (torch.randn(2, 3, 64, 64), torch.randint(0, 4, (2,)))


def bert() -> tuple[nn.Module, Batch]:
    """BERT with 12 narrow layers, and the same calls as a wide one, on short texts."""
    transformers = harness.import_transformers()
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=12, num_attention_heads=4,
        intermediate_size=64, num_labels=4,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    return model, (torch.randint(0, 100, (2, 16)), torch.randint(0, 4, (2,)))


SGD = functools.partial(torch.optim.SGD, lr=0.01)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)
MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Batch]], Any]] = {
    "mlp-sgd": (mlp, SGD),
    "mlp-adamw": (mlp, ADAMW),
    "resnet18-sgd": (resnet, SGD),
    "bert12-adamw": (bert, ADAMW),
}
PYTHON = ("replay", "frozen")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.arguments(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--python", nargs="+", choices=PYTHON, default=list(PYTHON))
    parser.add_argument("--calls", type=int, default=200, help="of each (default: 200)")
    settings = parser.parse_args(arguments)
    console = harness.announce()
    records = [measure(name, settings.calls, settings.python) for name in settings.models]
    harness.report(published, settings, "step overhead", records, console)
    return 0


def measure(name: str, calls: int, kinds: Sequence[str] = ("replay",)) -> dict[str, Any]:
    """The least CPU time of a call of each kind, in microseconds."""
    steps = [stored_step(name, python) for python in kinds]
    times: list[list[float]] = [[] for _ in kinds]
    for _ in range(calls):
        for (step, batch, _), several in zip(steps, times, strict=True):
            start = time.process_time_ns()
            step(*batch)
            several.append((time.process_time_ns() - start) / 1e3)
    assert all(step.eager_steps == 1 for step, _, _ in steps)
    least = dict(zip(kinds, map(min, times), strict=True))
    return {"step": name, "calls": steps[0][2], **least}


def stored_step(name: str, python: str) -> tuple[Any, Batch, int]:
    """A step whose program computes nothing, its arguments, and the number of its torch calls."""
    make, optimize = MODELS[name]
    torch.manual_seed(0)
    model, batch = make()
    optimizer = optimize(model.parameters())

    def train(x: Tensor, y: Tensor) -> Tensor:
        result = model(x)
        loss = F.cross_entropy(getattr(result, "logits", result), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step: Any = compile_step(
        train, model=model, optimizer=optimizer, backend="aot_eager", python=python
    )
    for _ in range(4):
        step(*batch)
    (node,) = (node for trie in step._programs.tries.values() for node in trie.root.subtree()
               if node.programs)  # fmt: skip
    ((program, _),) = node.programs
    result = step(*batch)
    program.run = lambda *_: dict.fromkeys(program.outputs, result.detach())
    return step, batch, len(node.path())


def published(content: Mapping[str, Any]) -> list[Table]:
    """A line for each step, microseconds of each kind of call."""
    kinds = content["settings"]["python"]
    rows = [
        [record["step"], str(record["calls"]), *(f"{record[kind]:.0f}" for kind in kinds)]
        for record in content["results"]
    ]
    heads = "step", "calls in the record", *(f"{kind}, µs" for kind in kinds)
    return [harness.table(heads, rows, "a call without execution")]


if __name__ == "__main__":
    raise SystemExit(main())
