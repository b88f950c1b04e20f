"""Models of the suites: ten compiled steps leave what ten eager steps leave.

A few small ones always; all of `MODELS`, with both optimizers, in float64 and float32, in turn;
models of images with Inductor too, whose steps treat images in ways of their own, in float64, where
ten steps do not turn roundings into differences of a thousandth.
"""

from typing import Any

import pytest
from torch import Tensor, nn

from dynamo_backends.bench.suites import call
from harness import ModelCase, find_cases, suite
from tests.aot import step_checks
from tests.aot.step_checks import batches_of
from tests.rotation import long_if
from tests.training.stepping import OPTIMIZERS, distance_to_targets

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
IMAGES = ("alexnet", "mobilenet_v2", "squeezenet1_1", "resnet18", "convnext", "unet")
STEPS = 10
READ_MASKS = ("distilbert", "albert")
"""Models whose Python asks in each call whether a mask hides anything: a program of its own."""

CHECKS = {
    "float64": step_checks.assert_equal_to_eager,
    "float32": step_checks.assert_as_accurate_as_eager,
}
ALWAYS = (("lstm", "sgd", "float64"), ("gpt2", "adamw", "float64"), ("lstm", "adamw", "float32"))


CASES = [c for name, wanted in MODELS.items() for c in find_cases(suite(name, "test"), wanted)]
RUNS = [
    long_if(
        name != "openxla" or (case.name, optimizer, dtype) not in ALWAYS,
        case, optimizer, dtype, name, id=f"{case.name}-{optimizer}-{dtype}-{name}",
    )
    for name in ("openxla", "inductor", "aot_eager")
    for case in CASES
    for optimizer in OPTIMIZERS
    for dtype in CHECKS
    if name == "openxla" or (case.name in IMAGES and dtype == "float64")
]  # fmt: skip


def distance(model: nn.Module, batch: Any) -> Tensor:
    """Of the outputs to fixed targets."""
    return distance_to_targets(call(model, batch))


@pytest.mark.parametrize(("case", "optimizer", "dtype", "backend"), RUNS)
def test_steps_equal_eagers(case: ModelCase, optimizer: str, dtype: str, backend: str) -> None:
    batches = batches_of(case, STEPS)
    step = CHECKS[dtype](case.make, OPTIMIZERS[optimizer], batches, backend, loss_of=distance)
    programs = 2 if case.name in READ_MASKS else 1
    counts = step.launches, step.compilations, step.eager_steps, step.cuts
    assert counts == (programs * (STEPS - 1), programs, 1, programs - 1), step.divergences
    assert step.refusals == {}
