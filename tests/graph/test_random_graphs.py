"""A bounded number of random programs; tests/graph/random_graphs.py runs as many as asked for."""

import pytest

from tests.graph.random_graphs import SEED, run_many


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of programs that eager runs
def test_every_pass_keeps_eagers_bits():
    run_many(60, SEED)
