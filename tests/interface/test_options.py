"""Options that are numbers have to be finite, in every backend."""

import dataclasses
import math
import typing
from typing import Any

import pytest

from dynamo_backends import OptionError, get_backend, list_backends
from dynamo_backends.interface.options import _matches


def numbers() -> list[tuple[str, str]]:
    """Backends and their options that may be floats."""
    found = []
    for name in list_backends():
        options: Any = get_backend(name).Options
        hints = typing.get_type_hints(options)
        found += [
            (name, f.name) for f in dataclasses.fields(options) if _matches(1.5, hints[f.name])
        ]
    return found


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_option_is_infinite_or_nan(value: float):
    known = numbers()
    assert {("openxla", "bucket_growth"), ("autotune", "budget_s"), ("tvm", "tune_budget_s")} <= {
        *known
    }
    for backend, option in known:
        with pytest.raises(OptionError, match="must be"):
            get_backend(backend).Options.parse({option: value}, backend)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nothing_inside_of_an_option_is(value: float):
    for given in ((16, value), {"x": {1: (16, value)}}):
        with pytest.raises(OptionError, match="'buckets' of openxla must be"):
            get_backend("openxla").Options.parse({"buckets": given}, "openxla")


def test_whole_numbers_are_numbers():
    assert get_backend("tvm").Options.parse({"tune_budget_s": 60}, "tvm").tune_budget_s == 60


def test_an_option_of_the_version_before_is_ignored_with_a_warning():
    with pytest.warns(
        DeprecationWarning, match="'specialize' of onnxrt is deprecated and has no effect"
    ):
        options = get_backend("onnxrt").Options.parse({"specialize": True}, "onnxrt")
    assert options == get_backend("onnxrt").Options()
