"""A step in a file: the program of its last call, with places for what it takes and returns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from dynamo_backends.aot.step.program.backends import StepBackend
from dynamo_backends.aot.step.program.draws import Draws
from dynamo_backends.aot.step.program.record_program import RecordProgram
from dynamo_backends.aot.step.program.recording import Definition, Recording
from dynamo_backends.aot.step.program.scalars import Term
from dynamo_backends.aot.step.program.step_programs import StepPrograms
from dynamo_backends.aot.step.program.verified import VerifiedStep
from dynamo_backends.aot.step.record.patches import is_one_entry
from dynamo_backends.aot.step.record.placeholders import is_placeholder
from dynamo_backends.aot.step.record.segment import Segment
from dynamo_backends.aot.step.record.templates import Items, Number, Ref, fill, leaves, refs
from dynamo_backends.aot.step.record.trie import Entry
from dynamo_backends.aot.step.state.arguments import (
    BatchSpec,
    flatten_batch,
    shared_memory,
)
from dynamo_backends.aot.step.state.hyperparameters import OptimizerSettings
from dynamo_backends.aot.step.state.inventory import Inventory, Slot
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.index_checks import IndexCheckedGraph
from dynamo_backends.graph.random_draws import is_random
from dynamo_backends.interface.errors import SaveError, StepCaptureError
from dynamo_backends.interface.executable import StepProgram


@dataclass(frozen=True)
class Result:
    """The origin of one result.

    Attributes:
        kind: "output" of the graph, "slot" (a tensor that lives on), "term" or "constant".
        value: Position of the output or slot, the term, or the constant.
    """

    kind: str
    value: Any


@dataclass(frozen=True)
class Snapshot:
    """One compiled step as it is now.

    Attributes:
        definition: Definition of the step.
        backend: What has compiled it.
        options: Options of the backend, as they were given.
        graph: What was compiled. Its inputs are the numbers, then `tensors`, gradients that it does
            not read, the tensors of the batch, `constants` and what `draws` draws.
        program: Compiled from it.
        recording: Recording of its calls.
        results: One per leaf of what the function returned.
        spec: How these are put together.
        slots: What lives from step to step.
        tensors: One per slot.
        constants: Tensors that the graph owns.
        draws: Draws its random numbers.
        batch: How the arguments are put together.
        leaves: Their leaves.
        checks: What is checked of each step.
    """

    definition: Definition
    backend: StepBackend
    options: Mapping[str, Any]
    graph: Graph
    program: StepProgram
    recording: Recording
    results: Sequence[Result]
    spec: Any
    slots: Sequence[Slot]
    tensors: Sequence[Tensor]
    constants: Sequence[Tensor]
    draws: Draws
    batch: BatchSpec
    leaves: Sequence[Any]
    checks: IndexCheckedGraph

    def check(self) -> None:
        """Checks that a file can hold all that the step does.

        Raises:
            SaveError: It cannot; the message says why.
        """
        reason = next(self._reasons(), None)
        if reason is not None:
            raise SaveError(f"the step cannot be saved: {reason}.")

    def _reasons(self) -> Iterator[str]:
        recording = self.recording
        if self.definition.parallel is not None:
            yield "it uses a mesh"
        if self.backend.home is not None:
            yield f"its state is on the device {self.backend.home}"
        if any(t.device.type != "cpu" for t in (*self.tensors, *self.constants)):
            yield "its tensors are not on the CPU; move the model to the CPU"
        if self.program.prefers_eager or self.program.comparison is not None:
            yield (
                f"{self.backend.name} runs it in eager or is still comparing it with eager; call "
                "the step again before saving"
            )
        yield from self._reasons_of_gradients()
        if recording.aliases.bases:
            yield f"some of its tensors share storage ({', '.join(recording.aliases.names)})"
        if any(x.is_meta or x.is_sparse for x in self.tensors):
            yield "one of its tensors is sparse or a meta tensor"
        if any(any(True for _ in answer.term.living()) for answer in recording.answers):
            yield "its control flow depends on an optimizer setting that is a tensor"
        for node in filter(is_random, self.graph.calls):
            yield f"{node.target} draws random numbers in a way that depends on computed values"

    def _reasons_of_gradients(self) -> Iterator[str]:
        recording = self.recording
        entering = recording.gradient_slots
        places = self.graph.placeholders[1 + len(self.slots) :]
        found = [i for i, place in zip(entering, places, strict=False) if place.users]
        # Those that were there are there again before the next step.
        found += [i for _, i in recording.gradients if i not in recording.entering]
        for i in found:
            yield (
                f"it accumulates into the gradient of {self.slots[i].name} that the previous step "
                "left. Call optimizer.zero_grad() in the function"
            )
        if recording.batch_gradients or recording.batch_with_gradient:
            yield "it leaves gradients on its arguments; pass them detached"


class LastCall(NamedTuple):
    """The part of a step's last call that a file needs.

    Attributes:
        segment: Its calls since the last cut.
        before: Those of the call before, if there was one.
        arguments: Positional and keyword arguments.
        result: What the function returned, see `result_template`.
        held: The results that user code referred to at the end; None: it was recorded.
        is_followed: Whether all of it is in the record.
    """

    segment: Segment
    before: Segment | None
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    result: Any
    held: Sequence[int] | None
    is_followed: bool


_ANOTHER = "the next call would run a different program: {}. Call the step once more before saving."


@dataclass(frozen=True)
class _Foreign:
    """A value that a file cannot hold."""

    kind: str


def result_template(segment: Segment, value: Any) -> Any:
    """Returns the template of what the function returned; objects of other classes are left out.

    Args:
        segment: The calls of the step.
        value: What was returned, before the program runs.
    """
    if isinstance(value, Tensor):
        is_lost = is_placeholder(value) and value.step_value < 0  # type: ignore[attr-defined]
        number = None if is_lost else segment.number_of(value)
        if number is None and segment.lives_on(value):
            number = segment.trie.slot(value)
        return _Foreign("tensor of another origin") if number is None else Ref(number)
    if isinstance(value, Mapping):
        items = tuple(result_template(segment, v) for v in value.values())
        return Items(dict, tuple(value), items)
    if isinstance(value, list | tuple):
        kind = list if isinstance(value, list) else tuple
        return Items(kind, (), tuple(result_template(segment, v) for v in value))
    if type(value) in _SCALARS:
        return value
    return _Foreign(type(value).__qualname__)


_SCALARS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class _Parameters:
    """The inputs and outputs of the program of a file.

    Attributes:
        tensors: Those of the batch, then others that the step reads: constants of the file.
        numbers: Theirs in the trie; None for arguments that no call takes.
        count: How many are of the batch.
        outputs: The numbers of the results.
    """

    tensors: tuple[Tensor, ...]
    numbers: tuple[int | None, ...]
    count: int
    outputs: tuple[int, ...]


def _parameters_of(call: LastCall, inventory: Inventory) -> _Parameters:
    """Returns the inputs and outputs of the program of a file.

    Raises:
        SaveError: No file holds what the call has done.
    """
    reason = next(_reasons(call), None)
    if reason is not None:
        raise SaveError(f"the step cannot be saved: {reason}.")
    segment, trie = call.segment, call.segment.trie
    if call.held is None and not segment.note_inputs():
        raise SaveError(
            "the step cannot be saved: it reads a tensor that is not an argument and was created "
            "during the call. Pass it as an argument."
        )
    path = segment.node.path()
    mentioned = {n for entry in path for n in entry.mentioned()}
    mentioned.update(refs(call.result))
    arguments = [x for x in flatten_batch(call.arguments)[0] if isinstance(x, Tensor)]
    lives = set(map(id, inventory.tensors))
    if any(id(x) in lives for x in arguments):
        raise SaveError(
            "the step cannot be saved: an argument is a parameter, buffer or optimizer state. Do "
            "not pass tensors that the model or optimizer holds."
        )
    if any(trie.kinds[n] == "slot" and id(trie.values[n]) not in lives for n in mentioned):
        raise SaveError(
            _ANOTHER.format("parameters, buffers or optimizer state were replaced by other tensors")
        )
    numbers = [segment.number_of(x) for x in arguments]
    others = [n for n in sorted(mentioned.difference(numbers)) if trie.kinds[n] == "input"]
    for number in others:
        _check_constant(call, number, path)
    return _Parameters(
        (*arguments, *(trie.values[n] for n in others)),
        (*numbers, *others),
        len(arguments),
        tuple(n for n in dict.fromkeys(refs(call.result)) if trie.kinds[n] != "slot"),
    )


def _check_constant(call: LastCall, number: int, path: Sequence[Entry]) -> None:
    """Checks that an input that is no argument is the same tensor at each call."""
    trie = call.segment.trie
    line = next((e.line for e in path if number in e.mentioned()), "its end")
    if trie.made_at:
        raise SaveError(
            f"the step cannot be saved: it creates tensors from Python data at {trie.made_at}. "
            "Pass them as arguments."
        )
    is_old = call.before is not None and call.before.has_had(number, trie.values[number])
    if not is_old or not trie.is_held(number):
        raise SaveError(
            f"the step cannot be saved: it reads a tensor at {line} that is not an argument and "
            "may be a different tensor at each call. Pass it as an argument."
        )


def _reasons(call: LastCall) -> Iterator[str]:
    segment, trie = call.segment, call.segment.trie
    path = segment.node.path()
    reads = [entry.line for entry in path if entry.kind == "read"]
    if trie.line or reads:
        yield f"Python needs the value of a tensor during the step, at {trie.line or reads[0]}"
    if trie.read_at:
        yield f"Python reads the value of a tensor, at {trie.read_at}"
    if any(entry.kind == "optimizer" and entry.args.items for entry in path):
        yield "it uses a GradScaler, whose state is in Python"
    for entry in path:
        given = (*leaves(entry.args), *leaves(entry.kwargs))
        if any(type(leaf) is Number for leaf in given):
            yield (f"it uses a Python scalar that changes, at {entry.line}. Pass it as a tensor")
    foreign = next((x for x in leaves(call.result) if type(x) is _Foreign), None)
    if foreign is not None:
        yield (
            f"it returns a {foreign.kind}; return tensors and numbers in lists, tuples and dicts"
        )
    yield from _left_behind(call, path)
    tensors = [x for x in flatten_batch(call.arguments)[0] if isinstance(x, Tensor)]
    if shared_memory(tensors):
        yield "some of its arguments share storage"


def _left_behind(call: LastCall, path: Sequence[Entry]) -> Iterator[str]:
    """Reasons by tensors that Python refers to after the call, besides what was returned."""
    held = call.segment.alive() if call.held is None else call.held
    for number in set(held).difference(refs(call.result)):
        line = next((e.line for e in path if number in e.made), "an unknown line")
        yield (
            f"a tensor computed at {line} is still referenced from Python after the call. Return "
            "it instead"
        )


def _results(
    program: RecordProgram, call: LastCall, inventory: Inventory
) -> tuple[tuple[Result, ...], Any]:
    """Returns the origins of the leaves of a result, and how these are put together."""
    segment = call.segment
    trie = program.trie
    slots = {id(t): i for i, t in enumerate(inventory.tensors)}

    numbers = program.numbers_of_optimizers(segment)

    def place(number: int) -> Result:
        if trie.kinds[number] == "slot":
            return Result("slot", slots[id(trie.values[number])])
        output = program.recording.results[program.outputs.index(number)]
        return Result("output", output)

    flat, spec = pytree.tree_flatten(fill(call.result, place, numbers.__getitem__))
    return tuple(x if isinstance(x, Result) else _result(x, numbers) for x in flat), spec


def _result(value: Any, numbers: Sequence[Any]) -> Result:
    """Returns a constant, or a number of an optimizer, such as the learning rate."""
    index = next((i for i, x in enumerate(numbers) if x is value), None)
    if index is None or type(value) is not float:
        return Result("constant", value)
    return Result("term", Term(None, index=index))


def snapshot_of(
    call: LastCall, programs: StepPrograms, options: Mapping[str, Any], refusals: Mapping[str, str]
) -> Snapshot:
    """Returns the program of a call, with all that a file has besides.

    Args:
        call: The last one.
        programs: Programs of the step.
        options: Options of the backend.
        refusals: Lines from which on the step runs in eager, with the reasons.

    Raises:
        SaveError: No file can hold it.
    """
    definition, state = programs.definition, programs.state
    inventory, path = state.inventory, call.segment.node.path()
    if not call.is_followed:
        line, reason = next(iter(refusals.items()), ("", "runs in eager"))
        raise SaveError(f"the step cannot be saved: it {reason}" + f", at {line}." * bool(line))
    strange = next((o for o in definition.optimizers if not is_one_entry(o)), None)
    if strange is not None:
        raise SaveError(
            f"the step cannot be saved: {type(strange).__name__} is not an optimizer of "
            "torch.optim, so its Python scalars are constants of the program. Use an optimizer of "
            "torch.optim."
        )
    parameters = _parameters_of(call, inventory)
    if _settings_changed(path, programs.settings):
        raise SaveError(_ANOTHER.format("a setting in an optimizer's param_groups changed"))
    program = _program_of_file(call.segment, path, parameters, programs)
    why_not = program.why_not_next(inventory)
    if why_not is not None:
        raise SaveError(_ANOTHER.format(why_not))
    compiled = program.compiled
    leaves_of_arguments, spec = flatten_batch(call.arguments)
    snapshot = Snapshot(
        definition, state.backend, dict(options), program.graph,
        compiled.compiled if isinstance(compiled, VerifiedStep) else compiled,
        program.recording, *_results(program, call, inventory), program.slots, inventory.tensors,
        (*parameters.tensors[parameters.count :], *program.constants), program.draws, spec,
        leaves_of_arguments,
        program.checks,
    )  # fmt: skip
    _check_constants(program.graph, parameters, program.recording.names)
    snapshot.check()
    return snapshot


def _program_of_file(
    segment: Segment, path: Sequence[Entry], given: _Parameters, programs: StepPrograms
) -> RecordProgram:
    for program in (program for program, is_pure in segment.node.programs if not is_pure):
        is_enough = set(given.outputs).issubset(program.outputs)
        calls = program.calls
        if tuple(calls.inputs) == given.numbers and is_enough and not calls.views.bases:
            return program
    inputs = given.numbers, given.tensors
    try:
        program = programs.compile(segment, path, given.outputs, False, inputs)
    except StepCaptureError as error:
        raise SaveError(f"the step cannot be saved: {error}") from error
    if None not in given.numbers:
        segment.node.programs.append((program, False))
    return program


def _check_constants(graph: Graph, parameters: _Parameters, names: Sequence[str]) -> None:
    """Checks that a program writes to no tensor that is a constant of its file."""
    written = {f"batch[{i}]" for i in range(parameters.count, len(parameters.tensors))}
    for name, given in zip(names, graph.inputs, strict=False):
        if name in written and given.updated_by is not None:
            raise SaveError(
                "the step cannot be saved: it writes to a tensor that does not belong to a model "
                "or optimizer. Register it as a buffer of the model."
            )


def _settings_changed(path: Sequence[Entry], settings: Mapping[int, OptimizerSettings]) -> bool:
    """Returns whether an optimizer has other settings than a record says."""
    return any(
        entry.kind == "optimizer" and settings[id(entry.function[1])].read()[0] != entry.function[2]
        for entry in path
    )
