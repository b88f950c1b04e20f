"""The rule itself, on results that are given."""

import pytest
import torch

from dynamo_backends.verify.comparator import describe_difference
from dynamo_backends.verify.first_call import Comparison
from tests.verification.test_doubt import traced

INF, NAN = torch.inf, torch.nan


@pytest.mark.parametrize(
    ("eager", "result", "precise", "wrong"),
    [
        ([1.0, INF, -INF], [1.0, INF, -INF], [1.0, INF, -INF], None),
        ([1.0, INF, INF], [1.0, -INF, INF], [1.0, INF, INF], "infinities of the other sign"),
        ([1.0, INF, 2.0], [1.0, 3.0, 2.0], [1.0, INF, 2.0], "infinities where eager has not"),
        ([1.0, NAN, NAN], [1.0, 2.0, NAN], [1.0, NAN, NAN], "NaN where eager has not"),
        ([1.0, NAN, NAN], [1.0, 2.0, NAN], [1.0, 2.0, NAN], None),  # better than eager
        ([1.0, NAN], [1.5, NAN], [1.0, NAN], "by up to 5.000e-01"),
        ([1.1, NAN], [1.0, NAN], [1.0, NAN], None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number(
    eager: list[float],
    result: list[float],
    precise: list[float],
    wrong: str | None,
    dtype: torch.dtype,
):
    e, r = torch.tensor(eager, dtype=dtype), torch.tensor(result, dtype=dtype)
    found = describe_difference([e], [r], [torch.tensor(precise, dtype=torch.float64)])
    assert found is None if wrong is None else found is not None and wrong in found, found


def test_an_infinity_of_the_other_sign_is_wrong_in_a_first_call():
    x = torch.tensor([0.0, 0.0, 1.0, 2.0])
    graph = traced(lambda x: (1 / x,), x)
    assert Comparison(graph)(lambda: [1 / x], (x,)).wrong == ""
    found = Comparison(graph)(lambda: [torch.tensor([-INF, INF, 1.0, 0.5])], (x,)).wrong
    assert found == "output 0 has infinities of the other sign than eager's"


def test_the_reference_is_computed_where_it_is_needed_alone():
    asked: list[int] = []

    def precise() -> list[torch.Tensor]:
        asked.append(1)
        return [x.double(), x.double(), x.double()]

    x = torch.ones(3)
    assert describe_difference([x, x, x], [x, x + 1e-6, x], precise) is None
    assert asked == []
    assert describe_difference([x, x, x], [x + 1, x, x], precise) is not None
    assert asked == [1]
