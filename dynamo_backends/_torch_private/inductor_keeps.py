"""What Inductor keeps of graphs with frozen weights: on disk more than by itself, in memory less.

| what | checked |
|---|---|
| `torch._inductor.codecache.PyCodeCache.modules`, which `sys.modules` has too | 2.13.0 |
| `torch._inductor.codecache.FxGraphCachePickler._pickleable_type_cache` | 2.13.0 |
| `torch._inductor.codecache`: `FxGraphCachePickler`, `CacheabilityValidator` | 2.13.0 |
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest import mock

from torch import Tensor, fx

from dynamo_backends._torch_private.forks import fork_safe_rlock

_patching = fork_safe_rlock()


@contextmanager
def forgetting_constants() -> Iterator[None]:
    """What is compiled inside lives as long as what calls it, and so do the weights it holds.

    Torch would keep modules with weights until the process ends, to remove their files if it is
    asked for that; and the class of each graph that it has pickled, which has the graph's weights.
    """
    from torch._inductor.codecache import FxGraphCachePickler, PyCodeCache

    modules: list[Any] = getattr(PyCodeCache, "modules", [])
    before = set(map(id, modules))
    try:
        yield
    finally:
        for loaded in [each for each in modules if id(each) not in before]:
            if any(isinstance(value, Tensor) for value in vars(loaded).values()):
                with suppress(ValueError):  # another thread was faster
                    modules.remove(loaded)
                name = str(loaded.__name__)
                if sys.modules.get(name) is loaded:
                    del sys.modules[name]
        pickled: dict[type, bool] = getattr(FxGraphCachePickler, "_pickleable_type_cache", {})
        for kind in list(pickled):
            if issubclass(kind, fx.GraphModule):
                pickled.pop(kind, None)


@contextmanager
def packed_weights_in_cache() -> Iterator[None]:
    """Inside, Inductor keeps graphs on disk also if frozen weights are in layouts of oneDNN.

    Other frozen weights are part of a key by their metadata alone, and are taken from the graph
    that is compiled when a kept one is loaded. Those of oneDNN are refused, as they cannot be
    pickled; by their sizes and dtype they can: the code that Inductor makes hands them to oneDNN.
    """
    from torch._inductor import codecache
    from torch._inductor.freezing_utils import is_frozen_param

    pickler = codecache.FxGraphCachePickler
    validator = getattr(codecache, "CacheabilityValidator", None)
    if validator is None or not hasattr(pickler, "_reduce_tensor"):
        yield  # another version: such graphs are compiled in each process
        return

    def is_packed(tensor: Tensor) -> bool:
        return tensor.is_mkldnn and is_frozen_param(tensor)

    with _patching:
        reduce, check = pickler._reduce_tensor, validator.check_tensor

        def reduce_tensor(self: Any, tensor: Tensor) -> Any:
            if is_packed(tensor):
                return str, (f"oneDNN {tensor.dtype} {tuple(tensor.shape)}",)
            return reduce(self, tensor)

        def check_tensor(tensor: Tensor) -> None:
            if not is_packed(tensor):
                check(tensor)

        with (
            mock.patch.object(pickler, "_reduce_tensor", reduce_tensor),
            mock.patch.object(validator, "check_tensor", staticmethod(check_tensor)),
        ):
            yield
