"""`save`: compiles a model and writes it into one file."""

import dataclasses
import functools
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dynamo_backends.interface.compiler import compiler
from dynamo_backends.interface.errors import SaveError
from dynamo_backends.interface.registry import (
    availability_of,
    get_backend,
    is_backend,
    require_available,
)
from dynamo_backends.interface.report import record
from dynamo_backends.kernels.background_builds import needed_kernels
from dynamo_backends.package import archive, linked
from dynamo_backends.package import weights as stored
from dynamo_backends.package.assembling import (
    EAGER,
    WITH_KERNELS,
    Contents,
    backend_of,
    compiler_of,
    packaged,
)
from dynamo_backends.package.capturing import captured, compiled, in_torchs_order
from dynamo_backends.package.loading import EXAMPLES, GRAPH, WEIGHTS
from dynamo_backends.package.machine import described
from dynamo_backends.package.module import PackagedModule
from dynamo_backends.package.packaged import InMemoryParts, PackageBackend
from dynamo_backends.package.structure import encoded

SHIPPED = ("openxla", "onnxrt", "ov", "inductor", "inductor_freezing", "tvm", "iree")
"""Those that compete by default: what they compile can be written to a file."""


def choose_backend(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The backend that autotune chooses for one call of a model, and the options that it had.

    Args:
        model: What is called.
        args: Arguments.
        kwargs: Keyword arguments.
        options: Of autotune. Without `candidates`, those compete whose executables can be saved.

    Raises:
        SaveError: The model is several graphs, for which autotune may choose differently.
    """
    given = {**options, "mode": "wait"}  # the one call decides
    if not given.get("candidates"):
        given["candidates"] = tuple(filter(_is_usable, SHIPPED))
    tuned = torch.compile(model, backend=compiler("autotune", **given), dynamic=False)
    with record() as reports, torch.no_grad():
        tuned(*args, **kwargs)
    names = [report.chosen for report in reports if report.chosen]
    if len(names) != 1:
        raise SaveError(
            f"autotune made {len(names)} choices, but a package contains exactly one graph: the "
            "model has graph breaks, or no graph was captured. Pass the name of a backend."
        )
    (name,) = names
    if name not in (EAGER, *SHIPPED) and not is_backend(name):
        raise SaveError(
            f"autotune chose {name!r}, which is not a backend of this package. Remove it from "
            "`candidates`."
        )
    parsed = get_backend("autotune").Options
    common = {key: value for key, value in options.items() if key in _common(parsed)}
    return name, common if name != EAGER else {}


def _is_usable(name: str) -> bool:
    backend = backend_of(name)
    return backend is not None and availability_of(backend).usable


def _common(autotunes: Any) -> set[str]:
    """Options that every backend has."""
    from dynamo_backends.interface.options import Options

    return set(Options.__dataclass_fields__) & set(autotunes.__dataclass_fields__)


_NOTHING = "no executables"


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    backend: str = "openxla",
    options: Mapping[str, Any] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> None:
    """Compiles a model and writes it into one file, from which `load` makes a callable module.

    The model is called with the arguments, and at a few other sizes of the ranges, which are made
    by repeating or cutting them.

    Examples:
        >>> batch = torch.export.Dim("batch", min=2, max=64)
        >>> dynamo_backends.save(
        ...     model, "model.dbp", (x,), dynamic_shapes={"x": {0: batch}}, backend="onnxrt"
        ... )

    Args:
        model: For inference; it is exported with `torch.export.export`, as it is.
        path: Path of the file; it is replaced if it exists.
        args: Arguments of one call. They are written into the file, for `dynamo-backends verify`.
        kwargs: Keyword arguments of it.
        dynamic_shapes: As for `torch.export.export`.
        backend: Name of the backend, or "inductor". "autotune" chooses now among those whose
            executables can be saved; "eager" saves the portable form alone.
        options: Options of the backend, in types that JSON has.
        checkpoint: A safetensors file with the model's weights. Those of the same name and contents
            are not written into the package, which then needs the file beside it.

    Raises:
        SaveError: The model cannot be exported, updates its state, or has arguments, results or
            weights that a package cannot hold.
        OptionError: An option is unknown or wrong.
        BackendUnavailableError: The backend cannot run here.
    """
    model, path = in_torchs_order(model, path, "save")
    path = os.path.expanduser(path)
    if not Path(path).parent.is_dir():
        raise SaveError(f"there is no folder {Path(path).parent} to save {Path(path).name} in.")
    call = (tuple(args), dict(kwargs or {}))
    asked, given = backend, dict(options or {})
    if (asker := backend_of(backend)) is not None:
        asker.Options.parse(given, backend).require_dynamo_capture(f"save with {backend}")
    if backend == "autotune":
        backend, given = choose_backend(model, *call, given)
    inner = backend_of(backend)
    if inner is not None:
        require_available(inner)
        inner.Options.parse(given, backend)
        inner = packaged(inner)
    model_graph = captured(model, call, dynamic_shapes, backend, inner, given)
    contents, portable = model_graph.contents, model_graph.portable
    keeping = None if inner is None else PackageBackend(inner, InMemoryParts(), {})
    module = compiled(model_graph, keeping)
    is_right = functools.partial(linked.agree, module, call)
    notes = _notes(asked, contents, keeping, module, model_graph.known)
    for note in notes:
        if note.startswith(_NOTHING):
            warnings.warn(f"the package has {note}", UserWarning, stacklevel=2)
    manifest = {
        **dataclasses.asdict(contents),
        "asked": asked,
        "calls": module.calls,
        "machine": described(inner, None if inner is None else contents.parsed(inner)),
        "notes": notes,
        "forms": _forms(contents, keeping, module),
        "linked": linked.make_program_record(
            contents, portable, model_graph.values, keeping, is_right
        ),
    }
    _write(path, manifest, model_graph.graph, keeping, model_graph.known, checkpoint, call)


def _write(
    path: str | os.PathLike[str],
    manifest: Mapping[str, Any],
    graph: bytes,
    backend: PackageBackend | None,
    known: Mapping[str, Tensor],
    checkpoint: str | os.PathLike[str] | None,
    call: Any,
) -> None:
    parts, executables = _executables(backend)
    content, weights = _weights(known, checkpoint)
    tensors, constants = _examples(call)
    rest = {
        "executables": executables,
        "plans": backend.plans if backend is not None and executables else {},
        "weights": weights,
        "constants": constants,
    }
    own = {GRAPH: graph, WEIGHTS: content, EXAMPLES: tensors}
    archive.write(path, {**manifest, **rest}, {**own, **parts})


def _notes(
    asked: str,
    contents: Contents,
    backend: PackageBackend | None,
    module: PackagedModule,
    weights: Mapping[str, Tensor],
) -> list[str]:
    notes = []
    if asked != contents.backend:
        notes.append(f"{asked} chose {contents.backend} when the package was saved")
    if backend is not None and not backend.kept.parts:
        why = f"those of {contents.backend} cannot be saved"
        if not any(report.executables for report in module.reports):
            why = f"{contents.backend} supports no operator of this model"
        notes.append(f"{_NOTHING}: {why}; loading it compiles the portable graph")
    elif contents.backend in WITH_KERNELS and needed_kernels(weights.values()):
        notes.append(
            "without this package's own kernels, which need a compiler where they run; Inductor's "
            "kernels are used instead"
        )
    return notes


def _forms(contents: Contents, backend: PackageBackend | None, module: PackagedModule) -> list[str]:
    """Returns what the package has of each part of the graph, in the order in which they run."""
    if backend is None or not backend.kept.parts:
        return []
    (report,) = module.reports
    compiled = f"compiled by {compiler_of(contents.backend)}"
    forms = [
        f"{part.ops} call{'s' * (part.ops != 1)} "
        + ("in eager" if part.runs_on == EAGER else compiled)
        for part in report.parts
    ]
    return forms + [f"in eager: {x.op}, {x.reason}" for x in report.fallbacks]


def _executables(backend: PackageBackend | None) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    parts: dict[str, bytes] = {}
    listed = []
    for i, (mark, content) in enumerate(() if backend is None else backend.kept.parts.items()):
        names = {}
        for j, (name, part) in enumerate(content.items()):
            names[name] = f"executables/{i}/{j}.bin"
            parts[names[name]] = part
        listed.append({"mark": mark, "parts": names})
    return parts, listed


def _weights(
    known: Mapping[str, Tensor], checkpoint: str | os.PathLike[str] | None
) -> tuple[bytes, dict[str, Any]]:
    shared = (
        None
        if checkpoint is None
        else stored.shared_with(Path(os.path.expanduser(checkpoint)), known)
    )
    there = set() if shared is None else set(shared.tensors)
    own = {name: tensor for name, tensor in known.items() if name not in there}
    content, names = stored.dumped(own)
    entry = None if shared is None else dataclasses.asdict(shared)
    return content, {"names": {**names, **{n: n for n in there}}, "checkpoint": entry}


def _examples(call: Any) -> tuple[bytes, dict[str, Any]]:
    """The leaves of the arguments by number: tensors as a safetensors file, and the others."""
    leaves = {str(i): leaf for i, leaf in enumerate(pytree.tree_leaves(call))}
    tensors = {i: leaf.clone() for i, leaf in leaves.items() if isinstance(leaf, Tensor)}
    others = {i: encoded(x, "arguments") for i, x in leaves.items() if i not in tensors}
    return stored.dumped(tensors)[0], others
