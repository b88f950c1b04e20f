"""`compile_regions`: compiles the repeated blocks of a model, equal ones once."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from dynamo_backends.interface.compiler import compiler
from dynamo_backends.interface.errors import OptionError


def compile_regions(
    model: nn.Module,
    *,
    backend: str = "openxla",
    options: Mapping[str, Any] | None = None,
    blocks: Collection[str] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> nn.Module:
    """Compiles the repeated blocks of a model in place, as `nn.Module.compile` does each.

    The first call takes as long as for one block, since Dynamo captures equal blocks once: one
    compiled graph serves all of them, with the weights of each prepared once. What lies between
    the blocks runs in eager, and nothing is fused across their boundaries. As
    `accelerate.utils.compile_regions` and diffusers' `compile_repeated_blocks`, but for the
    backends of this package.

    Examples:
        >>> model = dynamo_backends.compile_regions(model, backend="onnxrt")

    Args:
        model: The model; its parameters keep their names.
        backend: Name of the backend.
        options: Options of the backend.
        blocks: Names of the classes of the blocks. None: those that the model lists in
            `_repeated_blocks`, as models of diffusers do; else the outermost modules in a
            `ModuleList` or `Sequential` that have submodules, and parameters of the same names,
            shapes and dtypes as another one there.
        dynamic: As for `torch.compile`.
        fullgraph: As for `torch.compile`, of each block.

    Returns:
        The model itself.

    Raises:
        OptionError: The model has no such blocks, or an option is wrong.
        UnknownBackendError: There is no such backend.
    """
    compiled = compiler(backend, **(options or {}))
    found = _blocks(model, blocks)
    for block in found:
        block.compile(backend=compiled, dynamic=dynamic, fullgraph=fullgraph)
    return model


def _blocks(model: nn.Module, names: Collection[str] | None) -> Sequence[nn.Module]:
    if isinstance(names, str):
        names = (names,)
    if names is None:
        names = getattr(model, "_repeated_blocks", None)
    if names is None:
        found = list(dict.fromkeys(_repeated(model)))
        if not found:
            raise OptionError(
                f"{type(model).__name__} has no repeated blocks in a ModuleList or Sequential. "
                "Name their classes with blocks=[...], or compile the model with torch.compile."
            )
        return found
    found = [module for module in model.modules() if type(module).__name__ in names]
    missing = sorted({*names} - {type(module).__name__ for module in found})
    if missing:
        have = sorted({type(m).__name__ for m in model.modules() if any(m.children())})
        raise OptionError(f"blocks names {missing}; {type(model).__name__} has {have}.")
    return found


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the outermost modules that another one in their container equals."""
    children = list(module.children())
    kinds = [_kind(child) for child in children]
    is_container = isinstance(module, nn.ModuleList | nn.Sequential)
    for child, kind in zip(children, kinds, strict=True):
        if is_container and any(child.children()) and kinds.count(kind) > 1:
            yield child
        else:
            yield from _repeated(child)


def _kind(module: nn.Module) -> Any:
    """What is the same for blocks that one graph may serve."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return type(module), [(name, tuple(x.shape), x.dtype) for name, x in tensors]
