"""Random programs of torch operators: views, writes to views and inputs, mixed dtypes, draws.

A program is a list of calls. It can be printed as Python source that reproduces it, run in eager,
and turned into the graph that Dynamo would capture.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, fx

DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16)
SHAPES = ((), (1,), (4,), (0,), (2, 3), (3, 1), (4, 4), (0, 3), (2, 3, 4), (2, 1, 3), (1, 2, 2, 3))
LAYOUTS = ("contiguous", "transposed", "strided", "offset")


@dataclass(frozen=True)
class Ref:
    """The value of an earlier call, or an input."""

    name: str

    def __repr__(self) -> str:
        return self.name

    def value(self, env: dict[str, Any]) -> Any:
        return env[self.name]


@dataclass(frozen=True)
class Size:
    """A number made of a size that an earlier value has, such as `x0.shape[1] // 2`."""

    name: str
    dim: int
    form: str = "{}"

    def __repr__(self) -> str:
        return self.form.format(f"{self.name}.shape[{self.dim}]")

    def value(self, env: dict[str, Any]) -> Any:
        return eval(repr(self), {}, env)


@dataclass(frozen=True)
class Input:
    """An input of a program; `of` names the input whose memory it shares, if any."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    of: str | None = None

    def source(self) -> str:
        if self.of is not None:
            return f"{self.name} = {self.of}[...]"
        return f"{self.name} = make({self.shape}, {self.dtype}, {self.layout!r})"


@dataclass(frozen=True)
class Call:
    """One call: of a method if `target` has no dot, else of a function."""

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def run(self, env: dict[str, Any]) -> Any:
        args = fx.node.map_aggregate(
            self.args, lambda a: a.value(env) if isinstance(a, Ref | Size) else a
        )
        if "." in self.target:
            return function(self.target)(*args, **self.kwargs)
        return getattr(args[0], self.target)(*args[1:], **self.kwargs)

    def source(self) -> str:
        if self.target == "operator.getitem":
            return f"{self.name} = {self.args[0]}[{_index(self.args[1])}]"
        if self.target == "operator.setitem":
            return f"{self.args[0]}[{_index(self.args[1])}] = {self.args[2]!r}"
        args = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        if "." in self.target:
            return f"{self.name} = {self.target}({', '.join(args)})"
        return f"{self.name} = {args[0]}.{self.target}({', '.join(args[1:])})"


def _index(index: Any) -> str:
    if isinstance(index, slice):
        parts = ["" if x is None else str(x) for x in (index.start, index.stop, index.step)]
        return ":".join(parts)
    return ", ".join(map(_index, index)) if isinstance(index, tuple) else repr(index)


def function(name: str) -> Callable[..., Any]:
    """The function of a dotted name."""
    head, *path = name.split(".")
    found: Any = {"torch": torch, "operator": operator}[head]
    for part in path:
        found = getattr(found, part)
    return found


def make(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> Tensor:
    """A tensor of small numbers; the same ones for the same arguments."""
    pad = {"strided": 2, "offset": 1}.get(layout)
    full = shape
    if pad == 2 and shape:
        full = (*shape[:-1], shape[-1] * 2)
    elif pad == 1 and shape:
        full = (shape[0] + 1, *shape[1:])
    elif layout == "transposed":
        full = shape[::-1]
    numbers = torch.arange(math.prod(full), dtype=torch.float64).reshape(full)
    x = ((numbers * 7 + len(full)) % 11 - 5) * (0.37 if dtype.is_floating_point else 1)
    x = (x > 0) if dtype is torch.bool else x.to(dtype)
    if layout == "transposed":
        return x.permute(tuple(range(x.ndim - 1, -1, -1)))
    if pad and shape:
        return x[..., ::2] if pad == 2 else x[1:]
    return x


@dataclass
class Program:
    """A straight-line program."""

    inputs: list[Input]
    calls: list[Call]
    results: list[Ref]

    def make_inputs(self) -> list[Tensor]:
        env: dict[str, Tensor] = {}
        for x in self.inputs:
            env[x.name] = make(x.shape, x.dtype, x.layout) if x.of is None else env[x.of][...]
        return list(env.values())

    def source(self) -> str:
        """A function `program`, as Python source."""
        head = f"def program({', '.join(x.name for x in self.inputs)}):"
        body = [f"    {c.source()}" for c in self.calls]
        return "\n".join([head, *body, f"    return {self.results}"]) + "\n"

    def script(self) -> str:
        """Source that stands alone and runs the program in eager."""
        return "\n".join(
            [
                "import operator\nimport torch\nfrom tests.graph.programs import make\n\n",
                self.source(),
                *(x.source() for x in self.inputs),
                f"torch.manual_seed(0)\nprint(program({', '.join(x.name for x in self.inputs)}))",
            ]
        )

    def function(self) -> Callable[..., Any]:
        """The program as a Python function."""
        scope: dict[str, Any] = {"torch": torch, "operator": operator}
        exec(compile(self.source(), "<random program>", "exec"), scope)
        return scope["program"]

    def module(self) -> fx.GraphModule:
        """The graph that Dynamo would capture."""
        graph = fx.Graph()
        env = {x.name: graph.placeholder(x.name) for x in self.inputs}
        for call in self.calls:
            args = fx.node.map_aggregate(
                call.args, lambda a: env[a.name] if isinstance(a, Ref) else a
            )
            if "." in call.target:
                node = graph.call_function(function(call.target), args, call.kwargs)
            else:
                node = graph.call_method(call.target, args, call.kwargs)
            env[call.name] = node
        graph.output(tuple(env[r.name] for r in self.results))
        return fx.GraphModule(torch.nn.Module(), graph)


@st.composite
def programs(draw: st.DrawFn, max_calls: int = 12) -> Program:
    """Programs that run in eager without an error."""
    from tests.graph.program_calls import draw_call

    inputs: list[Input] = []
    for i in range(draw(st.integers(1, 3))):
        inputs.append(_draw_input(draw, f"x{i}", inputs))
    program = Program(inputs, [], [])
    env: dict[str, Any] = {x.name: t for x, t in zip(inputs, program.make_inputs(), strict=True)}
    torch.manual_seed(0)
    for i in range(draw(st.integers(1, max_calls))):
        call = draw_call(draw, env, f"v{i}")
        draws = torch.get_rng_state()
        try:
            value = call.run(env)
        except (RuntimeError, IndexError, TypeError, NotImplementedError):
            torch.set_rng_state(draws)
            continue  # what eager refuses is no program
        program.calls.append(call)
        if isinstance(value, Tensor):
            env[call.name] = value
            if _is_through_expand(call, env):
                value.through_expand = True  # type: ignore[attr-defined]
    names = st.sampled_from(sorted(env))
    program.results = [Ref(n) for n in draw(st.lists(names, min_size=1, max_size=4, unique=True))]
    return program


def _is_through_expand(call: Call, env: dict[str, Any]) -> bool:
    """Whether a call gives a view of an expanded tensor, or a view of such a view."""
    source = env.get(getattr(call.args[0], "name", ""))
    if call.target == "expand":
        return True
    return (
        hasattr(source, "through_expand")
        and source.untyped_storage().data_ptr() == env[call.name].untyped_storage().data_ptr()
    )


def _draw_input(draw: st.DrawFn, name: str, before: list[Input]) -> Input:
    # AOT Autograd itself fails for inputs that share memory with gaps or an offset.
    if before and before[0].layout == "contiguous" and draw(st.integers(0, 7)) == 0:
        return Input(name, of=before[0].name)
    return Input(
        name,
        draw(st.sampled_from(SHAPES)),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from(LAYOUTS)),
    )
