"""Defines checks of a backend and their possible outcomes."""

import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

Group = Literal["operators", "gradients", "semantics", "weights", "traffic", "models", "rewrites"]
GROUPS: tuple[Group, ...] = get_args(Group)

DTYPES = ("float32", "bfloat16", "float64", "int64", "bool", "complex64")
"""Of operators' inputs."""

Status = Literal[
    "native",
    "fallback",
    "random",
    "declared",
    "torch",
    "no samples",
    "wrong",
    "raises",
    "crash",
    "timeout",
]
STATUSES: tuple[Status, ...] = get_args(Status)

FAILURES: frozenset[Status] = frozenset({"wrong", "raises", "crash", "timeout"})
"""What a backend does wrong."""

UNTRIED: frozenset[Status] = frozenset({"torch", "no samples"})
"""Of these nothing can be said of the backend."""

MEANINGS: Mapping[Status, str] = {
    "native": "correct, and no operator is known to have run in eager",
    "fallback": "correct, but a part ran in eager or torch captured several graphs",
    "random": "correct except for random numbers, which the backend generates itself",
    "declared": "differs as documented in docs/differences.md",
    "torch": "torch.compile also fails with `aot_eager`, so the backend was not checked",
    "no samples": "eager accepts no sample input, or a package is missing",
    "wrong": "the result differs from eager's",
    "raises": "an error was raised, but eager returns a result",
    "crash": "the process crashed",
    "timeout": "did not finish within the time limit",
}


class Check(NamedTuple):
    """One thing to check.

    Attributes:
        group: Where it belongs.
        name: Name of an operator, a model or a rule; unique within the group and dtype.
        dtype: Dtype of the operator's inputs; empty elsewhere.
    """

    group: Group
    name: str
    dtype: str = ""

    def __str__(self) -> str:
        """As progress, pages and tests name it."""
        return f"{self.group}/{self.name}" + (f"-{self.dtype}" if self.dtype else "")


@dataclass
class Outcome:
    """The outcome of one check.

    Attributes:
        name: Name of the check.
        dtype: Dtype of the sample inputs of an operator.
        samples: How many were run.
        status: One of `STATUSES`; `MEANINGS` explains them.
        reasons: Why parts ran in eager, counted; or what was wrong.
        declared: What docs/differences.md calls the differences.
        group: Group of the check.
        seconds: That it took.
        example: A program that shows the failure of a random graph.
    """

    name: str
    dtype: str = ""
    samples: int = 0
    status: Status = "no samples"
    reasons: Counter[str] = field(default_factory=Counter)
    declared: list[str] = field(default_factory=list)
    group: Group = "operators"
    seconds: float = 0.0
    example: str = ""

    @property
    def check(self) -> Check:
        """Returns what it is the outcome of."""
        return Check(self.group, self.name, self.dtype)

    @property
    def failed(self) -> bool:
        """Returns whether the backend did something wrong."""
        return self.status in FAILURES

    @property
    def reason(self) -> str:
        """The first thing to say of it; empty: nothing."""
        return next(iter(self.reasons), "")

    def settle(self) -> None:
        """Sets the status of what is not wrong."""
        if self.status != "random":
            right: Status = "fallback" if self.reasons else "native"
            self.status = "declared" if self.declared else right

    def fail(self, status: Status, reason: str) -> "Outcome":
        """Sets a status and the one reason for it; returns itself."""
        self.status = status
        self.reasons = Counter({reason: 1})
        return self

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields with a value, for JSON."""
        found = {**vars(self), "reasons": dict(self.reasons)}
        return {name: value for name, value in found.items() if value or name == "status"}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "Outcome":
        """Returns the reverse of `to_dict`.

        Raises:
            TypeError: It is not the dict of an outcome.
            ValueError: Its status is none.
        """
        if given.get("status") not in STATUSES:
            raise ValueError(f"{given.get('status')!r} is not a valid status")
        return cls(**{**given, "reasons": Counter(given.get("reasons", {}))})


def new_outcome(check: Check) -> Outcome:
    """Creates the outcome of a check that has not run yet."""
    return Outcome(check.name, check.dtype, group=check.group)


def how_it_ended(exit_code: int) -> str:
    """Describes a process's exit code or signal in words."""
    if exit_code < 0:
        return f"the process died of {signal.Signals(-exit_code).name}"
    return f"the process ended with exit code {exit_code}"
