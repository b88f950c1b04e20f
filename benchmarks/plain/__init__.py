"""What benchmarks share with environments that have another torch: it needs nothing but torch."""

from plain.networks import Encoder, Network, networks
from plain.ways import (
    CALLS,
    NoSuchNetworkError,
    Way,
    chosen,
    facts,
    markdown,
    measure,
    parser,
    typed,
    wrong_ways,
)

__all__ = [
    "CALLS",
    "Encoder",
    "Network",
    "NoSuchNetworkError",
    "Way",
    "chosen",
    "facts",
    "markdown",
    "measure",
    "networks",
    "parser",
    "typed",
    "wrong_ways",
]
