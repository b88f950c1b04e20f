"""Writes a compiled training step into one file."""

import dataclasses
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private import make_fx
from dynamo_backends.aot.step.program.backends import parts_of_step
from dynamo_backends.aot.step.program.scalars import CONVERSIONS, ScalarGuard, Term
from dynamo_backends.aot.step.saving import Result, Snapshot
from dynamo_backends.aot.step.state.arguments import is_simple
from dynamo_backends.aot.step.state.hyperparameters import group_numbers, read_number
from dynamo_backends.interface import protocols
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.errors import SaveError
from dynamo_backends.interface.executable import StepProgram
from dynamo_backends.kernels.patterns import in_aten
from dynamo_backends.package import archive, calls, portable
from dynamo_backends.package import weights as stored
from dynamo_backends.package.assembling import compiler_of, packaged
from dynamo_backends.package.loading import GRAPH, STEP, WEIGHTS
from dynamo_backends.package.machine import described
from dynamo_backends.package.spec import Spec
from dynamo_backends.package.steps.described import inner_of, parsed
from dynamo_backends.package.structure import NUMBER, OUTPUT, TENSOR, encoded
from dynamo_backends.verify.comparator import describe_difference
from dynamo_backends.verify.reference import (
    module_in_float64,
    restore_rng,
    snapshot_rng,
    widen_to_float64,
)


def save_step(path: str | os.PathLike[str], step: Snapshot) -> None:
    """Writes a training step into one file.

    Args:
        path: Path of the file; it is replaced if it exists.
        step: From `Step.snapshot`.

    Raises:
        SaveError: It has something that has no form in a file.
    """
    path = os.path.expanduser(path)
    if not Path(path).parent.is_dir():
        raise SaveError(f"there is no folder {Path(path).parent} to save {Path(path).name} in.")
    name = step.backend.name
    options = encoded(step.options, "options")
    step = dataclasses.replace(step, graph=in_aten(step.graph))
    plain = inner_of(name)
    inner = None if plain is None else packaged(plain)
    executable = _executable(step, inner, inner is not plain, options)
    if inner is not None and not executable:
        warnings.warn(
            f"the package contains no executable, because those of {name} cannot be saved; loading "
            "it compiles the portable graph", UserWarning, stacklevel=3,
        )  # fmt: skip
    names = {part: f"executables/0/{i}.bin" for i, part in enumerate(executable)}
    living = {f"tensor_{i}": t for i, t in enumerate((*step.tensors, *step.constants))}
    content, weights = stored.dumped(living)
    manifest = {
        "kind": STEP,
        "name": getattr(step.definition.function, "__qualname__", "step"),
        "backend": name,
        "options": options,
        "machine": described(inner, None if inner is None else parsed(inner, options)),
        "executables": [{"parts": names}] if names else [],
        "weights": {"names": weights, "checkpoint": None},
        "notes": [],
        "calls": _called(step),
        "step": _contents(step),
    }
    graph = json.dumps(portable.to_dict(step.graph.module)).encode()
    parts = {names[part]: executable[part] for part in executable}
    archive.write(path, manifest, {GRAPH: graph, WEIGHTS: content, **parts})


def _executable(
    step: Snapshot, inner: Backend | None, is_other: bool, options: Mapping[str, Any]
) -> dict[str, bytes]:
    """Returns the parts of a step's program.

    Args:
        step: The step.
        inner: What compiles steps for files; None: nothing.
        is_other: That is not what has compiled the step.
        options: Options of the backend.

    Raises:
        SaveError: It is another program than that of the step, and computes something else.
    """
    if inner is None or not (is_other or step.program.from_disk):
        return step.program.dump() or {}
    given = parsed(inner, options)
    parts = parts_of_step(inner, given, inner.plan(step.graph, given), step.graph)
    if parts and is_other:
        assert isinstance(inner, protocols.SavesSteps), inner
        wrong = _difference(step, inner.load_step(parts, step.graph, given))
        if wrong is not None:
            raise SaveError(
                f"the step compiled by {compiler_of(inner.name)} is not right, and not saved: "
                f"{wrong}. Take another backend."
            )
    return parts


def _difference(step: Snapshot, program: StepProgram) -> str | None:
    """Returns how a program differs from eager on the arguments of the last call; None: it fits."""
    state = snapshot_rng()
    draws = step.draws()
    restore_rng(state)
    batch = [leaf for leaf in step.leaves if isinstance(leaf, Tensor)]
    count = len(step.graph.placeholders) - len(batch) - len(step.constants) - len(draws)
    gradients = [
        torch.zeros_like(place.meta["val"], device="cpu")
        for place in step.graph.placeholders[1 + len(step.tensors) : count]
    ]
    numbers = torch.tensor(_numbers(step)[0], dtype=step.graph.placeholders[0].meta["val"].dtype)
    inputs = [numbers, *step.tensors, *gradients, *batch, *step.constants, *draws]
    inputs = [x.detach().clone() for x in inputs]
    taken: list[Any] = []
    with torch.no_grad():
        expected = step.graph.module(*(x.clone() for x in inputs))
        written = [x.clone() for x in inputs]
        program(written, taken)
        updated = [x for x, y in zip(written, step.graph.inputs, strict=True)
                   if y.updated_by is not None]  # fmt: skip

        def precise() -> Sequence[Any]:
            computed: Sequence[Any] = module_in_float64(step.graph.module)(
                *map(widen_to_float64, inputs)
            )
            return computed

        return describe_difference(expected, [*updated, *program.outputs(taken)], precise)


def _contents(step: Snapshot) -> dict[str, Any]:
    """Returns what the manifest says of the step besides its graph."""
    graph = step.graph
    nodes = [*graph.placeholders, *graph.outputs]
    values = [Spec.of(node.meta["val"]) for node in nodes]
    numbers, names = _numbers(step)
    return {
        "inputs": [[x.name, x.role.value, x.updated_by] for x in graph.inputs],
        "values": [spec.to_dict() for spec in values],
        "slots": [slot.name for slot in step.slots],
        "gradients": len(step.recording.gradient_slots),
        "constants": len(step.constants),
        "numbers": [[name, value] for name, value in zip(names, numbers, strict=True)],
        "draws": list(_draws(step)),
        "answers": _answers(step, numbers),
        "batch": _batch(step),
        "results": _results(step),
        "models": [_state_of(step, model.state_dict(keep_vars=True), "the state of a model")
                   for model in step.definition.models],
        "optimizers": _optimizers(step),
        "checks": _checks(step),
    }  # fmt: skip


def _checks(step: Snapshot) -> dict[str, Any]:
    found = calls.checks_to_dict(step.checks)
    if found is None:
        raise SaveError(
            "the step cannot be saved: a bounds check of an index cannot be serialized. Please "
            "report this."
        )
    return found


def _numbers(step: Snapshot) -> tuple[list[float], list[str]]:
    """Returns the optimizers' numbers, and what they are called."""
    values, names = [], []
    optimizers = step.definition.optimizers
    groups = [(i, g) for o in optimizers for i, g in enumerate(o.param_groups)]
    for group, key, index in group_numbers(optimizers):
        value = read_number((group, key, index))
        number = next(i for i, g in groups if g is group)
        names.append(f"param_groups[{number}][{key!r}]" + ("" if index is None else f"[{index}]"))
        if type(value) not in (int, float):
            raise SaveError(f"{names[-1]} is a {type(value).__name__}. Use a Python int or float.")
        values.append(value)
    return values, names


def _draws(step: Snapshot) -> Iterator[str]:
    for target, args, kwargs in step.draws.calls:
        text = calls.call_to_text(target, args, kwargs)
        if text is None:
            raise SaveError(
                f"the step draws random numbers by {target} with arguments that cannot be "
                "serialized. Leave out generator=."
            )
        yield text


def _answers(step: Snapshot, numbers: list[float]) -> dict[str, Any] | None:
    """Returns what the step was told of its numbers; None: it has not asked."""
    answers = step.recording.answers
    if not answers:
        return None
    module = make_fx(lambda given: _terms(answers, given), None)(
        torch.tensor(numbers, dtype=torch.float64)
    )
    names = {convert: name for name, convert in CONVERSIONS.items()}
    checks = [
        [names[a.convert], a.value, sorted({leaf.index for leaf in a.term.leaves()})]
        for a in answers
    ]
    text = calls.to_text(module.graph)
    if text is None:
        raise SaveError(
            "the step cannot be saved: a condition on a Python scalar cannot be serialized. Please "
            "report this."
        )
    return {"calls": text, "checks": checks}


def _terms(answers: Sequence[ScalarGuard], numbers: Tensor) -> list[Tensor]:
    known: dict[Term, Any] = {}
    return [answer.term.evaluate(numbers, known) for answer in answers]


def _batch(step: Snapshot) -> dict[str, Any]:
    """Returns the arguments: a template of `(args, kwargs)`, and what the tensors are like."""
    if any(step.batch.objects):
        raise SaveError(
            "the step takes objects as arguments. Pass tensors in lists, tuples and dicts."
        )
    leaves: list[Any] = []
    tensors = 0
    for leaf in step.leaves:
        if isinstance(leaf, Tensor):
            leaves.append(_Place({TENSOR: tensors}))
            tensors += 1
        elif is_simple(leaf):
            leaves.append(leaf)
        else:
            raise SaveError(
                f"the step takes a {type(leaf).__qualname__}, which a package cannot contain. Pass "
                "tensors and numbers in lists, tuples and dicts."
            )
    call = pytree.tree_unflatten(leaves, step.batch.outer)
    return {"template": encoded(call, "arguments", _place), "tensors": tensors}


def _results(step: Snapshot) -> dict[str, Any]:
    leaves = [_result(result) for result in step.results]
    return encoded(pytree.tree_unflatten(leaves, step.spec), "a result", _place)


def _result(result: Result) -> Any:
    if result.kind == "constant":
        return result.value
    if result.kind == "term":
        if result.value.function is not None:
            raise SaveError("the step returns a computed Python scalar. Return a tensor.")
        return _Place({NUMBER: result.value.index})
    return _Place({OUTPUT if result.kind == "output" else TENSOR: result.value})


class _Place:
    """A leaf that is a place."""

    def __init__(self, node: dict[str, int]):
        self.node = node


def _place(value: Any) -> dict[str, int] | None:
    return value.node if isinstance(value, _Place) else None


def _state_of(step: Snapshot, state: Any, what: str) -> dict[str, Any]:
    slots = {id(t): i for i, t in enumerate(step.tensors)}

    def place_of(value: Any) -> dict[str, int] | None:
        if not isinstance(value, Tensor):
            return _place(value)
        if id(value) not in slots:
            raise SaveError(
                f"{what} has a tensor that is not a parameter, buffer or state of it. Register it "
                "as a buffer."
            )
        return {TENSOR: slots[id(value)]}

    return encoded(state, what, place_of)


def _optimizers(step: Snapshot) -> list[dict[str, Any]]:
    """Returns the state_dicts of the optimizers, with places for their tensors and numbers."""
    optimizers = step.definition.optimizers
    places = {}
    for number, (group, key, index) in enumerate(group_numbers(optimizers)):
        places[id(group), key, index] = number
    described_ = []
    for optimizer in optimizers:
        state = dict(optimizer.state_dict())
        groups = zip(optimizer.param_groups, state["param_groups"], strict=True)
        state["param_groups"] = [
            {key: _with_places(value, id(group), key, places) for key, value in packed.items()}
            for group, packed in groups
        ]
        described_.append(_state_of(step, state, "the state of an optimizer"))
    return described_


def _with_places(value: Any, group: int, key: str, places: Mapping[Any, int]) -> Any:
    def of(element: Any, index: int | None) -> Any:
        number = places.get((group, key, index))
        return element if number is None else _Place({NUMBER: number})

    if isinstance(value, list | tuple) and key != "params":
        elements = [of(element, index) for index, element in enumerate(value)]
        return elements if isinstance(value, list) else tuple(elements)
    return of(value, None)


def _called(step: Snapshot) -> str:
    """Returns how the step is called, for people."""
    texts = [
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        if isinstance(leaf, Tensor)
        else repr(leaf)
        for leaf in step.leaves
    ]
    args, kwargs = pytree.tree_unflatten([_Text(text) for text in texts], step.batch.outer)
    return ", ".join([*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())])


class _Text:
    def __init__(self, text: str):
        self._text = text

    def __repr__(self) -> str:
        return self._text
