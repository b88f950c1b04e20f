"""Models and backends for `dynamo-backends bench`, most of them with something wrong."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def dense(batch: int = 2) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), (torch.randn(batch, 8),)


def conv(batch: int = 2) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), (torch.randn(batch, 3, 6, 6),)


class _Counting(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        _Counting.calls += 1
        return x * _Counting.calls


def counting() -> tuple[nn.Module, tuple[Tensor]]:
    return _Counting(), (torch.ones(3),)


def unbuildable() -> tuple[nn.Module, tuple[Tensor]]:
    raise ValueError("no such checkpoint")


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def recurrent() -> tuple[nn.Module, tuple[Tensor]]:
    return _Recurrent(), (torch.ones(3, 2, 8),)


skipped = {"recurrent": recurrent}
models = {"dense": dense, "conv": conv}
unfit = {"counting": counting, "unbuildable": unbuildable}


def right(captured: Any, inputs: Any) -> Callable[..., Any]:
    run: Callable[..., Any] = captured.forward
    return run


def wrong(captured: Any, inputs: Any) -> Callable[..., Any]:
    return lambda *args: [x * 1.05 for x in captured(*args)]


def slow(captured: Any, inputs: Any) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        time.sleep(0.005)
        return captured(*args)

    return run


def broken(captured: Any, inputs: Any) -> Callable[..., Any]:
    raise RuntimeError("no licence")


def crashing(captured: Any, inputs: Any) -> Callable[..., Any]:
    os.abort()


def hanging(captured: Any, inputs: Any) -> Callable[..., Any]:
    time.sleep(3600)
    raise AssertionError("nobody waits so long")


def greedy(captured: Any, inputs: Any) -> Callable[..., Any]:
    raise MemoryError("not enough memory: you tried to allocate 1 PB")


def hoarding(captured: Any, inputs: Any) -> Callable[..., Any]:
    kept = torch.ones(1_000_000_000)
    time.sleep(3600)
    raise AssertionError(f"nobody minds {kept.nbytes} bytes")
