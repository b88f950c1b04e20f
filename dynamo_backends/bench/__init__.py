"""Models, measuring and reporting: what the benchmarks, the demo and the model tests share."""

from dynamo_backends.bench.accuracy import Accuracy, check, compare_outputs
from dynamo_backends.bench.arguments import chosen_cases, model_arguments
from dynamo_backends.bench.processes import (
    ChildError,
    hand_back,
    peak_rss_bytes,
    reset_peak_rss,
    rss_bytes,
    run_child,
)
from dynamo_backends.bench.report import (
    as_record,
    environment,
    environment_line,
    format_ratio,
    make_console,
    results_table,
    save_json,
    summarize,
)
from dynamo_backends.bench.runner import (
    Compiled,
    Result,
    compile_model,
    graph_arguments,
    measure,
    measure_case,
)
from dynamo_backends.bench.statistics import Ratio, Timing, compare, geometric_mean, speedup
from dynamo_backends.bench.suites import SUITES, ModelCase, enliven, find_cases, suite
from dynamo_backends.bench.torchvision_shim import import_torchvision, import_transformers
from dynamo_backends.capture.candidates import candidates_table

__all__ = [
    "SUITES",
    "Accuracy",
    "ChildError",
    "Compiled",
    "ModelCase",
    "Ratio",
    "Result",
    "Timing",
    "as_record",
    "candidates_table",
    "check",
    "chosen_cases",
    "compare",
    "compare_outputs",
    "compile_model",
    "enliven",
    "environment",
    "environment_line",
    "find_cases",
    "format_ratio",
    "geometric_mean",
    "graph_arguments",
    "hand_back",
    "import_torchvision",
    "import_transformers",
    "make_console",
    "measure",
    "measure_case",
    "model_arguments",
    "peak_rss_bytes",
    "reset_peak_rss",
    "results_table",
    "rss_bytes",
    "run_child",
    "save_json",
    "speedup",
    "suite",
    "summarize",
]
