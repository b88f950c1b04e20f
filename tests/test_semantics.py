"""Whatever torch promises beyond values: mutation, aliases, strides, dtypes, random numbers.

What is checked is `dynamo_backends.conformance.semantics`; here is what reports have to say of it.
Another backend: `DYNAMO_BACKENDS_TEST_BACKEND=ltc python -m pytest tests/test_semantics.py`; with
`DYNAMO_BACKENDS_TEST_DEVICE=cuda` beside it, tensors are made on a GPU.
"""

import os
from collections.abc import Iterator

import pytest
import torch

import dynamo_backends
from dynamo_backends import GraphReport
from dynamo_backends.conformance.comparing import copy_inputs
from dynamo_backends.conformance.semantics import CHECKS
from dynamo_backends.conformance.subject import Subject
from dynamo_backends.interface import protocols

_NAMED = os.environ.get("DYNAMO_BACKENDS_TEST_BACKEND")
NAMES = [_NAMED] if _NAMED else ["openxla", "onnxrt", "ov"]


@pytest.fixture(autouse=True)
def default_device() -> Iterator[None]:
    torch.set_default_device(os.environ.get("DYNAMO_BACKENDS_TEST_DEVICE"))
    yield
    torch.set_default_device(None)


HAS_EVERY_OPERATOR = {"openxla"}
OF_MISSING_OPERATORS = "gradients of large bags"
"""Checks of what no lowering to XLA is for."""

BATCHES = {
    "a batch of changing size: without gradients": False,
    "a batch of changing size: with gradients": True,
}


def reports_of(name: str, check: str) -> list[GraphReport]:
    """Runs a check; nothing may have failed when it ran."""
    subject = Subject(name, {"min_block_size": 1})
    with subject.watching() as reports:
        CHECKS[check](subject)
    assert reports, "nothing was compiled"
    assert not any(r.runtime_fallbacks for r in reports), reports
    return reports


@pytest.mark.parametrize(
    ("name", "check"),
    [(name, check) for name in NAMES for check in CHECKS if check not in BATCHES],
)
def test_semantics(name: str, check: str):
    reports = reports_of(name, check)
    if name in HAS_EVERY_OPERATOR and not check.startswith(OF_MISSING_OPERATORS):
        assert [f for r in reports for f in r.fallbacks if not f.by_design] == []
    if name in HAS_EVERY_OPERATOR and check.startswith("random numbers"):
        assert reports[0].blocks == 1, "drawing must not split the block"
    if check == "gradients are right":
        assert {r.kind for r in reports} == {"forward", "backward"}


@pytest.mark.parametrize("check", BATCHES)
@pytest.mark.parametrize("name", NAMES)
def test_programs_of_a_batch_of_changing_size(name: str, check: str):
    graphs = [r for r in reports_of(name, check) if r.kind != "backward"]
    assert len(graphs) <= 2, "batch 1 is special to Dynamo; everything else is one graph"
    backend = dynamo_backends.get_backend(name)
    made = sum(r.executables for r in graphs)
    if protocols.buckets(backend, backend.Options()) is not None:
        assert 2 <= made <= 16, "one for bounds may serve several sizes; narrower ones come beside"
        return
    sizes = 2 if backend.serves_ranges else 16
    assert made == (sizes if backend.trains or not BATCHES[check] else 0)


def test_copies_do_not_share_memory():
    x = torch.randn(3)
    a, b = copy_inputs((x, x))
    assert a.data_ptr() != b.data_ptr() != x.data_ptr()
