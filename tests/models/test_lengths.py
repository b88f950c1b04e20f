"""Language models whose lengths vary, on every backend for CPUs: 64-bit ids of symbolic sizes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends.bench.torchvision_shim import import_transformers
from dynamo_backends.conformance.subject import OPERATORS, compiler_of
from tests import backend_checks as checks
from tests.checking import assert_same, tensors
from tests.rotation import long_if

BACKENDS = ("openxla", "onnxrt", "ov", "inductor_freezing", "ts_trace", "ofi", "static_runtime",
            "onednn_graph", "ltc", "ltc_trace", "inductor_max_autotune", "tvm", "iree")  # fmt: skip
SLOW = ("inductor_max_autotune", "tvm", "iree")
PARTIAL = ("onednn_graph", "ltc", "ltc_trace")
"""Those that have no kernels for some of the operators."""
RANGED = ("onnxrt", "ov")
"""Those whose programs serve all lengths of these models."""
FLOAT64 = {
    "ov": "OpenVINO computes float64 in float32",
    "tvm": "TVM's importer has no conversion of it",
}
"""Why scalars of float64 stay in eager: with `dynamic=True` floats of modules arrive as such."""

_ENDS = {"vocab_size": 100, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_LAYERS = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}


def _bert(library: Any) -> nn.Module:
    config = library.BertConfig(intermediate_size=64, vocab_size=100, **_LAYERS)
    return library.BertModel(config)  # type: ignore[no-any-return]


def _gpt2(library: Any) -> nn.Module:
    config = library.GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=64, **_ENDS)
    return library.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def _llama(library: Any) -> nn.Module:
    config = library.LlamaConfig(
        intermediate_size=64, num_key_value_heads=2, max_position_embeddings=64, **_LAYERS, **_ENDS
    )
    return library.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def _t5(library: Any) -> nn.Module:
    config = library.T5Config(d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, **_ENDS)
    return library.T5EncoderModel(config)  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[Any], nn.Module], int]] = {
    "bert": (_bert, 100),
    "gpt2": (_gpt2, 100),
    "llama": (_llama, 180),
    "t5": (_t5, 140),
}
"""How each is built, and how many of its operators run on the backend at least."""


def _inputs(length: int) -> dict[str, Tensor]:
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[0, :3] = 0
    return {"input_ids": torch.randint(3, 100, (2, length)), "attention_mask": mask}


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize(
    ("backend", "name"), [long_if(b in SLOW, b, name) for b in BACKENDS for name in MODELS]
)
def test_models_of_varying_lengths_run_on_the_backend(backend: str, name: str):
    checks.usable(backend)
    torch.manual_seed(0)
    build, least = MODELS[name]
    model = build(import_transformers()).eval().requires_grad_(False)
    precise = copy.deepcopy(model).double()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=compiler_of(backend, **OPERATORS), dynamic=True)
    with torch.no_grad(), dynamo_backends.record() as reports:
        for length in (16, 24, 33, 7):
            inputs = _inputs(length)
            expected, ours, wide = (
                tensors(tuple(m(**inputs).values())) for m in (model, compiled, precise)
            )
            assert_same(expected, ours, wide)
    assert len(reports) == 1, "lengths are guarded"
    (report,) = reports
    assert not report.runtime_fallbacks, report.runtime_fallbacks
    if backend in PARTIAL:
        assert report.ops_on_backend > report.ops_in_eager, report.fallbacks
        return
    assert report.ops_on_backend >= least, report
    if backend in RANGED:
        assert report.executables == report.blocks, "lengths have programs of their own"
    assert {x.reason for x in report.fallbacks} <= {FLOAT64.get(backend)}, report.fallbacks
