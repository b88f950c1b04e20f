from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends.graph.aliasing import estimate_peak_bytes

KIB = 1024


def peak(function: Callable[..., object], *inputs: Tensor) -> int:
    return estimate_peak_bytes(make_fx(function, tracing_mode="fake")(*inputs).graph)


def test_what_nobody_reads_any_more_is_gone() -> None:
    x = torch.ones(256)  # 1 KiB
    assert peak(lambda x: x.exp().sin().cos().neg(), x) == 2 * KIB


def test_what_is_read_later_stays() -> None:
    def program(x: Tensor) -> Tensor:
        early = x.exp()
        return early.sin().cos() + early

    assert peak(program, torch.ones(256)) == 3 * KIB


def test_a_view_keeps_memory_and_takes_none() -> None:
    def program(x: Tensor) -> Tensor:
        part = x.exp().view(16, 16)[:, 0]
        return x.sum() + part.sum()

    assert KIB <= peak(program, torch.ones(256)) < KIB + 64


def test_results_stay_to_the_end() -> None:
    assert peak(lambda x: (x.exp(), x.sin(), x.cos()), torch.ones(256)) == 3 * KIB


def test_several_results_of_a_call_count_once() -> None:
    image = torch.ones(1, 1, 32, 32)
    pooled = peak(lambda x: torch.ops.aten.max_pool2d_with_indices(x, [2, 2])[0], image)
    assert pooled == 256 * 4


def test_memory_of_other_devices_does_not_count() -> None:
    assert peak(lambda x: x.exp().sin(), torch.ones(256, device="meta")) == 0
