"""The rule of random graphs: what it allows is what eager gives in some way, and nothing else."""

import pytest
import torch

from dynamo_backends.conformance.rewrites.acceptance import mismatch
from dynamo_backends.conformance.rewrites.eager_variants import make_eager_variants
from dynamo_backends.conformance.rewrites.graphs import Call, Input, RandomGraph

INF, NAN = float("inf"), float("nan")

CANCELLING = [[[1.0, -1.0, 1.0, -1.0], [-1e-20, -1.0, -1.0, -1e-20], [1.0, 1.0, 1e-7, 0.0]]]
ONE = 0.29248095  # log2 of 1 over the standard deviation
LOG_OF_ZERO = [[[ONE, NAN, ONE, NAN], [NAN] * 4, [ONE, ONE, -22.961056, -INF]]]


def verdict(templates, values, wrong):
    """Whether a graph of calls, each of the one before, may give results instead of eager's."""
    x = torch.tensor(values)
    calls = [
        Call(f"v{i}", t, {"x": f"v{i - 1}" if i else "x0", "c": "12582912.0"})
        for i, t in enumerate(templates)
    ]
    graph = RandomGraph((Input("x0", tuple(x.shape), x.dtype),), tuple(calls), (calls[-1].result,))
    return mismatch(graph, {"x0": x}, [torch.tensor(wrong)]) is None


EIGHT = [1.0] * 7
ZEROS = [0.0] * 40
CENTRED = ["{x}.sigmoid()", "{x}.logit()", "{x}.amax()"]
BIG = 1.8e19  # two of its squares are beyond float32, one is not


@pytest.mark.parametrize(
    ("templates", "values", "result", "right"),
    [
        # Eager's vectorized and scalar loops differ, and so do its results.
        (["F.gelu({x})"], [*EIGHT, INF], [*[0.8413447] * 7, INF], True),
        (["F.gelu({x})"], [*EIGHT, INF], [*[0.8413447] * 7, NAN], True),
        (["F.gelu({x})"], [*EIGHT, INF], [*[0.8413447] * 7, 1.0], False),
        (["F.gelu({x})"], [*EIGHT, INF], [*[0.8413447] * 7, -INF], False),
        # The sigmoid of 1e-7 is 0.5 if it is rounded correctly, and eager's is a unit above.
        ([*CENTRED, "{x}.rsqrt()"], [1e-7, *ZEROS], INF, True),
        ([*CENTRED, "{x}.rsqrt()"], [1e-7, *ZEROS], NAN, False),
        ([*CENTRED, "{x}.rsqrt()"], [1e-7, *ZEROS], -1e5, False),
        # Nor need the calls within a function be eager's.
        ([*CENTRED[:2], "{x} * {x}", "{x}.rsqrt()"], [-1e-7], [2.0**24], True),
        ([*CENTRED[:2], "{x} * {x}", "{x}.rsqrt()"], [-1e-7], [2.0**25], False),
        # Inverse functions are computed.
        (["{x}.exp()", "{x}.log()"], [1000.0], [1000.0], False),
        (["{x}.exp()", "{x}.log()"], [-120.0], [-120.0], False),
        (["{x} * {x}", "{x}.sqrt()"], [1e30], [1e30], False),
        (["{x}.norm(dim=0)"], [1e30, 1.0], 1e30, False),
        # Eager's small products round twice, its large ones once.
        (["{x} @ {x}.mT"], [[-INF, 1e30], [1.0, 1e30]], [[INF, -INF], [-INF, INF]], True),
        (["{x} @ {x}.mT"], [[-INF, 1e30], [1.0, 1e30]], [[INF, INF], [INF, INF]], False),
        (["{x} @ {x}.mT"], [[-INF, 1e30], [1.0, 1e30]], [[INF, 1.0], [1.0, INF]], False),
        # The order of summands decides whether a rounding or an infinity comes first.
        (["{x} @ {x}.mT"], [[1e30, -INF], [1e30, 1.0]], [[INF, -INF], [-INF, INF]], True),
        (["{x} @ {x}.mT"], [[1e30, -INF], [1e30, 1.0]], [[INF, INF], [INF, INF]], False),
        (
            ["{x} @ {x}.mT"],
            [[BIG, BIG, BIG], [BIG, BIG, -BIG]],
            [[INF, BIG**2], [BIG**2, INF]],
            True,
        ),
        (["{x} @ {x}.mT"], [[BIG, BIG, BIG], [BIG, BIG, -BIG]], [[INF, 0.0], [0.0, INF]], False),
        (["{x} @ {x}.mT"], [[BIG, BIG, BIG], [BIG, BIG, -BIG]], [[INF, -INF], [-INF, INF]], False),
        (["{x} @ {x}.mT"], [[BIG, BIG, BIG], [BIG, BIG, -BIG]], [[INF, NAN], [NAN, INF]], False),
        (["{x} @ {x}.mT"], [[1.0, 2.0], [3.0, 4.0]], [[5.0, 11.0], [11.0, 25.0]], True),
        (["{x} @ {x}.mT"], [[1.0, 2.0], [3.0, 4.0]], [[5.0, 11.01], [11.0, 25.0]], False),
        (["{x} @ {x}.mT"], [[1.0, 2.0], [3.0, 4.0]], [[5.0, 10.0], [10.0, 25.0]], False),
        # The mean of numbers that cancel is 0, or a rounding of the largest.
        (["F.group_norm({x}, 1)", "{x}.log2()"], CANCELLING, LOG_OF_ZERO, True),
        (["F.group_norm({x}, 1)", "{x}.log2()"], CANCELLING, [[[INF] * 4] * 3], False),
        (["F.group_norm({x}, 1)"], CANCELLING, [[[0.5] * 4] * 3], False),
        # At the border of what there is, eager's move has the kind and the size of the result.
        (["{x}.exp()"], [88.72284], [INF], True),
        (["{x}.exp()"], [88.72284], [-INF], False),
        (["{x}.exp()"], [88.72284], [NAN], False),
        (["{x}.exp()"], [88.7229], [3.4028e38], True),
        (["{x}.exp()"], [88.7229], [1.0], False),
        # Sums and casts have one result.
        (["{x} + {c}", "{x} - {c}"], [10.4], [10.4], False),
        (["{x}.half()", "{x}.float()"], [70000.0], [70000.0], False),
        # Denormal numbers may be zeros, and nothing else.
        (["{x}.log()"], [1e-40], [-INF], True),
        (["{x}.log()"], [1e-40], [-92.10341], True),
        (["{x}.log()"], [1e-40], [-103.97207], False),
        (["{x} / 2.0"], [1e-38], [0.0], True),
    ],
)
def test_what_is_right(templates, values, result, right):
    assert verdict(templates, values, result) is right


@pytest.mark.parametrize(
    ("value", "right"), [(NAN, True), (1e-40, True), (0.0, True), (1e-30, False), (INF, False)]
)
def test_other_paths_may_flush_denormal_numbers(value: float, right: bool):
    # Eager's layer norm of numbers beyond 1e19 is NaN, or 0 by torch's decomposition.
    values = {
        "x0": torch.tensor([[[1e30, 1.0, 1.0, 1.0]]]),
        "x1": torch.tensor([[[1.0, 1.0, 1e-40, 1.0]]]),
    }
    graph = RandomGraph(
        tuple(Input(name, (1, 1, 4), torch.float32) for name in values),
        (
            Call("v0", "F.layer_norm({x}, {x}.shape[-1:])", {"x": "x0"}),
            Call("v1", "torch.hypot({x}, {y})", {"x": "v0", "y": "x1"}),
        ),
        ("v1",),
    )
    result = torch.tensor([[[1.0, 1.0, value, 1.0]]])
    assert (mismatch(graph, values, [result]) is None) is right


@pytest.mark.parametrize("path", make_eager_variants())
def test_other_paths_of_eager_compute_the_same(path):
    def computed():
        moves = [x.transpose(0, 1).reshape(-1), x @ x.mT]
        sums = [x.sum(), x.sum((0, 2)), x.mean(1, True), x.bool().sum(1), x.var((1, 2)), x.std()]
        norms = [torch.layer_norm(x, (4, 5)), torch.group_norm(x, 2), x.norm(dim=1)]
        return [*moves, *sums, *norms, x.softmax(1), x.logsumexp((0, 1)), x.var(2, correction=0)]

    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    with path:
        results = computed()
    torch.testing.assert_close(results, computed())
