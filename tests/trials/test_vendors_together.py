"""Vendors get the same verdicts on calls that are tried side by side as on each alone."""

import importlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynamo_backends.runtime.verdicts import TrialVerdict, VerdictStore


def several(x: Tensor, y: Tensor, n: Tensor) -> tuple[Tensor, ...]:
    """Right ones, one that is to be decomposed, one without a lowering, and a wrong one."""
    z = nn.functional.layer_norm(x @ y, (16,)).softmax(-1)
    a, b = z.split(8, dim=1)
    taken = torch.special.bessel_j0(a * b).amax(1)
    return taken, z.cos(), torch.digamma(z.exp()), n * 3 // 2, nn.functional.gelu(z)


def verdicts_of(
    backend: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[Mapping[str, TrialVerdict], int]:
    """The verdicts by kinds, and how many trials were made of one call."""
    trial: Any = importlib.import_module(f"dynamo_backends.{folder}.trial")
    alone: list[Any] = []
    with monkeypatch.context() as patch:
        original = trial._try
        patch.setattr(trial, "_try", lambda *a: alone.append(a) or original(*a))
        patch.setattr(trial, "_verdicts", VerdictStore(backend, (), shipped=False))
        torch._dynamo.reset()
        inputs = torch.randn(4, 40), torch.randn(40, 16), torch.arange(20)
        options = {"cache": False, "min_block_size": 1, "fragmented": "keep"}
        with torch.no_grad():
            torch.compile(several, backend=backend, options=options)(*inputs)
        return trial._verdicts.known_verdicts, len(alone)


@pytest.mark.parametrize(("backend", "folder"), [("onnxrt", "ort"), ("ov", "openvino")])
def test_verdicts_are_those_of_calls_alone(
    backend: str, folder: str, monkeypatch: pytest.MonkeyPatch
):
    together, alone = verdicts_of(backend, folder, monkeypatch)
    trial = importlib.import_module(f"dynamo_backends.{folder}.trial")
    monkeypatch.setattr(trial, "run_merged_trials", lambda trials, make: set())
    one_by_one, every = verdicts_of(backend, folder, monkeypatch)
    assert together == one_by_one
    refused = [kind for kind, verdict in together.items() if verdict.reason]
    assert refused
    assert every == len(one_by_one)
    assert alone < every / 2
