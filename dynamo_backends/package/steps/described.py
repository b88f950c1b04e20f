"""What a file says of a step besides its weights and executables."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends.aot.step.program.scalars import CONVERSIONS
from dynamo_backends.graph.graph import Graph, Input, Role
from dynamo_backends.graph.position_checks import InputCheck
from dynamo_backends.graph.random import draw
from dynamo_backends.interface.errors import PackageError
from dynamo_backends.package import calls as graphs
from dynamo_backends.package.linking import without_calls
from dynamo_backends.package.spec import Spec

_METHODS = frozenset(("bernoulli_", "exponential_", "normal_", "random_", "uniform_"))


@dataclass(frozen=True)
class Described:
    """A step without its weights and executables.

    Attributes:
        name: Of the function.
        calls: How it is called, for people.
        inputs: Of the graph.
        values: What its inputs are like, then its outputs.
        graph: Its calls, see `calls.to_dict`.
        slots: What lives from step to step, by names for people.
        gradients: How many inputs after these stand for gradients, which it does not read.
        constants: How many tensors the graph owns.
        numbers: Of the optimizers, as they were.
        number_names: What they are called.
        batch: Template of `(args, kwargs)`.
        results: Template of what a call returns.
        states: Templates of the state_dicts of "model" and "optimizer".
        batch_count: How many tensors are in it.
        answers: What the step was told of its numbers.
        drawers: Each draws one tensor of random numbers.
        before: What is checked before a step (see `PositionChecks`).
        flag: Which of its outputs says that positions are out of range.
    """

    name: str
    calls: str
    inputs: tuple[Input, ...]
    values: tuple[Spec, ...]
    graph: Mapping[str, Any]
    slots: tuple[str, ...]
    gradients: int
    constants: int
    numbers: tuple[float, ...]
    number_names: tuple[str, ...]
    batch: Mapping[str, Any]
    batch_count: int
    results: Mapping[str, Any]
    states: Mapping[str, Sequence[Mapping[str, Any]]]
    answers: Mapping[str, Any] | None
    drawers: Sequence[Callable[[], Tensor]]
    before: InputCheck | None = None
    flag: int | None = None

    @classmethod
    def of(cls, manifest: Mapping[str, Any], graph: Mapping[str, Any]) -> "Described":
        """That of a manifest and of the graph beside it.

        Raises:
            PackageError: They do not fit each other.
        """
        step = manifest["step"]
        made = cls(
            manifest["name"], manifest["calls"],
            tuple(Input(name, Role(role), updated_by=by) for name, role, by in step["inputs"]),
            tuple(map(Spec.from_dict, step["values"])), graph, tuple(step["slots"]),
            step["gradients"],
            step["constants"], tuple(value for _, value in step["numbers"]),
            tuple(name for name, _ in step["numbers"]), step["batch"]["template"],
            step["batch"]["tensors"], step["results"],
            {"model": step["models"], "optimizer": step["optimizers"]}, step["answers"],
            tuple(map(_drawer, step["draws"])),
            *graphs.checks_from_dict(step["checks"]),
        )  # fmt: skip
        made._check_counts()
        return made

    def _check_counts(self) -> None:
        inputs, results = len(self.graph["inputs"]), len(self.graph["results"])
        parts = self._first_of_batch + self.batch_count + self.constants + len(self.drawers)
        updates = [x.updated_by for x in self.inputs if x.updated_by is not None]
        right = parts == inputs == len(self.inputs) and inputs + results == len(self.values)
        if not right or updates != list(range(len(updates))) or len(updates) > results:
            raise PackageError("the step's graph and the list of its inputs differ")

    @property
    def living(self) -> list[Spec]:
        """What the tensors are like that live from step to step, then the constants."""
        first, last = 1 + len(self.slots), len(self.inputs) - len(self.drawers)
        return [*self.values[1:first], *self.values[last - self.constants : last]]

    @property
    def batch_specs(self) -> Sequence[Spec]:
        """What the tensors of the batch are like."""
        first = self._first_of_batch
        return self.values[first : first + self.batch_count]

    @property
    def unread(self) -> Sequence[Spec]:
        """What the gradients are like that the graph does not read."""
        return self.values[1 + len(self.slots) : self._first_of_batch]

    @property
    def _first_of_batch(self) -> int:
        return 1 + len(self.slots) + self.gradients

    @property
    def groups(self) -> list[Mapping[str, Any]]:
        """Templates of the groups of all optimizers."""
        found = []
        for node in self.states["optimizer"]:
            ((_, groups),) = dict(node["dict"])["param_groups"].items()
            found += groups
        return found

    @property
    def targets(self) -> list[str]:
        """The operators that the graph calls."""
        prefix = "torch.ops."
        names = (call["target"] for call in self.graph["calls"])
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    def without_calls(self) -> Graph:
        """Returns a graph with inputs and outputs alone."""
        made = [spec.empty() for spec in self.values]
        count = len(self.inputs)
        return without_calls(self.inputs, made[:count], made[count:], "step")

    def whole(self) -> Graph:
        """Returns the graph.

        Raises:
            PackageError: It calls what is no operator, or its results are others than it says.
        """
        from dynamo_backends._torch_private import FakeTensorMode
        from dynamo_backends.graph.propagate import propagate

        module = graphs.module_of(self.graph)
        graph = Graph(module, "step", self.inputs)
        with FakeTensorMode(), torch.no_grad():
            for place, spec in zip(graph.placeholders, self.values, strict=False):
                place.meta["val"] = spec.empty()
            propagate(graph)
        inputs = tuple(
            Input(place.name, x.role, updated_by=x.updated_by)
            for place, x in zip(graph.placeholders, self.inputs, strict=True)
        )
        return Graph(module, "step", inputs)

    def draws(self) -> list[Tensor]:
        """Draws the random numbers of one step.

        Raises:
            PackageError: They are others than the graph reads, as under another default dtype.
        """
        drawn = [draws() for draws in self.drawers]
        specs = self.values[len(self.inputs) - len(drawn) : len(self.inputs)]
        for tensor, spec in zip(drawn, specs, strict=True):
            if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
                raise PackageError(
                    f"random numbers are {tensor.dtype} and were {spec.dtype}; set "
                    "torch.set_default_dtype as it was when the step was saved."
                )
        return drawn

    @functools.cached_property
    def _terms(self) -> Callable[[Sequence[Any]], Sequence[Any]]:
        assert self.answers is not None
        return graphs.from_dict(self.answers["calls"])

    def check(self, numbers: Sequence[float]) -> None:
        """Checks that the step computes with these numbers what the function would.

        Raises:
            PackageError: It was captured for others.
        """
        if self.answers is None:
            return
        terms = self._terms([torch.tensor(numbers, dtype=torch.float64)])
        for term, (convert, value, about) in zip(terms, self.answers["checks"], strict=True):
            if CONVERSIONS[convert](term) != value:
                given = ", ".join(f"{self._number_name(i)} = {numbers[i]}" for i in about)
                raise PackageError(
                    f"with {given} the function computes something else than what was saved (as "
                    "where it asks whether a number is 0). Save a step that was taken with this "
                    "value."
                )

    def _number_name(self, number: int) -> str:
        """Returns what a number is called, for people."""
        names = self.number_names
        return names[number] if number < len(names) else "an argument"


def _drawer(given: Mapping[str, Any]) -> Callable[[], Tensor]:
    nodes: dict[str, fx.Node] = {}
    args = [graphs.decoded(x, nodes) for x in given["args"]]
    kwargs = {key: graphs.decoded(x, nodes) for key, x in given["kwargs"].items()}
    if given["target"] == "draw":
        if args[0] not in _METHODS:
            raise PackageError(f"the step draws by {args[0]!r}, which no file has")
        return lambda: draw(*args, **kwargs)
    target: Callable[..., Tensor] = graphs.target_of(given["target"])
    return lambda: target(*args, **kwargs)
