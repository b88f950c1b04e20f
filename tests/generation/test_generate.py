"""Generation as users run it: eager's tokens, and nothing compiled for each token or prompt."""

import copy
from typing import Any

import pytest
import torch

import dynamo_backends
from dynamo_backends import _torch_private as private
from dynamo_backends.bench.torchvision_shim import import_transformers
from dynamo_backends.pipeline import background
from tests.generation.tiny import compiled, generate, make, prompt

STATIC = {"cache_implementation": "static", "max_cache_len": 64}
NEW = {"max_new_tokens": 8, "min_new_tokens": 8}


class Made:
    """What was compiled so far: graphs that Dynamo captured, and executables."""

    def __init__(self, reports: list[Any]):
        self._reports = reports
        self._before = self._graphs()

    def __call__(self) -> tuple[int, int]:
        background.wait_until_idle(60)
        return self._graphs() - self._before, sum(r.executables for r in self._reports)

    def _graphs(self) -> int:
        return int(private.dynamo_counters()["stats"]["unique_graphs"])

    def check_native(self) -> None:
        """All operators run on the backend, and nothing failed."""
        assert not sum(r.ops_in_eager for r in self._reports)
        assert not [e for r in self._reports for e in r.events]


CASES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "llama": ("llama", STATIC, {}),
    "qwen": ("qwen", STATIC, {}),
    "gpt2": ("gpt2", STATIC, {}),
    "mamba": ("mamba", {}, {}),
    "t5": ("t5", STATIC, {}),
    "whisper": ("whisper", STATIC, {}),
    "sliding window": ("mistral", STATIC, {}),
    "sliding and full": ("gemma", STATIC, {}),
    "sampled": ("llama", {**STATIC, "do_sample": True, "temperature": 2.0}, {}),
    "batch padded on the left": ("llama", STATIC, {"batch": 3}),
    "beams": ("llama", {**STATIC, "num_beams": 3}, {}),
    "beams of t5": ("t5", {**STATIC, "num_beams": 2}, {}),
    "beams of whisper": ("whisper", {**STATIC, "num_beams": 2}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_prompts_in_one_bucket_compile_once(case: str):
    """One graph for prompts, one for decoding, one executable of each."""
    name, how, sizes = CASES[case]
    model = make(name)
    run = compiled(model, "openxla")
    with dynamo_backends.record() as reports:
        made = Made(reports)
        for length in (20, 27, 31):
            given = prompt(name, length, multiple=32, **sizes)
            found = generate(run, given, **how, **NEW)
            assert torch.equal(found, generate(model, given, **how, **NEW))
            assert made() == (2, 2)
    made.check_native()


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_prompts_of_any_length(name: str):
    """Not padded by the user: a second length makes a graph, and a program for many lengths."""
    model = make(name, num_hidden_layers=1)
    run = compiled(model, "openxla", exact_after=100, bucket_growth=2)
    counts = []
    with dynamo_backends.record() as reports:
        made = Made(reports)
        for length in (20, 27, 18):
            given = prompt(name, length)
            found = generate(run, given, **STATIC, **NEW)
            assert torch.equal(found, generate(model, given, **STATIC, **NEW))
            counts.append(made())
    assert counts[0] == (2, 2)
    assert counts[1:] == [(3, 3)] * 2
    assert not any(r.exact for r in reports)
    made.check_native()


@pytest.mark.long
def test_a_window_that_fills_up_is_compiled_for_few_times():
    """Decoding before and after; how many tokens there were is a number that nothing depends on."""
    model = make("mistral")
    run = compiled(model, "openxla")
    how = {**STATIC, "max_new_tokens": 24, "min_new_tokens": 24}
    with dynamo_backends.record() as reports:
        for length in (6, 7):
            given = prompt("mistral", length, multiple=8)
            assert torch.equal(generate(run, given, **how), generate(model, given, **how))
    assert [r.executables for r in reports] == [1, 1, 1]


@pytest.mark.parametrize(
    ("backend", "options"), [("openxla", {"bucket_growth": 2, "exact_after": 100}), ("onnxrt", {})]
)
def test_a_cache_that_grows(backend: str, options: dict[str, Any]):
    """Its layers have sizes of their own, which are equal in each call."""
    model = make("llama")
    if backend == "onnxrt":  # it has no grouped heads in float64
        model = model.float()
    run = compiled(model, backend, **options)
    how = {"max_new_tokens": 11, "min_new_tokens": 11}
    with dynamo_backends.record() as reports:
        made = Made(reports)
        for length in (20, 24, 18):
            given = prompt("llama", length)
            assert torch.equal(generate(run, given, **how), generate(model, given, **how))
        graphs, executables = made()
    assert graphs == 4, "the first prompt and token, then any"
    assert executables <= 5
    made.check_native()
    ranged = reports[2].executable.ranged if backend == "onnxrt" else reports[2].executable._padded
    assert ranged.proven if backend == "onnxrt" else ranged._proven, "else each length is looked at"


@pytest.mark.parametrize("name", ["llama", "gpt2", "whisper"])
def test_a_cache_that_grows_again_compiles_nothing(name: str):
    """Prompts in one bucket: each length has occurred, that after the prefill in a graph apart."""
    model = make(name)
    run = compiled(model, "openxla", bucket_growth=2)
    counts = []
    with dynamo_backends.record() as reports:
        made = Made(reports)
        for length in (20, 27, 31, 23, 20):
            given = prompt(name, length, multiple=32)
            assert torch.equal(generate(run, given, **NEW), generate(model, given, **NEW))
            counts.append(made())
    assert counts == counts[:1] * 5
    made.check_native()


@pytest.mark.long
def test_a_growing_cache_with_a_window():
    """The length that it would have without the window is a number that programs are given."""
    model = make("mistral")
    run = compiled(model, "openxla", exact_after=100, bucket_growth=2)
    how = {"max_new_tokens": 24, "min_new_tokens": 24}
    with dynamo_backends.record() as reports:
        given = prompt("mistral", 20)
        assert torch.equal(generate(run, given, **how), generate(model, given, **how))
    assert sum(r.executables for r in reports) <= 4
    assert not any(r.exact for r in reports)


def test_transformers_own_way():
    """It compiles decoding alone, and on the CPU only if it is told to."""
    model = make("llama", num_hidden_layers=1)
    config = import_transformers().CompileConfig(backend="openxla")
    config._compile_all_devices = True
    run = copy.deepcopy(model)
    run.generation_config.compile_config = config
    with dynamo_backends.record() as reports:
        for length in (20, 27):
            given = prompt("llama", length, multiple=32)
            found = generate(run, given, **STATIC, **NEW)
            assert torch.equal(found, generate(model, given, **STATIC, **NEW))
    assert [r.executables for r in reports] == [1]


def test_a_model_compiled_in_place():
    """`torch.compile(model).generate` would call the model that is not compiled."""
    model = make("gpt2", n_layer=1)
    run = copy.deepcopy(model)
    run.compile(backend="openxla")
    given = prompt("gpt2", 20)
    with dynamo_backends.record() as reports:
        found = generate(run, given, **STATIC, **NEW)
    assert torch.equal(found, generate(model, given, **STATIC, **NEW))
    assert [r.executables for r in reports] == [1, 1]
