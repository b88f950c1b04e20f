"""Weights and inputs in every kind of memory, on every backend for CPUs but openxla.

`tests/xla/test_memory.py` has openxla.
"""

from pathlib import Path

import pytest

from tests import backend_checks as checks
from tests import memory
from tests.models import memory_models as models
from tests.rotation import long_if

BACKENDS = ("onnxrt", "ov", "inductor_freezing", "inductor_max_autotune", "tvm", "iree", "ts_trace",
            "ofi", "static_runtime", "onednn_graph", "ltc", "ltc_trace")  # fmt: skip
MODELS = ("head", "conv net", "bert", "llama", "gpt2")
SLOW = ("inductor_max_autotune", "tvm", "iree")
"""Each program of a transformer takes these many seconds: they get the kinds that share one."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]


def _model(backend: str, name: str) -> str:
    """The large head is for those whose users have such models."""
    if name != "head":
        return name
    large = ("onnxrt", "ov", "inductor_freezing")
    return "linear head" if backend in large else "small linear head"


@pytest.mark.parametrize(
    ("backend", "model"),
    [long_if(b in SLOW and m in MODELS[2:], b, m) for b in BACKENDS for m in MODELS],
)
def test_every_kind_of_memory_is_right(backend: str, model: str, tmp_path: Path):
    name = _model(checks.usable(backend), model)
    few = backend in SLOW and model in MODELS[2:]
    models.check(backend, name, memory.UNALIGNED if few else memory.KINDS, tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_first_calls_are_right_in_memory_that_is_not_aligned(backend: str, tmp_path: Path):
    checks.usable(backend)
    for kind in memory.UNALIGNED:
        models.check(backend, "small linear head", [kind], tmp_path, verify="first")
