"""Random expressions around products and reductions that are large enough for XLA's libraries.

    python -m tests.random_products --count 500 --backend openxla --seed 0

Random programs of other tests are small: XLA compiles their products itself, and fuses nothing with
them. Each process checks some expressions, so that one that crashes is found, too; of each that
differs from eager the source is printed.
"""

import argparse
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from rich.progress import track
from torch import Tensor

import dynamo_backends
from dynamo_backends.verify import describe_difference, widen_to_float64

IN_A_PROCESS = 50
ROWS = (1, 4, 33, 96)
DEPTHS = (64, 100, 256)
COLUMNS = (1, 5, 128, 500)
BATCHES = ((), (1,), (2,), (3,), (2, 2), (1, 3))
POINTWISE = (
    "({}).relu()",
    "({}).tanh()",
    "({}).sigmoid()",
    "(({}).abs() + 1).rsqrt()",
    "({}) * 2 - 1",
)
REDUCTIONS = ("({}).sum({})", "({}).mean({})", "({}).amax({})")
KEPT = (
    "({0}) - ({0}).mean({1}, True)", "({0}).softmax({1})", "({0}) / (({0}) ** 2).sum({1}, True)",
)  # fmt: skip

Shape = tuple[int, ...]


@dataclass
class Expression:
    """An expression in the inputs x0, x1, ….

    Attributes:
        source: Of Python.
        shapes: Of the inputs.
    """

    shapes: list[Shape] = field(default_factory=list)
    source: str = ""


def random_product(seed: int) -> Expression:
    """A product of two random operands, or one operand, of which something may be computed."""
    choose = random.Random(seed)
    made = Expression()
    rows, depth, columns = choose.choice(ROWS), choose.choice(DEPTHS), choose.choice(COLUMNS)
    batch = choose.choice(BATCHES)
    left = _operand(made, choose, (*batch, rows, depth), 3)
    made.source = left
    if choose.random() < 0.8:
        right = _operand(made, choose, (*batch, depth, columns), 3)
        made.source = f"({left}) @ ({right})"
    if choose.random() < 0.5:
        made.source = choose.choice(POINTWISE).format(made.source)
    if choose.random() < 0.3:
        made.source = choose.choice(REDUCTIONS).format(made.source, choose.choice((-1, -2)))
    return made


def _operand(made: Expression, choose: random.Random, shape: Shape, depth: int) -> str:
    """An expression of this shape, with at most so many calls one within the other."""
    if depth == 0 or choose.random() < 0.15:
        made.shapes.append(shape)
        return f"x{len(made.shapes) - 1}"
    return choose.choice(_KINDS)(made, choose, shape, depth - 1)


def _pointwise(made: Expression, choose: random.Random, shape: Shape, depth: int) -> str:
    return choose.choice(POINTWISE).format(_operand(made, choose, shape, depth))


def _binary(made: Expression, choose: random.Random, shape: Shape, depth: int) -> str:
    a, b = (_operand(made, choose, shape, depth) for _ in range(2))
    return f"({a}) {choose.choice('+-*')} ({b})"


def _broadcast(made: Expression, choose: random.Random, shape: Shape, depth: int) -> str:
    smaller = tuple(1 if choose.random() < 0.4 else size for size in shape)
    a, b = (_operand(made, choose, of, depth) for of in (shape, smaller))
    return f"({a}) {choose.choice('+-*')} ({b})"


def _reduced(made: Expression, choose: random.Random, shape: Shape, depth: int) -> str:
    dim = choose.randrange(len(shape) + 1)
    larger = (*shape[:dim], choose.choice((2, 7)), *shape[dim:])
    return choose.choice(REDUCTIONS).format(_operand(made, choose, larger, depth), dim)


def _kept(made: Expression, choose: random.Random, shape: Shape, depth: int) -> str:
    dim = choose.randrange(-len(shape), 0)
    return choose.choice(KEPT).format(_operand(made, choose, shape, depth), dim)


def _expanded(made: Expression, choose: random.Random, shape: Shape, depth: int) -> str:
    if len(shape) > 2 and choose.random() < 0.6:
        smaller = shape[choose.randint(1, len(shape) - 2) :]
    else:
        smaller = tuple(1 if choose.random() < 0.5 else size for size in shape)
    return f"({_operand(made, choose, smaller, depth)}).expand{shape}"


def _transposed(made: Expression, choose: random.Random, shape: Shape, depth: int) -> str:
    first = choose.randrange(len(shape))
    last = choose.randrange(len(shape))
    other = list(shape)
    other[first], other[last] = shape[last], shape[first]
    return f"({_operand(made, choose, tuple(other), depth)}).transpose({first}, {last})"


def _reshaped(made: Expression, choose: random.Random, shape: Shape, depth: int) -> str:
    if len(shape) < 2:
        return _operand(made, choose, shape, depth)
    at = choose.randrange(len(shape) - 1)
    merged = (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])
    return f"({_operand(made, choose, merged, depth)}).reshape{shape}"


def _joined(made: Expression, choose: random.Random, shape: Shape, depth: int) -> str:
    dim = choose.randrange(len(shape))
    if shape[dim] < 2:
        return _operand(made, choose, shape, depth)
    first = shape[dim] // 2
    parts = (
        _operand(made, choose, (*shape[:dim], size, *shape[dim + 1 :]), depth)
        for size in (first, shape[dim] - first)
    )
    return f"torch.cat([{', '.join(parts)}], {dim})"


def _sliced(made: Expression, choose: random.Random, shape: Shape, depth: int) -> str:
    dim = choose.randrange(len(shape))
    larger = (*shape[:dim], shape[dim] + 3, *shape[dim + 1 :])
    return f"({_operand(made, choose, larger, depth)}).narrow({dim}, 2, {shape[dim]})"


def _multiplied(made: Expression, choose: random.Random, shape: Shape, depth: int) -> str:
    inner = choose.choice(DEPTHS)
    left = _operand(made, choose, (*shape[:-1], inner), depth)
    return f"({left}) @ ({_operand(made, choose, (inner, shape[-1]), depth)})"


_KINDS = (
    _pointwise, _binary, _broadcast, _broadcast, _reduced, _reduced, _kept, _expanded, _expanded,
    _transposed, _reshaped, _joined, _sliced, _multiplied,
)  # fmt: skip


def check(seed: int, backend: str) -> str:
    """What is wrong with the expression of a seed; empty: nothing."""
    made = random_product(seed)
    numbers = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(shape, generator=numbers) for shape in made.shapes]
    names = ", ".join(f"x{i}" for i in range(len(inputs)))
    function = eval(f"lambda {names}: [{made.source}]", {"torch": torch})
    options = {"cache": False, "min_block_size": 1, "verify": "off"}
    torch._dynamo.reset()
    run = torch.compile(function, backend=dynamo_backends.compiler(backend, **options))
    expected, precise = function(*inputs), function(*map(widen_to_float64, inputs))
    for _ in range(2):  # memory that is read by mistake may be right at first
        results: Sequence[Tensor] = run(*inputs)
        wrong = describe_difference(expected, results, precise)
        if wrong:
            return f"{made.source}\n{made.shapes}\n{wrong}"
    return ""


def check_in_a_process(seeds: Sequence[int], backend: str) -> list[str]:
    """What is wrong with these expressions, each with its seed."""
    left, found = list(seeds), []
    while left:
        command = [sys.executable, "-m", "tests.random_products", "--backend", backend, "--each"]
        ended = subprocess.run([*command, *map(str, left)], capture_output=True, text=True)
        texts = ended.stdout.split("\0")[:-1]
        found += [f"seed {seed}: {text}" for seed, text in zip(left, texts, strict=False) if text]
        left = left[len(texts) :]
        if left:  # it has ended early
            seed = left.pop(0)
            made = random_product(seed)
            reason = ended.stderr.strip().rpartition("\n")[2] or f"signal {-ended.returncode}"
            found.append(f"seed {seed}: {made.source}\n{made.shapes}\n{reason}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument("--backend", default="openxla", metavar="NAME")
    parser.add_argument("--each", type=int, nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.each:
        with torch.no_grad():
            for seed in arguments.each:
                print(check(seed, arguments.backend), end="\0", flush=True)
        return 0
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    groups = [seeds[k : k + IN_A_PROCESS] for k in range(0, len(seeds), IN_A_PROCESS)]
    found = 0
    for group in track(groups, "checking"):
        for text in check_in_a_process(group, arguments.backend):
            found += 1
            print(f"\n{text}", flush=True)
    print(f"{found} differences in {len(seeds)} expressions for {arguments.backend}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
