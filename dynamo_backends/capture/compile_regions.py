"""`compile_regions`: compiles the repeated layers of a model, equal ones once."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from dynamo_backends._torch_private import compile_module
from dynamo_backends.interface.compiler import compiler
from dynamo_backends.interface.errors import OptionError


def compile_regions(
    model: nn.Module,
    *,
    backend: str = "openxla",
    options: Mapping[str, Any] | None = None,
    classes: Collection[str] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> nn.Module:
    """Compiles the repeated layers of a model in place, each as `nn.Module.compile` does.

    Dynamo captures equal layers once, and one compiled graph serves all of them, with the weights
    of each prepared once. So the first call takes about as long as that of one layer. What lies
    between the layers runs in eager, and nothing is fused across them. As
    `accelerate.utils.compile_regions` and diffusers' `compile_repeated_blocks`, for the backends of
    this package.

    Examples:
        >>> model = dynamo_backends.compile_regions(model, backend="onnxrt")

    Args:
        model: The model; its parameters keep their names.
        backend: Name of the backend.
        options: Options of the backend.
        classes: Names of the layers' classes. None: those that the model lists in
            `_repeated_blocks`, as models of diffusers do; else the outermost modules in a
            `ModuleList` or `Sequential` that have submodules, and are of the class, and have
            parameters and buffers of the names, shapes and dtypes, of another one there.
        dynamic: As for `torch.compile`.
        fullgraph: As for `torch.compile`, of each layer.

    Returns:
        The model itself.

    Raises:
        OptionError: The model has no such layers, or an option is wrong.
        UnknownBackendError: There is no such backend.
    """
    compiled = compiler(backend, **(options or {}))
    for layer in _layers(model, classes):
        compile_module(layer, backend=compiled, dynamic=dynamic, fullgraph=fullgraph)
    return model


def _layers(model: nn.Module, names: Collection[str] | None) -> Sequence[nn.Module]:
    if isinstance(names, str):
        names = (names,)
    if names is None:
        names = getattr(model, "_repeated_blocks", None)
    if names is None:
        found = list(dict.fromkeys(_repeated(model)))
        if not found:
            raise OptionError(
                f"{type(model).__name__} has no equal layers in a ModuleList or Sequential. Name "
                "their classes with classes=[...], or compile the model with torch.compile."
            )
        return found
    found = [module for module in model.modules() if type(module).__name__ in names]
    missing = sorted({*names} - {type(module).__name__ for module in found})
    if missing:
        have = sorted({type(m).__name__ for m in model.modules() if any(m.children())})
        raise OptionError(f"classes names {missing}; {type(model).__name__} has {have}.")
    return found


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost modules that are like another one in their container."""
    children = list(module.children())
    kinds = [_kind(child) for child in children]
    is_container = isinstance(module, nn.ModuleList | nn.Sequential)
    for child, kind in zip(children, kinds, strict=True):
        if is_container and any(child.children()) and kinds.count(kind) > 1:
            yield child
        else:
            yield from _repeated(child)


def _kind(module: nn.Module) -> Any:
    """What modules have in common that one graph may serve."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return type(module), [(name, tuple(x.shape), x.dtype) for name, x in tensors]
