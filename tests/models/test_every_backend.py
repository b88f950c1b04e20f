"""Classic models and transformers on every backend for CPUs: as accurate as eager itself.

Every run has the models named here, and all of both suites in turn. openxla has all of them in
`test_models`.
"""

import pytest

from harness import suite
from tests import backend_checks as checks
from tests.rotation import long_if

# The models that every run has; the backends without any have some in their own folders.
BACKENDS: dict[str, tuple[str, ...]] = {
    "onnxrt": (),
    "ov": (),
    "tvm": (),
    "iree": (),
    "ts_trace": ("resnet18", "distilbert"),
    "ofi": ("mobilenet_v2", "bert"),
    "static_runtime": ("resnet18", "gpt2"),
    "onednn_graph": ("resnet18", "bert"),
    "ltc": ("resnet18", "bert"),
    "ltc_trace": ("squeezenet1_1", "albert"),
    "inductor_freezing": ("resnet18", "distilbert"),
    "inductor_max_autotune": ("alexnet",),
}
SUITES = {case.name: name for name in ("classic", "transformers") for case in suite(name, "test")}

pytestmark = [
    # Said by torch about code of transformers, and by Inductor's tuner about itself.
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]


@pytest.mark.parametrize(
    ("backend", "model"),
    [long_if(m not in always, b, m) for b, always in BACKENDS.items() for m in SUITES],
)
def test_a_model_is_right(backend: str, model: str):
    # The fuser for oneDNN Graph cannot compile every partition that it makes.
    picky = backend == "onednn_graph"
    report = checks.model_is_right(backend, SUITES[model], model, may_fail=picky)
    assert report.ops_on_backend > report.ops_in_eager, report.fallbacks
