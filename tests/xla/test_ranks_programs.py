"""Torch's own distributed programs in two processes: their collectives are XLA's, in one block."""

from pathlib import Path

import pytest

from dynamo_backends.interface import protocols
from dynamo_backends.interface.registry import get_backend
from dynamo_backends.xla.mesh.distributed_graphs import RankGraphSummary, find_rank_mismatch
from tests.xla.ranks import job

_SHARED = """
import torch, logging
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from dynamo_backends import record

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

def same(found, expected, what):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, msg=lambda m: what + m)

def net():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8)).double()

def batch(number, rows=8):
    drawn = torch.Generator().manual_seed(number)
    return torch.randn(rows, 16, generator=drawn, dtype=torch.float64)
"""

_MODELS = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrize

mesh = init_device_mesh("cpu", (size,))
options = {"fallback": "error"}

class Gather(nn.Module):
    def forward(self, split):
        return split.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

def tensor_parallel(model):
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return lambda x: x

def fully_sharded(model):
    for layer in (model[0], model[2]):
        for name, parameter in list(layer.named_parameters(recurse=False)):
            split = nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(0)]))
            layer.register_parameter(name, split)
            parametrize.register_parametrization(layer, name, Gather(), unsafe=True)
    return lambda x: x.chunk(size)[rank]

def full(p):
    return p.full_tensor() if isinstance(p, DTensor) else p

for spread in (tensor_parallel, fully_sharded):
    torch.manual_seed(0)
    model, eager = net(), net()
    eager.load_state_dict(model.state_dict())
    part = spread(model)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, eager)]
    with record() as reports:
        run = torch.compile(model, backend="openxla", options=options)
        with torch.no_grad():
            for number in range(3):
                x = batch(number)
                same(run(part(x)), part(eager(x)), spread.__name__)
        share = 1 if spread is tensor_parallel else size
        for number in range(3):
            x = batch(number)
            (run(part(x)).square().mean() / share).backward()
            eager(x).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        same(full(p.detach()), q.detach(), spread.__name__)
    for report in reports:
        assert (report.blocks, report.ops_in_eager, report.rebinds) == (1, 0, 0), report
        weights = [x for x in report.inputs if x.frozen]
        assert len(weights) == 4 * (report.kind == "inference")
        kinds = {c.kind for c in report.mesh.collectives} if report.mesh else ()
        print(f"{spread.__name__} {report.kind} {sorted(kinds)}", flush=True)
    with torch.no_grad():  # weights that have changed since they were bound
        for _ in range(2):
            same(run(part(x)), part(eager(x)), spread.__name__)
"""


@pytest.fixture(scope="module")
def said_by_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What two processes say that run all of these programs."""
    code = _SHARED + _MODELS + _OPERATORS + _INFERENCE
    with job(code, tmp_path_factory.mktemp("ranks")) as started:
        return started.finish()


def answers(said: str) -> dict[str, str]:
    """The lines of a rank, by what stands in front of their colons."""
    return dict(x.split(": ", 1) for x in said.splitlines() if ": " in x)


def test_dtensor_and_an_fsdp_like_model_are_one_block_a_graph(said_by_ranks: list[str]):
    for said in said_by_ranks:
        lines = [x for x in said.splitlines() if x.startswith(("tensor_p", "fully_s"))]
        assert lines == [
            "tensor_parallel inference ['all-reduce']",
            "tensor_parallel forward ['all-reduce']",
            "tensor_parallel backward []",
            "fully_sharded inference ['all-gather']",
            "fully_sharded forward ['all-gather']",
            "fully_sharded backward ['reduce-scatter']",
        ]


_OPERATORS = """
world, alone = dist.group.WORLD, [dist.new_group([r]) for r in range(size)][rank]

def exchange(x, group):
    wait = funcol.wait_tensor
    total = wait(funcol.all_reduce(x, "sum", group))
    most = wait(funcol.all_reduce(x.long(), "max", group))
    least = wait(funcol.all_reduce(x, "min", group))
    whole = wait(funcol.all_gather_tensor(x, 0, group))
    part = wait(funcol.reduce_scatter_tensor(whole.cos(), "sum", 0, group))
    turned = wait(funcol.all_to_all_single(x, None, None, group))
    first = wait(funcol.broadcast(-0.0 * x, 0, group))
    said = wait(funcol.broadcast(x > 0, int(group is world), group))
    number = wait(funcol.all_reduce(x.sum(), "sum", group))
    return total, most, least, whole, part, turned, first, first.signbit(), said, number

def compare(group, name, **options):
    torch._dynamo.reset()
    x = batch(5 + rank)
    with record() as reports:
        run = torch.compile(lambda x: exchange(x + 1, group), backend="openxla", options=options)
        found = run(x)
    for place, (a, b) in enumerate(zip(found, exchange(x + 1, group), strict=True)):
        assert a.dtype == b.dtype
        same(a, b, f"{name} {place}")
    (report,) = reports
    print(f"{name}: {report.blocks} blocks, {report.ops_in_eager} in eager", flush=True)
    for each in report.fallbacks[:1]:
        print(f"{name}, {each.op}: {each.reason}", flush=True)

compare(world, "all", fallback="error")
compare(alone, "alone", fragmented="keep")
compare(world, "torch", collectives="torch", fragmented="keep")

def told(name, function, x):
    torch._dynamo.reset()
    with record() as reports:
        found = torch.compile(function, backend="openxla", options={"min_block_size": 1})(x)
    same(found, function(x), name)
    reasons = " ".join({f.reason for f in reports[0].fallbacks})
    print(f"{name}: {reports[0].blocks} blocks. {reasons}", flush=True)

def chain(x):
    y = funcol.wait_tensor(funcol.all_reduce(x * (rank + 1), "sum", world))
    return funcol.wait_tensor(funcol.all_reduce(y.sin() + rank, "sum", world)).cos()

def fork(x):
    y = funcol.all_reduce(x * (rank + 1), "sum", world)
    z = funcol.all_reduce(x.sin() + rank, "sum", world)
    return funcol.wait_tensor(y) + funcol.wait_tensor(z).cos()

def uneven(x):
    parts = funcol.wait_tensor(funcol.all_gather_tensor(x[: 2 + rank].sum(0), 0, world))
    y = torch.cat([x[: 2 + rank] + parts[0], x[2 + rank :]])
    return funcol.wait_tensor(funcol.all_reduce(y.exp(), "sum", world))

told("chain", chain, batch(1))
told("fork", fork, batch(2))
told("uneven", uneven, batch(3))
"""


def test_each_collective_and_what_stays_with_torch(said_by_ranks: list[str]):
    for rank, said in enumerate(said_by_ranks):
        lines = answers(said)
        assert lines["all"] == "1 blocks, 0 in eager", said
        assert int(lines["alone"].split()[-3]) >= 18  # 9 collectives, which are waited for
        (why,) = (v for k, v in lines.items() if k.startswith("alone, _c10d_functional"))
        assert why == f"its process group has ranks [{rank}], but XLA collectives need all 2 ranks"
        assert any("option collectives leaves it" in v for v in lines.values())
        assert lines["chain"] == "1 blocks. "
        assert "graphs of rank 0 and rank 1 differ" in lines["fork"]


_INFERENCE = """
from torch.distributed.tensor import Shard
from dynamo_backends import OptionError, RankError

split = {"mesh": {"model": size}, "placements": {"0.*": [Shard(0)], "2.weight": [Shard(1)]}}

def run(model, **options):
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="openxla", options={**split, **options})
    with torch.no_grad():
        for number in range(2):
            same(compiled(batch(number)), model(batch(number)), "inference")

torch.manual_seed(0)
with record() as reports:
    run(net(), fallback="error")
(report,) = reports
first, exchanged = report.mesh.parameters[0], report.mesh.collectives
print(f"placed: {first.placement}, {exchanged[0].kind}", flush=True)
torch.manual_seed(rank)
for name, options in {"eager": {}, "weights": {"fallback": "error"}}.items():
    try:
        run(net(), **options)
    except (OptionError, RankError, torch._dynamo.exc.BackendCompilerFailed) as error:
        print(f"{name}: {error}".replace(chr(10), " "), flush=True)
"""


def test_inference_on_a_mesh_of_two_processes(said_by_ranks: list[str]):
    for lines in map(answers, said_by_ranks):
        assert lines["placed"] == "Shard(0) over model, all-reduce"
        assert "would wait for a process that falls back to eager" in lines["eager"]
        assert "fn.0.weight with contents" in lines["weights"]
        assert "but rank 1 has" in lines["weights"]


def offer(graph: str, *exchanged: str, is_chain: bool = True) -> RankGraphSummary:
    return RankGraphSummary(graph, exchanged, is_chain)


def test_what_processes_have_to_have_in_common():
    assert find_rank_mismatch([offer("a", "x", "y", is_chain=False)] * 2) is None
    assert find_rank_mismatch([offer("a", "x", "y"), offer("b", "x", "y")]) is None
    several = [offer("a", "x", "y"), offer("b", "x", "y", is_chain=False)]
    assert "may run collectives in different orders" in str(find_rank_mismatch(several))
    assert "rank 0 y, but rank 1 z" in str(
        find_rank_mismatch([offer("a", "x", "y"), offer("b", "x", "z")])
    )
    text = str(find_rank_mismatch([offer("a", "x"), offer("b", "x", "y")]))
    assert "rank 0 runs 1 collectives, but rank 1 runs 2 collectives" in text


def test_who_compiles_alone_leaves_collectives_to_torch():
    backend = get_backend("openxla")
    options = protocols.single_process_options(backend, backend.Options())
    assert options.collectives == "torch"


_LOST = (
    _SHARED
    + """
import os, time
from dynamo_backends import RankError

@torch.compile(backend="openxla")
def total(x):
    return funcol.wait_tensor(funcol.all_reduce(x.sin(), "sum", dist.group.WORLD)).cos()

total(batch(1))
if rank:
    os._exit(3)
start = time.monotonic()
try:
    total(batch(1))
except RankError as error:
    print(f"lost after {time.monotonic() - start:.0f} s: {error}", flush=True)
"""
)


@pytest.mark.long
def test_a_lost_process_is_told(tmp_path: Path):
    with job(_LOST, tmp_path) as started:
        assert started.wait(1) == 3
        started.wait(0)
        said = started.output(0)
        assert "rank 1 (process" in said, said
        assert int(said.partition("lost after ")[2].partition(" ")[0]) < 40
