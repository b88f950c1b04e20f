"""A model on its way into a file: captured as a graph, and compiled as it will be loaded."""

import dataclasses
import inspect
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dynamo_backends.graph import lstm
from dynamo_backends.graph.decomposition_tables import checked_decomposition_table
from dynamo_backends.interface import protocols
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.errors import SaveError
from dynamo_backends.package import weights as stored
from dynamo_backends.package.assembling import Contents, assembled
from dynamo_backends.package.module import PackagedModule
from dynamo_backends.package.portable import Portable, exported, from_dict, to_dict
from dynamo_backends.package.sizes import calls_in_range
from dynamo_backends.package.spec import Spec
from dynamo_backends.package.structure import decoded, encoded, numbered


@dataclass(frozen=True)
class Captured:
    """A model as a graph.

    Attributes:
        contents: What a package says of it.
        graph: The portable form as it is written.
        portable: The same, as it will be read.
        known: Its weights by name, as the model has them.
        values: The same, as the graph reads them.
        call: The arguments, `(args, kwargs)`.
    """

    contents: Contents
    graph: bytes
    portable: Portable
    known: Mapping[str, Tensor]
    values: Sequence[Tensor]
    call: Any


def captured(
    model: nn.Module,
    call: Any,
    dynamic_shapes: Any,
    backend: str,
    inner: Backend | None,
    given: Mapping[str, Any],
) -> Captured:
    """Exports a model by `torch.export` to one graph that can be saved.

    Args:
        model: For inference.
        call: `(args, kwargs)`.
        dynamic_shapes: As for `torch.export.export`.
        backend: Name of what will run it.
        inner: The same; None: eager.
        given: Its options.

    Raises:
        SaveError: See `save`.
    """
    args, kwargs = call
    made = exported(model, args, kwargs, dynamic_shapes, _rules(inner, given))
    graph = json.dumps(to_dict(made)).encode()
    portable = from_dict(json.loads(graph))
    every = {**made.state_dict, **made.constants}
    known = {name: every[name] for name in portable.weights}
    values = [
        stored.placed(tensor.detach(), Spec.of(place.meta["val"]))
        for tensor, place in zip(known.values(), portable.places, strict=False)
    ]
    contents = _contents(model, call, backend, given, made)
    return Captured(contents, graph, portable, known, values, call)


def example_calls(captured: Captured, backend: Backend | None) -> Iterator[Any]:
    """Yields the example's arguments, and variants at other sizes of the ranges."""
    rule, most = None, 1
    if backend is not None:
        options = captured.contents.parsed(backend)
        rule, most = (
            protocols.buckets(backend, options) if options.ranges else None,
            options.max_executables,
        )
    return calls_in_range(captured.call, captured.portable, rule, most)


def compiled(captured: Captured, backend: Backend | None) -> PackagedModule:
    """Returns the module as it will be loaded, after its first calls.

    Args:
        captured: The model.
        backend: What compiles it; None: it runs in eager.

    Raises:
        SaveError: Results are wrong, or compiled code has failed.
    """
    contents, portable = captured.contents, captured.portable
    asked = decoded(contents.options)
    if asked.get("verify") in ("off", False):  # later processes rely on what is found here
        verified = encoded({**asked, "verify": "first"}, "options")
        contents = dataclasses.replace(contents, options=verified)
    module = assembled(contents, portable, captured.values, backend)
    for args, kwargs in example_calls(captured, backend):
        module(*args, **kwargs)
    for report in module.reports:
        for event in report.events:
            raise SaveError(
                f"the compiled model computes wrong results and is not saved: {event.reason}. Use "
                "another backend, or list the operators in the option keep_in_eager."
            )
    return module


def _rules(inner: Backend | None, given: Mapping[str, Any]) -> dict[Any, Any]:
    keep = (
        inner.preserved_operators(inner.Options.parse(given, inner.name))
        if inner is not None
        else ()
    )
    return {**checked_decomposition_table(frozenset(keep)), **lstm.DECOMPOSITIONS}


def _contents(
    model: nn.Module, call: Any, backend: str, given: Mapping[str, Any], made: Any
) -> Contents:
    names = _positional(model, len(call[0]))
    spec = made.call_spec
    return Contents(
        type(model).__name__,
        backend,
        encoded(given, "options"),
        names,
        numbered(spec.in_spec, "arguments"),
        numbered(spec.out_spec, "a result"),
    )


def _positional(model: nn.Module, count: int) -> list[str]:
    """The names of the first arguments; "args[0]", ... of those that have none of their own."""
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in kinds][:count]
    return names + [f"args[{i}]" for i in range(count - len(names))]


def in_torchs_order(model: Any, path: Any, name: str) -> tuple[Any, Any]:
    """Returns (model, path); warns if they were passed in the former order.

    Args:
        model: The first argument.
        path: The second one.
        name: Name of the function.

    Raises:
        TypeError: None of the two is a module.
    """
    if isinstance(model, nn.Module):
        return model, path
    if not isinstance(path, nn.Module):
        raise TypeError(f"{name} takes a module and a path, not {type(model).__name__} first.")
    warnings.warn(
        f"dynamo_backends.{name}(path, model) is deprecated. Use {name}(model, path), the argument "
        "order of torch.save.",
        DeprecationWarning,
        stacklevel=3,
    )
    return path, model
