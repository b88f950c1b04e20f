"""DistributedDataParallel in a step of two processes; batches in parts, and scaled losses."""

from pathlib import Path

from tests.xla.ranks import job

_TRAINING = """
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from dynamo_backends import OptionError, StepCaptureError, compile_step

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

def net():
    torch.manual_seed(rank)  # the parameters are rank 0's
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()

def batch(number, part):
    drawn = torch.Generator().manual_seed(10 * number + part)
    x = torch.randn(6, 8, generator=drawn, dtype=torch.float64)
    return x, torch.randint(4, (6,), generator=drawn)

def trained(model, accumulate=0, scaler=None):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def train(x, y):
        loss = F.cross_entropy(model(x), y)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        return loss

    step = train
    if accumulate:
        mesh = None if isinstance(model, DistributedDataParallel) else {"data": size}
        step = compile_step(
            train, model=model, optimizer=optimizer, mesh=mesh, accumulate=accumulate,
            python="replay",
        )
    for number in range(5):
        step(*batch(number, rank))
    if accumulate:
        assert (step.eager_steps, step.refusals) == (0, {})
    if accumulate and scaler is None:  # whether a scaler skips a step is a value for Python
        assert (step.compilations, step.launches, step.cuts) == (1, 5, 0)
    return [torch.tensor(p.tolist(), dtype=p.dtype) for p in model.parameters()]

expected = trained(DistributedDataParallel(net()))
model = DistributedDataParallel(net())
for name, found in {
    "replica": trained(model, 1),
    "scaled, in parts": trained(net(), 3, torch.amp.GradScaler("cpu", growth_interval=2)),
}.items():
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m: name + m)

with torch.no_grad():
    print(f"evaluated: {tuple(model(batch(0, 0)[0]).shape)}", flush=True)

def refused(name, model, **settings):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        compile_step(model, model=model, optimizer=optimizer, **settings)
    except (OptionError, StepCaptureError) as error:
        print(f"{name}: {error}", flush=True)
    model(batch(0, 0)[0]).sum().backward()  # it is as it was

alone = [dist.new_group([r]) for r in range(size)][rank]
hooked = DistributedDataParallel(net())
hooked.register_comm_hook(None, default_hooks.allreduce_hook)
refused("hook", hooked)
refused("group", DistributedDataParallel(net(), process_group=alone))
refused("norm", DistributedDataParallel(nn.Sequential(net(), nn.BatchNorm1d(4).double())))
refused("kind", DistributedDataParallel(net()), parallel="fsdp")
"""


def test_replicas_parts_and_scaled_losses_are_ddps(tmp_path: Path):
    with job(_TRAINING, tmp_path) as started:
        for said in started.finish():
            lines = dict(x.split(": ", 1) for x in said.splitlines() if ": " in x)
            assert lines["evaluated"] == "(6, 4)"
            assert "has a communication hook (register_comm_hook). compile_step" in lines["hook"]
            assert "averages over a subset of the processes" in lines["group"]
            assert (
                "batch norm layers that compute statistics on each process's part" in lines["norm"]
            )
            assert "For parallel='fsdp' pass model.module." in lines["kind"]
