"""The option `buckets`: bounds that the user names."""

import itertools
from collections.abc import Mapping
from typing import Any

from dynamo_backends.interface.errors import OptionError


def check_buckets(buckets: Any, backend: str) -> None:
    """Checks the option `buckets`.

    Raises:
        OptionError: Something in it is neither bounds nor says of what they are.
    """
    if not isinstance(buckets, Mapping):
        _check_bounds(buckets, "", backend)
        return
    for name, dims in buckets.items():
        if not isinstance(name, str) or not isinstance(dims, Mapping):
            raise OptionError(
                f"option 'buckets' of {backend} names inputs and their dimensions, such as "
                f"{{'ids': {{1: [16, 32]}}}}, not {{{name!r}: {dims!r}}}."
            )
        for dim, bounds in dims.items():
            if not _is_integer(dim):
                raise OptionError(
                    f"option 'buckets' of {backend}: a dimension of {name!r} is an integer, "
                    f"not {dim!r}."
                )
            _check_bounds(bounds, f" of dimension {dim} of {name!r}", backend)


def _check_bounds(bounds: Any, place: str, backend: str) -> None:
    is_list = isinstance(bounds, list | tuple) and all(_is_integer(b) and b > 0 for b in bounds)
    if not is_list or any(a >= b for a, b in itertools.pairwise(bounds)):
        raise OptionError(
            f"option 'buckets' of {backend}: bounds{place} are a list of positive integers, each "
            f"larger than the one before it, not {bounds!r}."
        )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
