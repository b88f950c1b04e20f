"""What is known of candidates before anything is compiled: who is fast for which graph."""

from dynamo_backends.autotune.priors.described import Described
from dynamo_backends.autotune.priors.graph import graph_features
from dynamo_backends.autotune.priors.machine import machine_features
from dynamo_backends.autotune.priors.prior import Expectation, Prior, shipped

__all__ = [
    "Described",
    "Expectation",
    "Prior",
    "graph_features",
    "machine_features",
    "shipped",
]
