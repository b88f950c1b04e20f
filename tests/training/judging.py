"""Judges what training leaves behind: compiled against eager, tensor by tensor.

A run is a mapping from names to tensors. The first word of a name is the kind of tensor ("loss 3",
"gradient of weight"): tensors of one kind have one scale.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends import _torch_private as private

PRECISION = 1e-9  # in float64, relative to the largest element of each tensor
ROUNDING = 1e-14  # in float64, relative to the largest element of all tensors of a kind
# Eager runs that are rounded otherwise, at most. In the fourth step of ResNet-50 five were off by
# 1.5e-3 to 2.4e-2 of the loss: the worst of two or three says little.
OTHERS = 8
# They round the weights alone otherwise; a compiled graph does so with every operation, and was
# seen to differ by up to 1.8 times as much.
OPERATIONS = 4
TOLERANCE = 1e-3  # in float32; that of PyTorch's benchmark runners for training
SMALL = 1e-3  # a tensor that is so much smaller than others of its kind is judged at this scale

Run = Mapping[str, Tensor]


def round_otherwise(
    model: nn.Module, generator: torch.Generator, dtype: torch.dtype | None = None
) -> None:
    """Changes weights by one unit of a dtype's last bit, or not, at random.

    Rounding decides on which side of a ReLU's kink, or which of two nearly equal maxima, a value
    is, and the gradient jumps there; batch norm enlarges rounding in each step. Training with
    weights that are rounded otherwise before each step shows by how much eager itself may differ.

    Args:
        model: Whose weights.
        generator: Where the signs are drawn.
        dtype: Of which to take the last bit; None: of each weight itself. float32 for a model that
            computes in that inside, whatever the dtype of its weights.
    """
    with torch.no_grad():
        for p in model.parameters():
            sign = torch.randint(-1, 2, p.shape, generator=generator).to(p.dtype)
            p.mul_(1 + sign * torch.finfo(dtype or p.dtype).eps)


def assert_agrees(expected: Run, found: Run, others: Iterable[Run]) -> None:
    """Asserts that two runs in float64 agree to `PRECISION`.

    Where eager itself does not agree so well with eager that rounds otherwise, `OPERATIONS` times
    their difference is allowed.

    Args:
        expected: Eager's.
        found: The compiled one's.
        others: Eager runs that were rounded otherwise; made only if they are needed.
    """
    assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
    largest = _largest(expected)
    disturbed = _Runs(others)
    for name, e in expected.items():
        f = found[name]
        if not _comparable(name, e, f):
            continue
        # What is zero but for rounding is as large as the rounding of others.
        allowed = PRECISION * e.abs().max().item() + ROUNDING * largest[_kind(name)]
        worst = (e - f).abs().max().item()
        for run in disturbed:
            if worst <= allowed:
                break
            allowed = max(allowed, OPERATIONS * (e - run[name]).abs().max().item())
        assert worst <= allowed, f"{name} differs by {worst:.3e}, more than {allowed:.3e}"


def assert_as_accurate(expected: Run, found: Run, precise: Run, others: Iterable[Run]) -> None:
    """Asserts that a run in float32 is as accurate as one of eager's runs, tensor by tensor.

    It is judged by `torch._dynamo.utils.same`; each tensor is scaled to one before, so that its
    absolute tolerance is a relative one.

    Args:
        expected: Eager's.
        found: The compiled one's.
        precise: Eager's in float64.
        others: Eager runs that were rounded otherwise; made only if they are needed.
    """
    assert expected.keys() == found.keys() == precise.keys()
    largest = _largest(precise)
    disturbed = _Runs(others)
    for name, p in precise.items():
        e, f = expected[name], found[name]
        if not _comparable(name, e, f):
            continue
        scale = max(p.abs().max().item(), SMALL * largest[_kind(name)])
        right = _same(e, f, p, scale) or any(_same(r[name], f, p, scale) for r in disturbed)
        worst = (e - f).abs().max().item()
        assert right, f"{name} differs from eager by {worst:.3e} of {scale:.3e}"


class _Runs:
    """Runs, each made when it is first asked for.

    Args:
        made: Makes them.
    """

    def __init__(self, made: Iterable[Run]):
        self._made = iter(made)
        self._known: list[Run] = []

    def __iter__(self) -> Iterator[Run]:
        """All of them, from the first on."""
        yield from self._known
        for run in self._made:
            self._known.append(run)
            yield run


def _same(expected: Tensor, found: Tensor, precise: Tensor, scale: float) -> bool:
    e, f, p = (x / scale for x in (expected, found, precise))
    return private.meets_benchmark_accuracy(e, f, p, tol=TOLERANCE, log_error=_quiet)


def _kind(name: str) -> str:
    return name.partition(" ")[0]


def _largest(run: Run) -> dict[str, float]:
    """By kind, the largest element of all tensors."""
    found: dict[str, float] = defaultdict(float)
    for name, value in run.items():
        if value.is_floating_point() and value.numel():
            found[_kind(name)] = max(found[_kind(name)], value.abs().max().item())
    return found


def _comparable(name: str, expected: Tensor, found: Tensor) -> bool:
    """Whether there are numbers to compare; what has to be equal is compared here."""
    theirs, ours = ((x.dtype, x.shape, _strides(x)) for x in (expected, found))
    assert theirs == ours, f"{name}: {ours} instead of {theirs}"
    if expected.is_floating_point() and expected.numel():
        return True
    assert torch.equal(expected, found), name
    return False


def _strides(tensor: Tensor) -> list[int]:
    """Of dimensions with more than one element; those of others say nothing."""
    return [n for size, n in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _quiet(*_: Any, **__: Any) -> None:
    pass
