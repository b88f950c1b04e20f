"""Models of the suites at their small sizes, in inference and training."""

import copy

import torch
from torch import nn

from dynamo_backends.bench.accuracy import check, compare_outputs
from dynamo_backends.bench.suites import ModelCase, call, suite
from dynamo_backends.bench.workload import cast, tolerance, without_dropout
from dynamo_backends.conformance.comparing import ensure
from dynamo_backends.conformance.subject import Subject, UntriedError, gradients

SUITES = ("control_flow", "recurrent", "unet", "transformers")
"""Those that are tried unless all are asked for."""

LARGE_SUITES = ("classic",)
"""Of more layers."""

MODES = ("inference", "training")
CALLS = 2


def names(every: bool) -> list[str]:
    """Returns what there is to check, such as "transformers/gpt2, training".

    Args:
        every: The models of `LARGE_SUITES`, too.
    """
    suites = (*SUITES, *LARGE_SUITES) if every else SUITES
    cases = [(name, case.name) for name in suites for case in suite(name, "test")]
    return [f"{name}/{case}, {mode}" for name, case in cases for mode in MODES]


def run(subject: Subject, name: str) -> None:
    """Compares a model with eager.

    Args:
        subject: The backend.
        name: One of `names`.

    Raises:
        AssertionError: It is not as accurate as eager.
        UntriedError: There is nothing to compare with, or a package is missing.
    """
    path, _, mode = name.rpartition(", ")
    suite_name, _, model = path.partition("/")
    (case,) = (c for c in suite(suite_name, "test") if c.name == model)
    try:
        module = case.make()
    except ImportError as error:
        raise UntriedError(str(error)) from error
    with torch._dynamo.config.patch(allow_rnn="rnn" in case.tags):
        (_infer if mode == "inference" else _train)(subject, case, module)


def _infer(subject: Subject, case: ModelCase, module: nn.Module) -> None:
    inputs = case.inputs()
    with torch.no_grad():
        first, again = (call(module, copy.deepcopy(inputs)) for _ in range(2))
        if not compare_outputs(first, again, first).passed:
            raise UntriedError("two runs of eager differ")
        compiled = subject.compile(module)
        for _ in range(CALLS):
            found = check(module, compiled, inputs)
            ensure(found.passed, found.detail)


def _train(subject: Subject, case: ModelCase, module: nn.Module) -> None:
    without_dropout(module.train())
    state, wide = copy.deepcopy(module.state_dict()), copy.deepcopy(module).double()
    inputs = case.inputs()
    try:
        theirs = gradients(module, module, inputs)
    except Exception as error:
        raise UntriedError(f"eager cannot train it: {error}") from error
    module.load_state_dict(state)
    ours = gradients(subject.compile(module), module, inputs)
    try:
        precise = gradients(wide, wide, cast(inputs, "cpu", torch.float64))
    except Exception:  # models that name float32 themselves
        precise = theirs
    found = compare_outputs(theirs, ours, precise, tolerance("float32", "training"))
    ensure(found.passed, found.detail)
