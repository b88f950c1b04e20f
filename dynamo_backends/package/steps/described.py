"""Describes a step in a file, besides its weights and executables."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.aot.step.program.scalars import CONVERSIONS
from dynamo_backends.graph.graph import Graph, Input, Role
from dynamo_backends.graph.index_checks import InputCheck
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.errors import PackageError, SaveError
from dynamo_backends.interface.options import Options
from dynamo_backends.package import calls as graphs
from dynamo_backends.package.assembling import backend_of
from dynamo_backends.package.linking import make_signature_graph
from dynamo_backends.package.portable import module_of
from dynamo_backends.package.spec import Spec
from dynamo_backends.package.structure import decoded

_CALL_BY_CALL = ("eager", "aot_eager")


def inner_of(name: str) -> Backend | None:
    """Looks up the backend of a saved step; None: the graph runs call by call.

    Raises:
        SaveError: Its steps have more than a graph.
        UnknownBackendError: There is none.
    """
    if name in _CALL_BY_CALL:
        return None
    if name == "autotune":
        raise SaveError(
            f"steps of {name} cannot be saved, because they have more than one program. Compile "
            'the step with backend="openxla", "inductor" or "aot_eager".'
        )
    return backend_of(name)


def parsed(backend: Backend, options: Mapping[str, Any]) -> Options:
    """Returns the options of a manifest."""
    return backend.Options.parse(decoded(options), backend.name)


@dataclass(frozen=True)
class Described:
    """A step without its weights and executables.

    Attributes:
        name: Name of the function.
        calls: How it is called, for people.
        inputs: Inputs of the graph.
        values: What its inputs are like, then its outputs.
        graph: See `portable.to_dict`.
        slots: What lives from step to step, by names for people.
        gradients: How many inputs after these stand for gradients, which it does not read.
        constants: How many tensors the graph owns.
        numbers: Numbers of the optimizers, as they were.
        number_names: What they are called.
        batch: Template of `(args, kwargs)`.
        results: Template of what a call returns.
        states: Templates of the state_dicts of "model" and "optimizer".
        batch_count: How many tensors are in it.
        answers: What the step was told of its numbers.
        drawers: Each draws one tensor of random numbers, of no inputs.
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
    drawers: Sequence[Callable[[Sequence[Any]], Sequence[Any]]]
    before: InputCheck | None = None
    flag: int | None = None

    @classmethod
    def of(cls, manifest: Mapping[str, Any], graph: Mapping[str, Any]) -> "Described":
        """Reads the description from a manifest and the graph beside it.

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
            tuple(map(graphs.deserialize_callable, step["draws"])),
            *graphs.checks_from_dict(step["checks"]),
        )  # fmt: skip
        made._check_counts()
        return made

    def _check_counts(self) -> None:
        graph = self.graph["graph_module"]["graph"]
        inputs, results = len(graph["inputs"]), len(graph["outputs"])
        parts = self._first_of_batch + self.batch_count + self.constants + len(self.drawers)
        updates = [x.updated_by for x in self.inputs if x.updated_by is not None]
        right = parts == inputs == len(self.inputs) and inputs + results == len(self.values)
        if not right or updates != list(range(len(updates))) or len(updates) > results:
            raise PackageError("the graph of the step and the list of its inputs do not match")

    @property
    def living(self) -> list[Spec]:
        """Returns what the tensors are like that live from step to step, then the constants."""
        first, last = 1 + len(self.slots), len(self.inputs) - len(self.drawers)
        return [*self.values[1:first], *self.values[last - self.constants : last]]

    @property
    def batch_specs(self) -> Sequence[Spec]:
        """Returns what the tensors of the batch are like."""
        first = self._first_of_batch
        return self.values[first : first + self.batch_count]

    @property
    def unread(self) -> Sequence[Spec]:
        """Returns what the gradients are like that the graph does not read."""
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
        names = (node["target"] for node in self.graph["graph_module"]["graph"]["nodes"])
        return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]

    def without_calls(self) -> Graph:
        """Returns a graph with inputs and outputs alone."""
        made = [spec.empty() for spec in self.values]
        count = len(self.inputs)
        return make_signature_graph(self.inputs, made[:count], made[count:], "step")

    def whole(self) -> Graph:
        """Returns the whole graph of the step.

        Raises:
            PackageError: It calls what is no operator, or its results are others than it says.
        """
        module = module_of(self.graph)
        places = module.graph.find_nodes(op="placeholder")
        inputs = tuple(
            Input(place.name, x.role, updated_by=x.updated_by)
            for place, x in zip(places, self.inputs, strict=True)
        )
        return Graph(module, "step", inputs)

    def draws(self) -> list[Tensor]:
        """Draws the random numbers of one step.

        Raises:
            PackageError: They are others than the graph reads, as under another default dtype.
        """
        drawn = [tensor for draws in self.drawers for tensor in draws(())]
        specs = self.values[len(self.inputs) - len(drawn) : len(self.inputs)]
        for tensor, spec in zip(drawn, specs, strict=True):
            if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
                raise PackageError(
                    f"random numbers have dtype {tensor.dtype}, but the step was saved with "
                    f"{spec.dtype}. Set torch.set_default_dtype as it was when the step was saved."
                )
        return drawn

    @functools.cached_property
    def _terms(self) -> Callable[[Sequence[Any]], Sequence[Any]]:
        assert self.answers is not None
        return graphs.deserialize_callable(self.answers["calls"])

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
                    f"with {given} the saved function takes a different branch (for example, "
                    "because it checks whether a number is 0). Save a step that was called with "
                    "this value."
                )

    def _number_name(self, number: int) -> str:
        """Returns what a number is called, for people."""
        names = self.number_names
        return names[number] if number < len(names) else "an argument"
