"""PyTorch's operator database: its operators, and what is to know of some."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dynamo_backends._torch_private.testing import OpInfo, op_db
from dynamo_backends.conformance import outcomes

DTYPES = tuple(getattr(torch, name) for name in outcomes.DTYPES)
"""Of samples."""

EXTREME_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
)
"""Of inputs that can hold extremes."""

DIVISIONS = {"div", "floor_divide", "fmod", "remainder", "__rmod__", "__rdiv__", "true_divide",
             "divide", "gcd", "lcm", "unravel_index"}  # fmt: skip

# Of NaN and infinities they give whatever the processor does.
TO_INTEGERS = {"byte", "char", "int", "long", "short"}

# Which of two zeros these choose is open.
CHOICES = {"clamp", "clamp_max", "clamp_min", "fmax", "fmin", "maximum", "minimum", "max", "min",
           "nn.functional.hardtanh", "nn.functional.relu", "nn.functional.relu6",
           "nn.functional.threshold"}  # fmt: skip

# Eager itself ends the process when they are given extremes.
FRAGILE = {"linalg.eigvals", "linalg.ldl_solve", "nn.functional.ctc_loss"}

# Their results are memory that nobody wrote: only shape and dtype can be compared.
UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty",
                 "new_empty_strided", "resize_", "resize_as_"}  # fmt: skip

# Eager does not look whether positions are within the dimension; if not, anything may happen.
UNCHECKED = {"_segment_reduce", "_unsafe_masked_index", "_unsafe_masked_index_put_accumulate"}

# Eager itself differs from call to call or is undefined on these samples.
UNDEFINED = {
    "jiterator_unary": "runs on CUDA only",
    "jiterator_binary": "runs on CUDA only",
    "jiterator_4inputs_with_extra_args": "runs on CUDA only",
    "jiterator_binary_return_by_ref": "runs on CUDA only",
    "jiterator_2inputs_2outputs": "runs on CUDA only",
}


# Which of several equal elements these name is open; what counts is the element's value.
INDICES_ALONG = {
    "argsort": 0,
    "kthvalue": 1,
    "mode": 0,
    "sort": 0,
    "topk": 1,
}
"""Position of `dim` among the arguments after the input."""


def cases(dtypes: Sequence[torch.dtype] = DTYPES) -> Iterator[tuple[OpInfo, torch.dtype]]:
    """Yields every operator of the database with every dtype that it has on the CPU."""
    for op in op_db:
        if op.name in UNDEFINED:
            continue
        for dtype in dtypes:
            if dtype in op.supported_dtypes("cpu"):
                yield op, dtype


def full_name(op: OpInfo) -> str:
    """Returns the name with that of the variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def find(name: str) -> OpInfo:
    """Returns the operator of a full name.

    Raises:
        KeyError: There is none.
    """
    for op in op_db:
        if full_name(op) == name:
            return op
    raise KeyError(name)


def choose(samples: list[Any], limit: int | None) -> list[Any]:
    """Returns some of the samples, spread over all of them."""
    step = -(-len(samples) // limit) if limit and samples else 1
    return samples[::step]


def takes_extremes(op: OpInfo, dtype: torch.dtype) -> bool:
    """Returns whether extremes can be put into an operator's samples."""
    if op.name in FRAGILE:
        return False
    return not (dtype.is_floating_point and op.name in TO_INTEGERS)


def divides(op: OpInfo) -> bool:
    """Returns whether an operator divides integers."""
    return op.name in DIVISIONS


def with_ascending_bounds(op: OpInfo, sample: Any) -> Any:
    """Sorts the boundaries of a bucketize or searchsorted sample, in place."""
    if op.name == "bucketize":
        bounds, *others = sample.args
        sample.args = (bounds.sort().values, *others)
    elif op.name == "searchsorted":
        if sample.kwargs.get("sorter") is None:
            sample.input = sample.input.sort().values
        else:
            sample.kwargs = {**sample.kwargs, "sorter": sample.input.argsort()}
    return sample


def name_of(dtype: torch.dtype) -> str:
    """As tables have it, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def describe(sample: Any) -> str:
    """Returns a sample in at most 300 characters."""
    text = str(sample.summary()).replace("\n", " ")
    return text if len(text) < 300 else text[:300] + "..."
