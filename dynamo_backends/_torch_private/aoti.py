"""AOTInductor: graphs compiled to shared libraries, which are loaded without Inductor or Dynamo.

| what | checked |
|---|---|
| `torch._inductor.aot_compile` | 2.13.0 |
| `torch._inductor.config.aot_inductor`: `output_path`, `precompile_headers` | 2.13.0 |
| `torch._inductor.config.cpp.dynamic_threads` | 2.13.0 |
| `torch._C._aoti.AOTIModelContainerRunnerCpu` | 2.13.0 |
| `torch.utils._sympy.interp.sympy_interp`, `.reference.PythonReferenceAnalysis` | 2.13.0 |
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from dynamo_backends._torch_private.inductor import right_for_constants
from dynamo_backends._torch_private.inductor_compiler import forgetting_constants, preset_vector_isa

_NAME = "model"
"""Of the files: torch looks for the operators beside the code, under the same name."""


@dataclass(frozen=True)
class SharedLibrary:
    """A graph as AOTInductor compiles it.

    Attributes:
        code: The shared library, with the weights that were constants of the graph.
        operators: Describes the calls that torch's dispatcher makes, as JSON; None: there are none.
    """

    code: bytes
    operators: bytes | None


def compile_ahead(
    module: fx.GraphModule, inputs: Sequence[Tensor], settings: Mapping[str, Any]
) -> SharedLibrary:
    """Compiles a functional graph on the CPU for other processes.

    Args:
        module: The graph; constants are buffers that `get_attr` nodes read.
        inputs: One fake tensor per placeholder, all of one mode.
        settings: Settings of `torch._inductor.config`, in force for this compilation alone.
    """
    from torch import _inductor
    from torch._guards import tracing

    preset_vector_isa()
    for place, value in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        place.meta["val"] = value  # AOTInductor takes those in place of the inputs
    with tempfile.TemporaryDirectory(prefix="dynamo-backends-") as folder:
        path = Path(folder) / f"{_NAME}.so"
        own = {
            "aot_inductor.output_path": str(path),
            # As many threads as torch has where it runs.
            "cpp.dynamic_threads": True,
            # Which takes longer than the compilations of most packages together.
            "aot_inductor.precompile_headers": False,
        }
        # Outside of every capture, whose weights freezing would look for.
        with forgetting_constants(), torch.no_grad(), tracing(None):
            _inductor.aot_compile(
                module, tuple(inputs), options=right_for_constants({**settings, **own})
            )
        described = [f for f in Path(folder).glob("*.json") if not f.stem.endswith("_metadata")]
        operators = described[0].read_bytes() if described else None
        return SharedLibrary(path.read_bytes(), operators)


def open_library(library: SharedLibrary) -> Callable[[list[Tensor]], list[Tensor]]:
    """Loads a shared library; returns a function from the graph's inputs to its outputs.

    It runs what the library contains, and compares nothing of the inputs with what it was compiled
    for. One thread calls it at a time.

    Raises:
        RuntimeError: The system's loader refuses it, or torch does.
        OSError: It cannot be written to the folder of temporary files.
    """
    runner: Any = torch._C._aoti.AOTIModelContainerRunnerCpu
    # A folder of this user alone: what was checked is what is loaded. A library stays in memory
    # when its file is gone.
    with tempfile.TemporaryDirectory(
        prefix="dynamo-backends-", ignore_cleanup_errors=True
    ) as folder:
        path = Path(folder) / f"{_NAME}.so"
        path.write_bytes(library.code)
        if library.operators is not None:
            path.with_suffix(".json").write_bytes(library.operators)
        run: Callable[[list[Tensor]], list[Tensor]] = runner(str(path), 1).run
        return run


def compute_size(expression: sympy.Expr, known: Mapping[sympy.Symbol, fx.Node]) -> fx.Node:
    """Adds the calls to a graph that compute an integer of symbols; returns the last of them.

    Args:
        expression: Over symbols.
        known: The nodes whose values they are.
    """
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    proxies = {symbol: fx.Proxy(node) for symbol, node in known.items()}
    result: Any = sympy_interp(PythonReferenceAnalysis, proxies, expression)
    node: fx.Node = result.node
    return node
