"""Models, measuring and reporting: what the benchmarks, the demo and the model tests share."""

from dynamo_backends.bench.accuracy import Accuracy, check, compare_outputs
from dynamo_backends.bench.environment import environment, environment_line
from dynamo_backends.bench.statistics import geometric_mean, time_candidates
from dynamo_backends.bench.suites import (
    SUITES,
    ModelCase,
    find_case,
    find_cases,
    randomize_weights,
    suite,
)
from dynamo_backends.bench.torchvision_shim import import_torchvision, import_transformers
from dynamo_backends.capture.rendering import candidates_table
from dynamo_backends.workers.memory import peak_rss_bytes, reset_peak_rss, rss_bytes
from dynamo_backends.workers.statistics import Ratio, Timing, speedup
from harness.arguments import arguments, model_arguments, named_models
from harness.kept import Kept
from harness.peak import Products, products_of
from harness.processes import (
    ChildError,
    caches_in,
    call_apart,
    free_port,
    hand_back,
    result_apart,
    run_child,
)
from harness.report import (
    announce,
    format_ratio,
    make_console,
    refused,
    report,
    results_table,
    save_json,
    table,
)
from harness.runner import Compiled, Result, compile_model, measure
