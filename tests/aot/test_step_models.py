"""Models of the suites: five compiled steps leave what five eager steps leave, in float64.

A few small ones always; all of `MODELS`, with both optimizers, with `--full`.
"""

import pytest

from dynamo_backends.bench import ModelCase, find_cases, suite
from tests.aot.step_checks import OPTIMIZERS, assert_equal_to_eager, batches_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN"),
]

MODELS = {
    "classic": (
        "resnet18", "alexnet", "mobilenet_v2", "squeezenet1_1", "bert", "vit_s_16", "resnet50",
    ),
    # Not llama and t5: they normalise in float32 whatever the dtype of the model.
    "transformers": ("gpt2", "distilbert", "albert", "whisper_encoder", "convnext"),
    "recurrent": ("lstm", "gru_2_layers_bidirectional", "lstm_projected"),
    "unet": ("unet",),
}  # fmt: skip
ALWAYS = (("lstm", "sgd"), ("gpt2", "adamw"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = [c for name, wanted in MODELS.items() for c in find_cases(suite(name, "test"), wanted)]
    full = metafunc.config.getoption("--full")
    chosen = [
        pytest.param(case, optimizer, id=f"{case.name}-{optimizer}")
        for case in cases
        for optimizer in OPTIMIZERS
        if full or (case.name, optimizer) in ALWAYS
    ]
    metafunc.parametrize(("case", "optimizer"), chosen)


def test_steps_equal_eagers(case: ModelCase, optimizer: str) -> None:
    step = assert_equal_to_eager(case.make, OPTIMIZERS[optimizer], batches_of(case, 5), "openxla")
    assert (step.launches, step.compilations) == (5, 1)
