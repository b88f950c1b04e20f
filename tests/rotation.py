"""Which share of the tests a run without `--full` has; it moves on with every commit.

The rotation is a number: the count of commits of this checkout, or what `--rotation N` says. Of
tests with many parameters, and of those marked `long`, each run has one in so many, so that all of
them have run after that many commits, and runs of one commit have the same. pytest's header shows
the number; `make test ARGS="--rotation N"` repeats a run. Tests that draw random programs take
their seeds from it, too. PyTorch's operator database, of 40,000 checks, has longer turns of its own
(tests/conformance).
"""

import functools
import os
import subprocess
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

COMMITS = 20
"""Commits after which each parameter, and each test marked `long`, has run."""

SHARES = {
    "aot/record/test_backends.py": 4,
    "aot/record/test_checkpoints.py": 6,
    "aot/record/test_field_closures.py": 6,
    "aot/record/test_field_objects.py": 6,
    "aot/record/test_field_results.py": 6,
    "aot/record/test_functions.py": 3,
    "aot/record/test_hooks.py": 4,
    "aot/record/test_nested_hooks.py": 5,
    "aot/record/test_nodes.py": 5,
    "aot/record/test_python_state.py": 6,
    "aot/record/test_training.py": 6,
    "aot/test_step_aliases.py": 3,
    "aot/test_step_averages.py": 4,
    "aot/test_step_crashes.py": 5,
    "aot/test_step_checks.py": 8,
    "aot/test_step_dtypes.py": 6,
    "aot/test_step_hooks.py": 6,
    "aot/test_step_hyperparameters.py": 16,
    "aot/test_step_memory.py": 4,
    "aot/test_step_models.py": 2,
    "aot/test_step_modules.py": 12,
    "aot/test_step_optimizers.py": 4,
    "aot/test_step_outside.py": 8,
    "aot/test_step_python.py": 20,
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
    "conformance/test_planted_backends.py": 3,
    "conformance/test_testing.py": 3,
    "generation/test_generate.py": 13,
    "graph/test_canonicalize.py": 2,
    "graph/test_fold.py": 2,
    "inductor/test_backends.py": 2,
    "inductor/test_images.py": 4,
    "inductor/test_narrow_integers.py": 6,
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
    "models/test_lengths.py": 4,
    "models/test_memory.py": 6,
    "models/test_models.py": 6,
    "nvfuser/test_backend.py": 4,
    "nvfuser/test_models.py": 2,
    "nvfuser/test_operators.py": 2,
    "openvino/test_models.py": 4,
    "openvino/test_trial.py": 4,
    "ort/test_errors.py": 2,
    "ort/test_models.py": 3,
    "ort/test_trial.py": 5,
    "package/test_inductor.py": 2,
    "package/test_new_process.py": 2,
    "package/test_package.py": 3,
    "test_autoload.py": 2,
    "test_compiler_process.py": 5,
    "test_containment.py": 14,
    "test_freezing.py": 17,
    "test_harmless.py": 2,
    "test_picky.py": 2,
    "test_positions.py": 18,
    "test_ranges.py": 4,
    "test_ranges_of_vendors.py": 14,
    "test_regions.py": 6,
    "test_semantics.py": 10,
    "test_shared_programs.py": 2,
    "test_size_arithmetic.py": 16,
    "test_weight_views.py": 6,
    "torchscript/test_backends.py": 8,
    "training/test_gradients.py": 7,
    "training/test_masked_gradients.py": 8,
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
"""Files of whose parameters one in so many runs at each commit; at most `COMMITS`."""

VARIABLE = "DYNAMO_BACKENDS_TEST_ROTATION"


@functools.cache
def rotation() -> int:
    """The rotation of this run, here and in the processes that share its work."""
    if (given := os.environ.get(VARIABLE)) is not None:
        return int(given)
    command = ["git", "rev-list", "--count", "HEAD"]
    try:
        count = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
        return int(count.stdout)
    except (OSError, subprocess.CalledProcessError):
        return int(time.time() // 86400)  # not a checkout: moves on with every day


def is_in(name: str, share: int) -> bool:
    """Whether this rotation has what is called `name`, of which each has one in `share`."""
    return (zlib.crc32(name.encode()) + rotation()) % share == 0


def seeds(count: int) -> range:
    """Seeds of random programs, others at each rotation."""
    return range(rotation() * count, (rotation() + 1) * count)


def part(count: int, share: int) -> range:
    """One in `share` of the numbers below `count`, others at each rotation."""
    return range(rotation() % share, count, share)


def long_if(long: bool, *values: Any, **settings: Any) -> Any:
    """A parameter that one run in `COMMITS` has if it takes long; see `pytest.param`."""
    return pytest.param(*values, marks=pytest.mark.long if long else (), **settings)


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Tests that another rotation runs."""
    left_out = set()
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        name, bracket, _ = item.nodeid.removeprefix("tests/").partition("[")
        if item.get_closest_marker("long"):
            if not is_in(item.nodeid, COMMITS):
                left_out.add(item)
        elif bracket and name.partition("::")[0] in SHARES:
            groups.setdefault(name, []).append(item)
    for name, group in groups.items():
        share = min(SHARES[name.partition("::")[0]], len(group))
        first = (zlib.crc32(name.encode()) + rotation()) % share
        left_out |= set(group) - set(group[first::share])
    return left_out
