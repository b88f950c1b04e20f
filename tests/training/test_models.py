"""Ten steps of training: compiled models against eager, tensor by tensor.

Every run trains a few models, and all of the suites in turn, each with both optimizers, in float64
and in float32.
"""

import pytest
import torch

from harness import find_case, suite
from tests.rotation import long_if
from tests.training import stepping

SUITES = ("classic", "transformers", "recurrent", "unet")

# Of each suite; those in float32 have no ReLU, whose kinks make training depend on rounding.
CHEAP = (
    ("unet", "unet", "float64"),
    ("transformers", "gpt2", "float64"),
    ("transformers", "gpt2", "float32"),
    ("recurrent", "lstm", "float32"),
)


CASES = [
    (name, case.name, dtype)
    for name in SUITES
    for case in suite(name, "test")
    for dtype in ("float64", "float32")
]


@pytest.mark.parametrize("case", [long_if(c not in CHEAP, c, id="-".join(c)) for c in CASES])
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_ten_steps_equal_eagers(case: tuple[str, str, str]):
    suite_name, name, dtype = case
    model = find_case(suite_name, name, "test")
    reports = stepping.compare(model, "openxla", tuple(stepping.OPTIMIZERS), dtype == "float64")
    assert [(r.kind, r.blocks, r.executables) for r in reports] == [
        ("forward", 1, 1),
        ("backward", 1, 1),
    ]
    for report in reports:
        assert report.runtime_fallbacks == []
        assert report.verified > 0
        assert report.unverified == []
        assert [f.op for f in report.fallbacks if not f.by_design] == []


def test_a_wrong_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch):
    from dataclasses import replace

    from dynamo_backends.xla.lowering import registry

    op = torch.ops.aten.native_layer_norm_backward.default
    row = registry.lookup(op)
    assert row is not None

    def wrong(*args: object, **kwargs: object) -> object:
        x, weight, bias = row.fn(*args, **kwargs)
        return x, weight * (1 + 1e-8), bias

    monkeypatch.setitem(registry._TABLE, op, replace(row, fn=wrong))
    case = find_case("transformers", "gpt2", "test")
    with pytest.raises(AssertionError, match=r"gradient of transformer.h.0.ln_1.weight differs by"):
        stepping.compare(case, "openxla", ("sgd",), True, cache=False)
