"""A bounded number of random matrix products; tests/random_products.py runs any number."""

import pytest
import torch

from tests import random_products
from tests.rotation import seeds

BOUNDED, FULL = 6, 500


def test_products_are_eagers(pytestconfig: pytest.Config):
    chosen = range(FULL) if pytestconfig.getoption("--full") else seeds(BOUNDED)
    print(f"seeds {chosen}")
    assert random_products.check_in_a_process(chosen, "openxla") == []


def test_expressions_are_products_of_their_inputs():
    for seed in range(200):
        made = random_products.random_product(seed)
        names = [f"x{i}" for i in range(len(made.shapes))]
        inputs = {
            name: torch.empty(shape, device="meta")
            for name, shape in zip(names, made.shapes, strict=True)
        }
        assert eval(made.source, {"torch": torch, **inputs}).numel() > 0, made.source


@pytest.mark.parametrize("end", ["wrong", "crash"])
def test_what_is_wrong_and_what_crashes_is_told(end: str, monkeypatch: pytest.MonkeyPatch):
    """The others of the same process are checked all the same."""
    text = "print('', end='\\0'); print('planted', end='\\0'); print('', end='\\0')"
    crash = "import os; print('', end='\\0', flush=True); os.abort()"
    rest = "print('', end='\\0')"
    programs = iter([text] if end == "wrong" else [crash, rest])
    run = random_products.subprocess.run
    monkeypatch.setattr(
        random_products.subprocess,
        "run",
        lambda command, **kw: run([command[0], "-c", next(programs)], **kw),
    )
    (found,) = random_products.check_in_a_process([3, 5, 8], "openxla")
    assert found.startswith("seed 5: ")
    assert ("planted" if end == "wrong" else "signal 6") in found
