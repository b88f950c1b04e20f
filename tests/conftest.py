"""Fixtures for all tests."""

import logging
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dynamo_backends.pipeline import background


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="run what takes long too, and the whole operator database; rewrite its table in docs/",
    )
    parser.addoption(
        "--samples",
        type=int,
        metavar="N",
        help="with --full: at most so many samples of each operator and dtype (default: all)",
    )
    parser.addoption(
        "--dtype",
        action="append",
        metavar="NAME",
        help='with --full: only this dtype, such as "float32"; repeatable',
    )
    parser.addoption(
        "--extremes",
        action="store_true",
        help="with --full: NaN, infinities, signed zeros and bounds of integers in the samples",
    )
    parser.addoption(
        "--processes",
        type=int,
        default=2,
        metavar="N",
        help="with --full: processes that run the operator database (default: 2)",
    )
    parser.addoption(
        "--resume",
        action="store_true",
        help="with --full: go on where an earlier run stopped, and try its failures again",
    )


SHARES = {
    "aot/test_step_aliases.py": 3,
    "aot/test_step_averages.py": 4,
    "aot/test_step_crashes.py": 5,
    "aot/test_step_hooks.py": 6,
    "aot/test_step_hyperparameters.py": 16,
    "aot/test_step_models.py": 2,
    "aot/test_step_modules.py": 12,
    "aot/test_step_optimizers.py": 4,
    "aot/test_step_outside.py": 8,
    "aot/test_step_python.py": 32,
    "aot/test_step_random_loops.py": 4,
    "aot/test_step_safety.py": 4,
    "aot/test_step_state.py": 18,
    "aot/test_step_training.py": 10,
    "aot/test_updates.py": 4,
    "autotune/test_ensemble.py": 2,
    "autotune/test_planted.py": 3,
    "autotune/test_steps.py": 12,
    "bench/test_generation.py": 2,
    "bench/test_planted_backends.py": 4,
    "bench/test_resuming.py": 3,
    "bench/test_suites.py": 2,
    "capture/test_precompile.py": 6,
    "capture/test_warm_up.py": 5,
    "conformance/test_gradients.py": 5,
    "conformance/test_opinfo.py": 20,
    "conformance/test_planted_backends.py": 3,
    "conformance/test_testing.py": 3,
    "generation/test_generate.py": 13,
    "graph/test_canonicalize.py": 2,
    "graph/test_fold.py": 2,
    "inductor/test_backends.py": 2,
    "inductor/test_images.py": 4,
    "inductor/test_reduced.py": 3,
    "inductor/test_stages.py": 3,
    "int8/test_planted.py": 2,
    "int8/test_quantizers.py": 3,
    "iree/test_backend.py": 4,
    "iree/test_models.py": 5,
    "iree/test_trial.py": 2,
    "kernels/test_linears.py": 2,
    "kernels/test_small_channels.py": 17,
    "kernels/test_winograd.py": 14,
    "lazy/test_backends.py": 4,
    "models/test_every_backend.py": 4,
    "models/test_models.py": 6,
    "nvfuser/test_backend.py": 4,
    "nvfuser/test_models.py": 2,
    "nvfuser/test_operators.py": 2,
    "openvino/test_models.py": 4,
    "openvino/test_trial.py": 4,
    "ort/test_errors.py": 2,
    "ort/test_models.py": 3,
    "ort/test_trial.py": 5,
    "package/test_new_process.py": 2,
    "package/test_package.py": 3,
    "runtime/test_arena.py": 3,
    "test_autoload.py": 2,
    "test_compiler_process.py": 5,
    "test_containment.py": 14,
    "test_freezing.py": 17,
    "test_harmless.py": 2,
    "test_picky.py": 2,
    "test_ranges.py": 4,
    "test_ranges_of_vendors.py": 14,
    "test_semantics.py": 10,
    "test_succession.py": 2,
    "test_weight_views.py": 6,
    "torchscript/test_backends.py": 8,
    "training/test_gradients.py": 7,
    "training/test_models.py": 2,
    "training/test_semantics.py": 2,
    "trt/test_cache.py": 2,
    "trt/test_models.py": 2,
    "trt/test_profiles.py": 2,
    "trt/test_semantics.py": 2,
    "tvm/test_measuring.py": 2,
    "tvm/test_models.py": 5,
    "tvm/test_semantics.py": 3,
    "tvm/test_tuning.py": 2,
    "verification/test_planted.py": 6,
    "xla/test_convolution_programs.py": 6,
    "xla/test_device_draws.py": 3,
    "xla/test_lowering_attention.py": 2,
    "xla/test_lowering_convolution.py": 2,
    "xla/test_lowering_indexing.py": 2,
    "xla/test_lowering_linalg.py": 6,
    "xla/test_lowering_matmul.py": 2,
    "xla/test_lowering_normalization.py": 2,
    "xla/test_lowering_pointwise.py": 3,
    "xla/test_lowering_pooling.py": 5,
    "xla/test_lowering_recurrent.py": 5,
    "xla/test_lowering_reduction.py": 5,
    "xla/test_lowering_special.py": 2,
    "xla/test_lowering_upsampling.py": 5,
    "xla/test_mesh_inference.py": 3,
    "xla/test_mesh_steps.py": 9,
    "xla/test_mesh_use.py": 3,
    "xla/test_padded.py": 18,
    "xla/test_padded_images.py": 8,
    "xla/test_ranks_lost.py": 4,
    "xla/test_resident_training.py": 3,
    "xla/test_residents.py": 3,
}
"""`make test` runs one in so many of the parameters of a test in these files, `--full` all.

Tests with the mark `long` do not count: only `--full` runs them. CONTRIBUTING.md says when to use
which.
"""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is marked `long`, and parameters, beginning elsewhere in each test."""
    if config.getoption("--full"):
        return
    left_out = {item for item in items if item.get_closest_marker("long")}
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item in left_out:
            continue
        name, bracket, _ = item.nodeid.removeprefix("tests/").partition("[")
        if bracket and name.partition("::")[0] in SHARES:
            groups.setdefault(name, []).append(item)
    for name, group in groups.items():
        share = SHARES[name.partition("::")[0]]
        first = zlib.crc32(name.encode()) % min(share, len(group))
        left_out |= set(group) - set(group[first::share])
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def only_with_full(pytestconfig: pytest.Config) -> Callable[[bool], None]:
    """Skips the test if it is given True, except with --full."""

    def skip(takes_long: bool) -> None:
        if takes_long and not pytestconfig.getoption("--full"):
            pytest.skip("takes long; run it with --full")

    return skip


@pytest.fixture(autouse=True, scope="session")
def _one_compiler_process() -> Iterator[None]:
    """The process that compiles beside the calls stays: to start it takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(background._worker), "idle_s", 3600.0)
        yield


@pytest.fixture(autouse=True)
def _fresh_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts with seeded random numbers, no compiled code and an empty disk cache.

    Graphs are checked after every pass (see `dynamo_backends.graph.passes`).
    """
    monkeypatch.setenv("DYNAMO_BACKENDS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DYNAMO_BACKENDS_CHECK", "1")
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    background.wait(20)  # what is compiled beside the calls would go to the cache of the next test


class _Alarms(logging.Handler):
    """Collects what verification finds wrong."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "computed a wrong result" in text:
            self.texts.append(text)


@pytest.fixture(autouse=True)
def _no_alarm(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test fails if verification finds a result wrong, for eager's would take its place.

    Tests that plant errors say so by the mark `plants_errors`.
    """
    alarms = _Alarms()
    log = logging.getLogger("dynamo_backends")
    log.addHandler(alarms)
    yield
    log.removeHandler(alarms)
    if request.node.get_closest_marker("plants_errors") is None:
        assert alarms.texts == []
