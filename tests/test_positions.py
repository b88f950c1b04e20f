"""Positions out of range: eager's errors, eager's values, and a process that goes on living."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dynamo_backends
from dynamo_backends import compile_step
from tests.backend_checks import usable
from tests.rotation import rotation

BACKENDS = ("openxla", "onnxrt", "ov", "tvm", "iree", "inductor_freezing", "ts_trace", "ltc_trace")

SIZE = 5  # of each dimension that positions go along
X = torch.linspace(-2, 2, SIZE * SIZE).reshape(SIZE, SIZE)
ROWS = torch.ones(2, SIZE)


@dataclass(frozen=True)
class Case:
    """A call that takes two positions.

    Attributes:
        run: The call, of a tensor and the positions.
        narrow: Eager takes 32-bit positions, too.
    """

    run: Callable[[Tensor, Tensor], Tensor]
    narrow: bool = False


def _put(x: Tensor, i: Tensor) -> Tensor:
    x = x.clone()
    x[i] = ROWS
    return x


CASES = {
    "embedding": Case(lambda x, i: F.embedding(i, x), narrow=True),
    "embedding_bag": Case(lambda x, i: F.embedding_bag(i[None], x), narrow=True),
    "index, first": Case(lambda x, i: x[i], narrow=True),
    "index, last": Case(lambda x, i: x[:, i], narrow=True),
    "index, both": Case(lambda x, i: x[i, i.flip(0)]),
    "index, second of two": Case(lambda x, i: x[torch.arange(2), i]),
    "index_put": Case(_put),
    "accumulate": Case(lambda x, i: x.index_put((i,), ROWS, accumulate=True)),
    "index_select": Case(lambda x, i: x.index_select(1, i), narrow=True),
    "index_add": Case(lambda x, i: x.index_add(0, i, ROWS), narrow=True),
    "index_copy": Case(lambda x, i: x.index_copy(0, i, ROWS)),
    "index_fill": Case(lambda x, i: x.index_fill(0, i, 3.0)),
    "index_reduce": Case(lambda x, i: x.index_reduce(0, i, ROWS, "amax")),
    "gather": Case(lambda x, i: x.gather(1, i[None])),
    "take_along_dim": Case(lambda x, i: x.take_along_dim(i[:, None], 0)),
    "scatter": Case(lambda x, i: x.scatter(0, i[:, None], ROWS)),
    "scatter value": Case(lambda x, i: x.scatter(0, i[:, None], 7.0)),
    "scatter_add": Case(lambda x, i: x.scatter_add(0, i[:, None], ROWS)),
    "scatter_reduce": Case(lambda x, i: x.scatter_reduce(0, i[:, None], ROWS, "amax")),
    "take": Case(lambda x, i: x.flatten()[:SIZE].take(i)),
    "put": Case(lambda x, i: x[0].put(i, ROWS[0, :2])),
    "cross_entropy": Case(lambda x, i: F.cross_entropy(x[:2], i)),
    "one_hot": Case(lambda x, i: F.one_hot(i, SIZE) * x[0]),
    "max_unpool": Case(lambda x, i: F.max_unpool1d(x[:1, None, :2], i[None, None], 2)),
}  # fmt: skip

POSITIONS = (0, SIZE - 1, -1, -SIZE, -SIZE - 1, SIZE, 2**31 - 1, 2**40, -(2**40))


def _given(case: Case, x: Tensor, i: Tensor) -> Tensor:
    return case.run(x.sin(), i) * 2


def _computed(case: Case, x: Tensor, i: Tensor) -> Tensor:
    """The positions come out of a product of matrices, which is not small."""
    exact = torch.eye(2, dtype=torch.float64)
    return case.run(x.sin(), (i.double() @ exact).to(i.dtype)) * 2


def _outcome(f: Callable[..., Any], *args: Any) -> Any:
    try:
        return f(*args)
    except Exception as error:
        return type(error), str(error)


def _alike(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    return type(ours) is type(theirs) and bool(ours == theirs)


@pytest.mark.parametrize("way", [_given, _computed])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_give_what_they_give_in_eager(backend, name, way):
    case = CASES[name]
    dtypes = (torch.int64, torch.int32) if case.narrow else (torch.int64,)
    compiled = torch.compile(
        lambda x, i: way(case, x, i), backend=usable(backend), dynamic=False, fullgraph=True
    )
    wrong = []
    for dtype in dtypes:
        for position in POSITIONS:
            if abs(position) > torch.iinfo(dtype).max:
                continue
            for pair in ([1, position], [position, 2]):
                i = torch.tensor(pair, dtype=dtype)
                ours = _outcome(compiled, X, i)
                theirs = _outcome(lambda x, i: way(case, x, i), X, i)
                if not _alike(ours, theirs):
                    wrong.append((i, ours, theirs))
    assert not wrong


_CALLS = """
import random, sys, torch, dynamo_backends
from tests.test_positions import CASES, POSITIONS, X, _alike, _computed, _given
backend, seed, count, names = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
draw = random.Random(seed)
torch._dynamo.config.recompile_limit = 1000  # all lambdas are one code object
compiled = [(n, way, torch.compile(lambda x, i, n=n, way=way: way(CASES[n], x, i), backend=backend,
             dynamic=False)) for n in names for way in (_given, _computed)]
for _ in range(count):
    name, way, run = draw.choice(compiled)
    i = torch.tensor([draw.choice(POSITIONS), draw.choice(POSITIONS)])
    results = []
    for f in (run, lambda x, i: way(CASES[name], x, i)):
        try:
            results.append(f(X, i))
        except (IndexError, RuntimeError) as error:
            results.append((type(error).__name__, str(error)))
    ours, theirs = results
    assert _alike(ours, theirs), (name, i, ours, theirs)
print("alive", count)
"""


def _run_child(backend: str, count: int, names: list[str]) -> None:
    root = Path(dynamo_backends.__file__).parents[1]
    arguments = [backend, str(rotation()), str(count), *names]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _CALLS, *arguments],
        cwd=root, env=os.environ | {"PYTHONPATH": f"{root}:{root / 'benchmarks'}"},
        capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert f"alive {count}" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_process_lives_through_10_000_calls(backend):
    _run_child(usable(backend), 10_000, list(CASES))


def test_a_process_lives_through_calls():
    names = sorted(CASES)
    backend = BACKENDS[rotation() % 3]
    _run_child(usable(backend), 300, [names[(rotation() + k) % len(names)] for k in (0, 7, 13)])


@pytest.mark.parametrize("backend", ["openxla", "onnxrt", "ov"])
def test_inputs_are_written_to_as_in_eager(backend):
    """A cache, written to at positions that are computed on the way, and another input.

    Eager has written all that comes before the position that is out of range.
    """

    def put(count: Tensor, cache: Tensor, rows: Tensor, i: Tensor) -> Tensor:
        count.add_(1)
        at = (i.double() @ torch.eye(2, dtype=torch.float64)).long()
        cache.index_copy_(0, at, rows)
        return cache.sin()

    compiled = torch.compile(put, backend=usable(backend), fullgraph=True)
    ours, theirs = ([torch.zeros(3), torch.zeros(SIZE, SIZE)] for _ in range(2))
    with torch.no_grad():
        for position in (SIZE - 1, -1, SIZE):
            i = torch.tensor([1, position])
            expected = _outcome(put, *theirs, (position + 2) * ROWS, i)
            assert _alike(_outcome(compiled, *ours, (position + 2) * ROWS, i), expected)
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["openxla", "onnxrt"])
def test_training_checks_positions_in_the_forward_graph(backend, dynamic):
    table = torch.nn.Embedding(20, 8)

    def loss(ids: Tensor, labels: Tensor) -> Tensor:
        hidden = table(ids) + table(torch.arange(ids.shape[0]))
        return F.cross_entropy(hidden[:, :SIZE], labels)

    compiled = torch.compile(loss, backend=usable(backend), dynamic=dynamic)
    ids, labels = torch.tensor([1, 19, 3]), torch.tensor([0, 4, -100])
    compiled(ids, labels).backward()
    assert table.weight.grad is not None
    for bad in ((ids + 1, labels), (ids - 2, labels), (ids, labels + 1), (ids, labels - 1)):
        assert _outcome(compiled, *bad) == _outcome(loss, *bad)
    torch.testing.assert_close(compiled(ids, labels), loss(ids, labels))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("backend", ["openxla", "onnxrt", "aot_eager"])
def test_a_step_with_positions_out_of_range_changes_nothing(backend, late, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(20, 8), torch.nn.Linear(8, SIZE))
    optimizer = torch.optim.Adam(model.parameters())

    def step(ids: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        scores = model(ids)
        if late:  # the positions depend on what the model computes
            labels = (scores.detach() * 0).sum(1).long() + labels
            loss = -scores.log_softmax(1)[torch.arange(3), labels].mean()
        else:
            loss = F.cross_entropy(scores, labels) + F.one_hot(labels, SIZE).float().sum()
        loss.backward()
        optimizer.step()
        return loss

    name = backend if backend == "aot_eager" else usable(backend)
    compiled = compile_step(step, model=model, optimizer=optimizer, backend=name)
    ids, labels = torch.tensor([1, 19, 3]), torch.tensor([0, 4, 2])
    for _ in range(2):  # in eager, and compiled
        compiled(ids, labels)
    before = [p.detach().clone() for p in model.parameters()]
    for bad in ((ids + 1, labels), (ids, labels + 1), (ids, labels - 9)):
        found = _outcome(compiled, *bad)
        assert found == _outcome(step, *bad)
        assert found[0] in (IndexError, RuntimeError)
        assert all(map(torch.equal, before, model.parameters()))
    compiled(ids, labels)
    assert not any(map(torch.equal, before, model.parameters()))
    if backend != "openxla":  # others' steps are compiled again when they are loaded
        return
    compiled.save(tmp_path / "step.dbp")
    loaded = dynamo_backends.load_step(tmp_path / "step.dbp")
    with pytest.raises(IndexError, match="state are unchanged"):
        loaded(ids, labels + 1)
    torch.testing.assert_close(loaded(ids, labels), compiled(ids, labels))


class _Lookup(torch.nn.Module):
    def __init__(self, early: bool):
        super().__init__()
        self.table = torch.nn.Embedding(20, SIZE)
        self.early = early

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids)
        if self.early:
            return rows.sin()
        return rows.sin()[(ids.double() @ torch.eye(3, dtype=torch.float64)).long() - 10]


@pytest.mark.parametrize("early", [False, True])
def test_packages_keep_the_checks(early, tmp_path):
    model, ids = _Lookup(early).eval(), torch.tensor([10, 12, 11])
    dynamo_backends.save(model, tmp_path / "model.dbp", (ids,), backend="openxla")
    loaded = dynamo_backends.load(tmp_path / "model.dbp")
    torch.testing.assert_close(loaded(ids), model(ids))
    for bad in (ids + 10, ids - 11, ids + 1, ids - 8):
        assert _alike(_outcome(loaded, bad), _outcome(model, bad))


def test_positions_that_are_known_to_be_in_range_are_not_checked():
    """Of the models that users have: positions counted up, labels of a buffer, topk and argmax."""
    from dynamo_backends.graph import index_checks
    from dynamo_backends.pipeline import captured

    seen: list[index_checks.IndexCheckedGraph] = []
    make = index_checks.with_index_checks

    def noting(*args: Any, **kwargs: Any) -> index_checks.IndexCheckedGraph:
        seen.append(make(*args, **kwargs))
        return seen[-1]

    def f(x: Tensor, mask: Tensor) -> Tensor:
        y = x[torch.arange(SIZE), x.argmax(1)] + x.gather(1, x.topk(2).indices).sum(1)
        y = y + X[(mask > 0).long().cumsum(0).clamp(max=SIZE - 1)].sum()
        y = (
            y
            + x[x.sort(0).indices[0] % 3].sum()
            + F.interpolate(x[None, None], scale_factor=2).sum()
        )
        pooled, where = F.max_pool2d(x[None], 2, return_indices=True)
        return y + F.max_unpool2d(pooled, where, 2, output_size=[SIZE, SIZE]).sum()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured, "with_index_checks", noting)
        mask = torch.ones(3)
        result = torch.compile(f, backend="openxla", fullgraph=True)(X, mask)
    torch.testing.assert_close(result, f(X, mask))
    assert [(c.before, c.flag) for c in seen] == [(None, None)]
