"""Defines the step that `load_step` returns."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dynamo_backends._torch_private import is_autocast_on, without_autocast
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.aot.step.program.record_program import TRACING, SentNumbers
from dynamo_backends.interface.errors import PackageError
from dynamo_backends.interface.executable import StepProgram
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.package.machine import package_summary
from dynamo_backends.package.spec import Spec
from dynamo_backends.package.steps.described import Described
from dynamo_backends.package.structure import NUMBER, OUTPUT, TENSOR, Found, decoded, match_leaves
from dynamo_backends.runtime.index_checks import InputBoundsCheck

if TYPE_CHECKING:
    from dynamo_backends.capture.explanation import Explanation


OUT_OF_RANGE = (
    "an index or class label in the arguments is out of range; parameters and optimizer state are "
    "unchanged"
)


class LoadedStep:
    """A training step from a file, with its own parameters, buffers and optimizer state.

    Call it as the step was called when it was saved: each call trains by one batch. Several threads
    may; steps are taken one after the other.

    Args:
        described: What the file says.
        tensors: What lives from step to step, and the graph's constants.
        report: What became of the graph.
        notes: What else one should know of it, in sentences.

    Attributes:
        program: Takes the steps.
        backend: Name of the backend that runs it.
        notes: The same.
        reports: That report.
        machine: Versions and machine of the process that saved it.
    """

    def __init__(
        self,
        described: Described,
        tensors: Sequence[Tensor],
        report: GraphReport,
        notes: Sequence[str] = (),
    ):
        self.backend = report.backend
        self.reports = (report,)
        self.notes = tuple(notes)
        self.machine: Mapping[str, Any] = {}
        self.program: StepProgram
        self._described = described
        count = len(described.slots)
        self._tensors, self._constants = list(tensors[:count]), list(tensors[count:])
        self._unread = [spec.empty().zero_() for spec in described.unread]
        self._numbers = list(described.numbers)
        self._sent = SentNumbers(torch.device(described.values[0].device))
        self._holding: list[float] | None = None
        self._lock = fork_safe_lock()
        before, flag = described.before, described.flag
        updates = sum(x.updated_by is not None for x in described.inputs)
        self._outside = None if before is None else InputBoundsCheck(before)
        self._flag = None if flag is None else flag - updates

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuses copies and pickles.

        Raises:
            TypeError: Always; the message says what to do.
        """
        raise TypeError(
            "a loaded training step cannot be copied or pickled, because its state is in the "
            "runtime's memory. Load the package again with dynamo_backends.load_step, and call "
            "load_state_dict(step.state_dict()) on the new step."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Trains by one batch.

        Returns:
            What the function returned; mappings are dicts, named tuples are tuples.

        Raises:
            PackageError: The arguments are others than the step was saved for, or a number has a
                value for which the step would have to be captured anew. Nothing has changed then.
            IndexError: A position or a class is out of range. Nothing has changed then.
            StepCaptureError: XLA has failed in the middle of a step; load the last state.
        """
        with self._lock:
            if is_autocast_on():
                with without_autocast():
                    return self._step(args, kwargs)
            return self._step(args, kwargs)

    def _step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        described = self._described
        batch, floats = self._arguments(args, kwargs)
        numbers = [*self._numbers, *floats]
        if numbers != self._holding:
            described.check(numbers)
            self._holding = numbers
        inputs = [self._sent(numbers), *self._tensors, *self._unread, *batch]
        if self._outside is not None and self._outside(inputs):
            raise IndexError(OUT_OF_RANGE)
        with TRACING:  # which moves torch's generator, and puts it back
            draws = described.draws()
        inputs += [*self._constants, *draws]
        taken: list[Any] = []
        self.program(inputs, taken)
        outputs = self.program.outputs(taken)
        if self._flag is not None and outputs[self._flag]:
            raise IndexError(OUT_OF_RANGE)
        sources: dict[str, Callable[[int], Any]] = {
            OUTPUT: lambda i: outputs[i].detach(),
            TENSOR: lambda i: self._tensors[i].clone(),
            NUMBER: numbers.__getitem__,
        }
        return decoded(described.results, lambda kind, i: sources[kind](i))

    def _arguments(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[list[Tensor], list[float]]:
        described = self._described
        try:
            found = list(match_leaves(described.batch, (args, dict(kwargs)), "arguments"))
            tensors = [_laid_out(found_, described.batch_specs) for found_ in _of(TENSOR, found)]
            floats = [_float(*found_) for found_ in _of(NUMBER, found)]
        except PackageError as error:
            reason = str(error).removesuffix(".")
            text = f"{reason}. The step was saved for calls with ({described.calls})."
            raise PackageError(text) from error
        return tensors, floats

    @property
    def param_groups(self) -> list[MutableMapping[str, Any]]:
        """The groups of all optimizers, without their parameters.

        Set numbers as in `Optimizer.param_groups`: `step.param_groups[0]["lr"] = 0.01`. What is no
        number stays what it was when the step was saved.
        """
        return [
            _Group(self, node, f"param_groups[{i}]")
            for i, node in enumerate(self._described.groups)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of all state: `{"model": ..., "optimizer": ...}`.

        Each is what `state_dict()` of the model and of the optimizer returns, and what their
        `load_state_dict` takes. Of several models or optimizers there is a list.
        """
        with self._lock:
            return {
                key: _alone([self._filled(node) for node in nodes])
                for key, nodes in self._described.states.items()
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from another state; all of it is checked first.

        Args:
            state: As `state_dict` returns it; "model" or "optimizer" may be missing.

        Raises:
            PackageError: A tensor is missing or of another shape or dtype, or a setting that is no
                number differs.
        """
        known = self._described.states
        if not state or not known.keys() >= state.keys():
            raise PackageError(
                f"a state dict must have the keys {' and '.join(known)}, not {sorted(state)}"
            )
        found: list[Found] = []
        for key, value in state.items():
            nodes = known[key]
            several = [value] if len(nodes) == 1 else value
            for node, each in zip(nodes, several, strict=True):
                found += match_leaves(node, each, key)
        self._take(found)

    def explain(self) -> "Explanation":
        """Returns what became of the step, as `dynamo_backends.explain` says it."""
        from dynamo_backends.capture.explanation import Explanation, GraphExplanation
        from dynamo_backends.capture.guards import Guards

        targets = dict(Counter(self._described.targets).most_common())
        seconds = sum(report.compile_seconds for report in self.reports)
        name = self._described.name
        graph = GraphExplanation(name, None, targets, seconds, False, self.reports)
        return Explanation(
            name, self.backend, 0, seconds, (graph,), (), Guards(0, {}, ()), (), self.notes
        )

    def __repr__(self) -> str:
        """Returns what `print` shows of the step."""
        described = self._described
        about = package_summary(self.backend, self._tensors, self.machine)
        return f"LoadedStep({described.name}({described.calls}), {about})"

    def _filled(self, node: Mapping[str, Any]) -> Any:
        sources: dict[str, Callable[[int], Any]] = {
            TENSOR: lambda i: self._tensors[i].clone(),
            NUMBER: self._numbers.__getitem__,
        }
        return decoded(node, lambda kind, i: sources[kind](i))

    def _take(self, found: Sequence[Found]) -> None:
        """Sets tensors and numbers, after all were checked."""
        tensors = [(i, _like(value, self._tensors[i], where)) for _, i, value, where
                   in _of(TENSOR, found)]  # fmt: skip
        numbers = [(i, _number(value, where)) for _, i, value, where in _of(NUMBER, found)]
        with self._lock, torch.no_grad():
            for i, tensor in tensors:
                self._tensors[i].copy_(tensor)
            for i, number in numbers:
                self._numbers[i] = number


class _Group(MutableMapping[str, Any]):
    """The numbers and settings of one group of parameters."""

    def __init__(self, step: LoadedStep, node: Mapping[str, Any], name: str):
        self._step = step
        self._nodes = {key: inner for key, inner in node["dict"] if key != "params"}
        self._name = name

    def __getitem__(self, key: str) -> Any:
        return self._step._filled(self._nodes[key])

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self._nodes:
            raise PackageError(f"{self._name} has no {key!r}, only {', '.join(self._nodes)}")
        self._step._take(list(match_leaves(self._nodes[key], value, f"{self._name}[{key!r}]")))

    def __delitem__(self, key: str) -> None:
        raise PackageError(f"entries of {self._name} of a saved step cannot be deleted")

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def __repr__(self) -> str:
        return repr(dict(self))


def _alone(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _of(kind: str, found: Iterable[Found]) -> list[Found]:
    return sorted((each for each in found if each[0] == kind), key=lambda each: each[1])


def _laid_out(found: Found, specs: Sequence[Spec]) -> Tensor:
    _, place, value, where = found
    spec = specs[place]
    like = isinstance(value, Tensor) and value.layout == torch.strided
    if not like or (tuple(value.shape), value.dtype, str(value.device)) != (
        spec.shape, spec.dtype, spec.device,
    ):  # fmt: skip
        given = f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise PackageError(f"{where} is {given}")
    value = value.detach()
    return value if value.stride() == spec.strides else spec.empty().copy_(value)


def _float(_: str, __: int, value: Any, where: str) -> float:
    if type(value) is not float:
        raise PackageError(f"{where} is {value!r}, and has to be a float")
    return value


def _like(value: Any, tensor: Tensor, where: str) -> Tensor:
    fits = isinstance(value, Tensor) and (value.shape, value.dtype) == (tensor.shape, tensor.dtype)
    if not fits:
        given = f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise PackageError(f"{where} is {given}, not {tensor.dtype}{list(tensor.shape)}")
    found: Tensor = value.detach()
    return found


def _number(value: Any, where: str) -> float:
    if type(value) not in (int, float):
        raise PackageError(f"{where} is {value!r}, and has to be a number")
    number: float = value
    return number
