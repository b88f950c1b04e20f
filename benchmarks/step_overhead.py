"""What a compiled step costs at each call besides its program: Python, and the comparison.

python benchmarks/step_overhead.py
python benchmarks/step_overhead.py --models mlp-sgd mlp-adamw --python frozen

The program is replaced by one that returns the tensors of an earlier call.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

import harness
from dynamo_backends import compile_step
from dynamo_backends.bench.torchvision_shim import import_transformers


def mlp() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Two layers."""
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return net, (torch.randn(4, 8), torch.randint(0, 4, (4,)))


class Block(nn.Module):
    """Two convolutions with batch norms beside a shortcut."""

    def __init__(self, given: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(given, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module | None = None
        if stride != 1 or given != channels:
            conv = nn.Conv2d(given, channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both."""
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.shortcut is None else self.shortcut(x)
        result: Tensor = self.relu(y)
        return result


def resnet() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """ResNet-18, narrow, with the same calls as torchvision's."""
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    given = 8
    for i, channels in enumerate((8, 16, 32, 64)):
        layers += [Block(given, channels, 1 if i == 0 else 2), Block(channels, channels, 1)]
        given = channels
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, 4))
    return net, (torch.randn(2, 3, 64, 64), torch.randint(0, 4, (2,)))


class Classifier(nn.Module):
    """BERT with 12 narrow layers, and the same calls as a wide one."""

    def __init__(self) -> None:
        super().__init__()
        transformers = import_transformers()
        config = transformers.BertConfig(
            vocab_size=100, hidden_size=32, num_hidden_layers=12, num_attention_heads=4,
            intermediate_size=64, num_labels=4,
        )  # fmt: skip
        self.bert = transformers.BertForSequenceClassification(config)

    def forward(self, ids: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.bert(input_ids=ids).logits
        return logits


def bert() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """BERT on short texts."""
    return Classifier(), (torch.randint(0, 100, (2, 16)), torch.randint(0, 4, (2,)))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Without momentum."""
    return torch.optim.SGD(parameters, 0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """With torch's defaults."""
    return torch.optim.AdamW(parameters, 1e-3)


MODELS: dict[str, tuple[Callable[[], Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "mlp-sgd": (mlp, sgd),
    "mlp-adamw": (mlp, adamw),
    "resnet18-sgd": (resnet, sgd),
    "bert12-adamw": (bert, adamw),
}


PYTHON = ("replay", "frozen")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--python", nargs="+", choices=PYTHON, default=list(PYTHON))
    parser.add_argument("--calls", type=int, default=200, help="of each (default: 200)")
    parser.add_argument("--json", metavar="FILE", help="save the results")
    args = parser.parse_args()
    console = harness.announce()
    records = [measure(name, args.calls, args.python) for name in args.models]
    table = Table(
        "step", "calls in the record", *(f"{python}, µs" for python in args.python),
        title="a call without execution",
    )  # fmt: skip
    for record in records:
        times = [f"{record[python]:.0f}" for python in args.python]
        table.add_row(record["step"], str(record["calls"]), *times)
    console.print(table)
    if args.json:
        harness.save_json(args.json, "step overhead", records, settings=vars(args))


def measure(name: str, calls: int, kinds: Sequence[str] = ("replay",)) -> dict[str, Any]:
    """The least CPU time of a call, in microseconds; calls of several kinds take turns."""
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


def stored_step(name: str, python: str) -> tuple[Any, tuple[Tensor, ...], int]:
    """A step whose program computes nothing, its arguments, and the number of its torch calls."""
    make, optimize = MODELS[name]
    torch.manual_seed(0)
    model, batch = make()
    optimizer = optimize(model.parameters())

    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
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


if __name__ == "__main__":
    main()
