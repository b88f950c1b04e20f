"""A quantized block serves nobody before its proof has passed."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from dynamo_backends import CompileError
from dynamo_backends.graph.graph import Graph, Input, Role
from dynamo_backends.int8.executable import (
    STATE,
    Activations,
    QuantizedExecutable,
    left_in_float,
    quantizing_for_proof,
    recording,
)
from dynamo_backends.interface.executable import Bound


class Off(QuantizedExecutable):
    """Adds one to what is right, so that it is seen who computes."""

    seen: Any = ()

    def prepare(self, weights: Sequence[Tensor], seen: Activations, in_float: float) -> Bound:
        self.seen = list(seen)
        return lambda activations: [activations[0] * weights[0] + 1]


@pytest.fixture
def executable() -> Off:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    product = graph.call_function(torch.ops.aten.mul.Tensor, (x, w))
    for node in (x, w, product):
        node.meta["val"] = torch.empty(2)
    graph.output((product,))
    inputs = Input("x", Role.ACTIVATION), Input("w", Role.PARAMETER, frozen=True)
    return Off(Graph(fx.GraphModule({}, graph), "inference", inputs))


@pytest.mark.parametrize(
    ("part", "products", "left"), [(0.0, 9, 0), (0.1, 1, 0), (0.1, 2, 1), (0.25, 50, 13), (1, 3, 2)]
)
def test_a_product_is_quantized_in_any_case(part: float, products: int, left: int):
    assert left_in_float(part, products) == left


X, W = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
EAGER, QUANTIZED = X * W, X * W + 1


def test_it_runs_in_eager_until_it_is_proven(executable: Off):
    run, copied = executable.bind([W])
    assert list(copied) == [0]
    STATE.met_unproven = False
    assert torch.equal(run([X])[0], EAGER)
    assert STATE.met_unproven
    with recording():
        assert torch.equal(run([X])[0], EAGER)
    others: list[Tensor] = []
    with quantizing_for_proof() as proof:
        assert torch.equal(run([X])[0], QUANTIZED)
        assert [[len(a) for a in call] for call in executable.seen] == [[2]]
        thread = threading.Thread(target=lambda: others.extend(run([X])))
        thread.start()
        thread.join()
        assert torch.equal(others[0], EAGER), "another thread got what is not proven"
        proof.passed = True
    assert torch.equal(run([X])[0], QUANTIZED)


def test_what_did_not_pass_is_not_used(executable: Off):
    run, _ = executable.bind([W])
    with recording():
        run([X])
    with quantizing_for_proof():
        assert torch.equal(run([X])[0], QUANTIZED)
    assert torch.equal(run([X])[0], EAGER)


def test_other_weights_are_proven_for_themselves(executable: Off):
    first, second = (executable.bind([w])[0] for w in (W, W * 2))
    with recording():
        first([X])
    with quantizing_for_proof() as proof:
        first([X])
        proof.passed = True
    assert torch.equal(first([X])[0], QUANTIZED)
    assert torch.equal(second([X])[0], X * W * 2)


def test_a_new_recording_makes_the_program_unproven(executable: Off):
    run, _ = executable.bind([W])
    with recording():
        run([X])
        run([X])
    with quantizing_for_proof() as proof:
        run([X])
        proof.passed = True
    with recording():
        run([X])
    assert torch.equal(run([X])[0], EAGER)
    with quantizing_for_proof() as proof:
        run([X])
        proof.passed = True
    assert len(executable.seen) == 1, "batches of the recording before"
    assert torch.equal(run([X])[0], QUANTIZED)


def test_a_proof_needs_a_recording(executable: Off):
    run, _ = executable.bind([W])
    with quantizing_for_proof(), pytest.raises(CompileError, match="before it was calibrated"):
        run([X])
