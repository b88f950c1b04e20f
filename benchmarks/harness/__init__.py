"""Models, measuring and reporting: what the benchmarks, the demo and the model tests share."""

from dynamo_backends.bench.accuracy import Accuracy, check, compare_outputs
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
from harness.arguments import (
    arguments,
    model_arguments,
    named_models,
    process_arguments,
)
from harness.peak import Products, products_of
from harness.processes import ChildError, free_port, hand_back, result_of_child, run_child
from harness.report import (
    announce,
    environment,
    environment_line,
    format_ratio,
    make_console,
    results_table,
    save_json,
)
from harness.runner import (
    Compiled,
    Result,
    compile_model,
    graph_arguments,
    measure,
    measure_case,
)

__all__ = [
    "SUITES",
    "Accuracy",
    "ChildError",
    "Compiled",
    "ModelCase",
    "Products",
    "Ratio",
    "Result",
    "Timing",
    "announce",
    "arguments",
    "candidates_table",
    "check",
    "compare_outputs",
    "compile_model",
    "environment",
    "environment_line",
    "find_case",
    "find_cases",
    "format_ratio",
    "free_port",
    "geometric_mean",
    "graph_arguments",
    "hand_back",
    "import_torchvision",
    "import_transformers",
    "make_console",
    "measure",
    "measure_case",
    "model_arguments",
    "named_models",
    "peak_rss_bytes",
    "process_arguments",
    "products_of",
    "randomize_weights",
    "reset_peak_rss",
    "result_of_child",
    "results_table",
    "rss_bytes",
    "run_child",
    "save_json",
    "speedup",
    "suite",
    "time_candidates",
]
