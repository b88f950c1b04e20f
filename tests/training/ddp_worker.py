"""One process of `test_ddp`: `python -m tests.training.ddp_worker RANK FILE`."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dynamo_backends

STEPS = 3
WIDTH = 400  # a layer fills a bucket of a megabyte, the smallest that there is


class Net(nn.Module):
    """Three layers. Dynamo compiles a forward of the user's inside of DDP, not one of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).tanh()).tanh())


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)


def trained(rank: int, backend: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters, and gradients of the last step."""
    # Gradients of one layer are exchanged as soon as they are there.
    model = DistributedDataParallel(net(), bucket_cap_mb=1)
    function = torch.compile(model, backend=backend) if backend else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        function(batch(rank, step)).square().mean().backward()
        optimizer.step()
    parameters = list(model.parameters())
    return [p.detach() for p in parameters], [p.grad for p in parameters if p.grad is not None]


def main(rank: int, file: str) -> None:
    """Trains with and without compiling, and exits with an error if anything differs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    with dynamo_backends.record() as reports:
        ours = trained(rank, "openxla")
    torch.testing.assert_close(ours, trained(rank, None), rtol=1e-9, atol=1e-12)
    kinds = [r.kind for r in reports]
    assert kinds.count("forward") == kinds.count("backward") > 1, kinds
    assert not any(r.fallbacks or r.runtime_fallbacks for r in reports), reports
    # Both processes have the mean of both gradients.
    gathered = [torch.zeros_like(ours[1][0]) for _ in range(2)]
    dist.all_gather(gathered, ours[1][0])
    assert torch.equal(*gathered)
    print("agreed", flush=True)
    dist.destroy_process_group()
    # Once Dynamo is imported, threads of gloo outlive this. One that still releases what was
    # exchanged when the interpreter ends takes the process down ("terminate called without an
    # active exception").
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
