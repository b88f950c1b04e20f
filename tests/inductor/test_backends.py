"""Inductor with frozen weights: never stale, and no setting of Inductor's is left changed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends.inductor.runtime import with_constants
from tests import backend_checks as checks
from tests import refusals
from tests.rotation import long_if

NAMES = ["inductor_freezing", "inductor_max_autotune"]


def settings() -> dict[str, str]:
    from torch._inductor import config

    return {name: repr(value) for name, value in config.get_config_copy().items()}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_changed_weights_are_seen_and_settings_are_put_back(
    name: str, capfd: pytest.CaptureFixture[str]
):
    """And choosing kernels writes nothing to the terminal."""
    from torch._inductor import config

    before = settings()
    with config.patch(autotune_local_cache=False):
        checks.never_stale(name, ["fused optimizer", "p.data"])
    assert settings() == before
    assert "Autotune" not in capfd.readouterr().err


@pytest.mark.parametrize("what", ["mutation", "channels_last", "empty"])
def test_semantics(what: str):
    fn, inputs = checks.SEMANTICS[what]
    with torch.no_grad():
        checks.agree("inductor_freezing", fn, *inputs())


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize(
    "name",
    [long_if(name == "inductor_max_autotune", name) for name in NAMES],  # it tries many kernels
)
def test_dynamic_batch(name: str):
    checks.follows_the_batch(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for CUDA tensors Inductor needs none")
def test_without_a_compiler_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-c++")
    text = "needs a C++ compiler, and 'no-such-c++' is not installed. To fix it: apt-get install"
    refusals.backend_is_refused("inductor_freezing", text)


HIDDEN = torch.zeros(5, 7)
HIDDEN[2] = -torch.inf  # one query sees nothing
HIDDEN[0, 3:] = -torch.inf


@pytest.mark.parametrize("name", ["inductor_freezing", "ts_trace", "ofi", "static_runtime"])
@pytest.mark.parametrize(
    "given",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": HIDDEN}, {"attn_mask": HIDDEN == 0}],
    ids=["plain", "causal", "scaled", "mask", "boolean mask"],
)
def test_attention_is_torchs_kernel(name: str, given: dict[str, Any]):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (x.unflatten(-1, (3, 8)).transpose(1, 2) for x in (q, k, v))
        return nn.functional.scaled_dot_product_attention(*heads, **given).transpose(1, 2)

    q, k, v = torch.randn(2, 5, 24), torch.randn(2, 7, 24), torch.randn(2, 7, 24)
    with torch.no_grad():
        checks.agree(name, attend, q, k, v)
        compiled = torch.compile(attend, backend=name)
        compiled(q, k, v)
        with torch.profiler.profile() as profile:
            compiled(q, k, v)
    names = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    assert "aten::bmm" not in names


def test_weights_that_keep_changing_become_inputs():
    module, x = nn.Linear(4, 3).eval(), torch.randn(2, 4)
    compiled = torch.compile(module, backend="inductor_freezing")
    with torch.no_grad(), dynamo_backends.record() as reports:
        for _ in range(8):
            module.weight.mul_(0.9)
            torch.testing.assert_close(compiled(x), module(x))
    program = reports[0].executable.static_program
    assert program.blocks[0].executable._live is not None


def test_only_given_weights_become_constants():
    from dynamo_backends.graph.graph import Graph, Input, Role

    graph = torch.fx.Graph()
    weight, x = graph.placeholder("weight"), graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, weight)),))
    inputs = (Input("weight", Role.PARAMETER, frozen=True), Input("x", Role.ACTIVATION))
    whole = Graph(torch.fx.GraphModule(nn.Module(), graph), "inference", inputs)
    frozen = with_constants(whole, [torch.full((2,), 3.0)])
    assert [p.name for p in frozen.graph.find_nodes(op="placeholder")] == ["x"]
    assert frozen(torch.ones(2))[0].tolist() == [3, 3]
    assert len(with_constants(whole, ()).graph.find_nodes(op="placeholder")) == 2
