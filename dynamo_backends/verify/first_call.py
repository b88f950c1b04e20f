"""Compares one call of a compiled block with eager, in little memory.

What eager computes is kept until the compiled block has run, or, where that would take more memory
(a forward graph returns what its backward graph reads), computed afterwards, and each output is
dropped as soon as it was compared.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.graph.aliasing import estimate_peak_bytes, tensor_bytes
from dynamo_backends.graph.graph import Graph, source_line
from dynamo_backends.graph.random_draws import is_random
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.interface.reference import computing_reference
from dynamo_backends.verify.comparator import Comparator
from dynamo_backends.verify.mismatch import describe_layout_mismatch, storage_address
from dynamo_backends.verify.mixed_dtypes import is_dtype_error
from dynamo_backends.verify.reference import EagerInterpreter

log = logging.getLogger("dynamo_backends")

Thunk = Callable[[], Sequence[Any]]

_CHECKS = ("assert", "sym_constrain")  # raise, or do nothing


@dataclass(frozen=True)
class OutputMetadata:
    """The dtype, strides and device that torch's tracing promised for an output.

    Attributes:
        dtype: Its dtype; None: it is no tensor.
        strides: Its strides; None: it has none.
        device: Its device; None: it is no tensor.
    """

    dtype: torch.dtype | None = None
    strides: tuple[int, ...] | None = None
    device: torch.device | None = None


@dataclass
class ComparisonOutcome:
    """The results of a compared call, and whether they were wrong or unverified, and why.

    Attributes:
        results: What the compiled block returned.
        wrong: What is wrong with it, in words; empty: nothing.
        unverified: Why it could not be compared; empty: it was.
        expected: Eager's results, where they were kept.
        seconds: What the comparison took, without the compiled block.
        is_lost: Whether it wrote to an input and what that held is not known any more.
    """

    results: Sequence[Any]
    wrong: str = ""
    unverified: str = ""
    expected: Sequence[Any] | None = None
    seconds: float = 0.0
    is_lost: bool = False


class Comparison:
    """Calls a compiled block and compares its outputs with eager's, in little memory.

    Args:
        graph: The block, functional; its module is the eager original.
        reduced: Whether the user admits bfloat16.
    """

    def __init__(self, graph: Graph, reduced: bool = False):
        self._graph = graph
        self._module = graph.module
        self._reduced = reduced
        self._promised: list[OutputMetadata] = []
        self._acts = ""
        self._is_early = True
        self._unusable = run_comparison_part(self._look)

    def _look(self) -> None:
        graph = self._graph
        self._acts = next(filter(None, map(why_not_repeatable, graph.calls)), "")
        self._promised = [_promise(x) for x in graph.outputs]
        self._is_early = self._is_small_beside_what_lies_between()

    def __call__(self, run: Thunk, inputs: Sequence[Any]) -> ComparisonOutcome:
        """Calls the compiled block and compares.

        Args:
            run: Calls it.
            inputs: One per input of the graph.

        Raises:
            Exception: What the compiled block raises, and nothing else.
        """
        unverified = self._unusable or self._acts or _is_recorded()
        outputs = _Outputs(self._module, inputs, self._promised, self._reduced)
        stopwatch = _Stopwatch()
        early = self._is_early and not unverified
        with stopwatch:
            contents = [] if _is_recorded() else _contents(inputs)
            if early:
                unverified = self._replay(inputs, outputs.keep)
        early = early and not unverified
        results = run()
        with stopwatch:
            written, is_lost = self._written(contents, inputs)
            wrong = written or self._malformed(results)
            if wrong:
                unverified = ""
            elif not unverified:
                unverified = self._guarded(lambda: self._judge(outputs, inputs, results))
                wrong = "" if unverified else outputs.wrong
        expected = [outputs.expected[i] for i in sorted(outputs.expected)] if early else None
        return ComparisonOutcome(results, wrong, unverified, expected, stopwatch.seconds, is_lost)

    def _malformed(self, results: Any) -> str:
        """Returns what is wrong with what was returned, whatever the values are; empty: nothing."""
        count = len(self._graph.outputs)
        if isinstance(results, Tensor) or not hasattr(results, "__len__"):
            return f"it returned {type(results).__name__} instead of a list of {count} outputs"
        return "" if len(results) == count else f"{len(results)} outputs instead of {count}"

    def _written(self, contents: Sequence[Any], inputs: Sequence[Any]) -> tuple[str, bool]:
        """Returns which input was written to, in words, and whether what it held is lost."""
        names, is_lost = [], False
        for before, value, place in zip(contents, inputs, self._graph.placeholders, strict=False):
            if before is None or _is_same(before, value):
                continue
            names.append(place.name)
            is_lost |= not _is_restored(value, before)
        text = (
            (f"it wrote to its input {', '.join(names)}, which eager does not write to")
            if names
            else ""
        )
        return text, is_lost

    def _is_small_beside_what_lies_between(self) -> bool:
        graph = self._graph
        outputs = dict.fromkeys(x for x in graph.outputs if isinstance(x, fx.Node))
        kept = sum(tensor_bytes(x.meta.get("val")) for x in outputs if x.op != "placeholder")
        return kept <= estimate_peak_bytes(graph.module.graph) / 2

    def _judge(self, outputs: "_Outputs", inputs: Sequence[Any], results: Sequence[Any]) -> None:
        outputs.results = results
        if self._is_early:
            for place in range(len(results)):
                outputs.compare(place, outputs.expected[place])
        else:
            EagerInterpreter(self._module)(inputs, outputs.compare)
        outputs.settle()

    def _replay(self, inputs: Sequence[Any], visit: Callable[[int, Any], None]) -> str:
        return self._guarded(lambda: EagerInterpreter(self._module)(inputs, visit))

    def _guarded(self, action: Callable[[], None]) -> str:
        return run_comparison_part(action, raises=self._graph.kind != "backward")


def run_comparison_part(
    action: Callable[[], None],
    grad_mode: Callable[[], AbstractContextManager[Any]] = torch.no_grad,
    raises: bool = True,
) -> str:
    """Runs a part of a comparison; returns its error as text, but raises dtype errors.

    Args:
        action: The part.
        grad_mode: In which it runs.
        raises: Whether eager's error for the dtypes of arguments is raised. A backward graph that
            was traced under autocast calls kernels with dtypes that autograd's own calls have not.

    Returns:
        Why it failed, in words; empty: it did not.

    Raises:
        RuntimeError: Eager's, where an operator refuses the dtypes of its arguments.
    """
    try:
        with private.disable_current_modes(), grad_mode(), computing_reference():
            action()
    except Exception as error:
        if raises and is_dtype_error(error):
            raise
        log.debug("compiled code cannot be compared with eager", exc_info=True)
        return f"eager, or the comparison with it, failed ({brief_error(error)})"
    return ""


@dataclass
class _Outputs:
    """The outputs of one call, and what is known of them.

    Attributes:
        module: The eager original.
        inputs: Inputs of the call.
        promised: What outputs may have, besides what eager's have.
        reduced: Whether the user admits bfloat16.
        results: The compiled outputs.
        expected: Eager's, by position.
        wrong: What is wrong, in words; empty: nothing that is known.
    """

    module: fx.GraphModule
    inputs: Sequence[Any]
    promised: Sequence[OutputMetadata]
    reduced: bool
    results: Sequence[Any] = ()
    expected: dict[int, Any] = field(default_factory=dict)
    wrong: str = ""

    def __post_init__(self) -> None:
        self._comparator = Comparator(self.module, lambda: self.inputs, self.reduced)
        self._memories = {storage_address(x) for x in self.inputs} - {None}

    def keep(self, place: int, value: Any) -> None:
        """Keeps an output of eager's."""
        self.expected[place] = value

    def compare(self, place: int, expected: Any) -> None:
        """Compares an output with eager's."""
        result = self.results[place]
        promise = self.promised[place]
        if isinstance(expected, Tensor) and promise.dtype not in (None, expected.dtype):
            # The graphs around this one were compiled for what is promised, not for what torch's
            # kernel makes: layer_norm's statistics under autocast, for one.
            expected = expected.to(promise.dtype)
        if _is_where_promised(result, promise, expected):
            # The seeds of attention without dropout: torch's kernel makes them on the host.
            expected = expected.to(promise.device)
        text = describe_layout_mismatch(expected, result, promise.strides)
        if text is None and self._is_borrowed(result) and not self._is_borrowed(expected):
            text = "shares memory with an input, which eager's does not"
        if text is not None:
            self.wrong = self.wrong or f"output {place} {text}"
        elif isinstance(expected, Tensor):
            self._comparator.add_output(place, expected, result)

    def settle(self) -> None:
        """Decides about outputs that are in doubt, unless something is wrong in any case."""
        if not self.wrong and (found := self._comparator.find_mismatch()) is not None:
            self.wrong = f"output {found[0]} {found[1]}"

    def _is_borrowed(self, value: Any) -> bool:
        return (
            isinstance(value, Tensor)
            and value.numel() > 0
            and storage_address(value) in self._memories
        )


_Contents = Tensor | list[Tensor] | None


def _contents(inputs: Sequence[Any]) -> list[_Contents]:
    """Returns what inputs hold: copies of small ones, and of large ones sums that show any write.

    None stands for what has no memory that can be read.
    """
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    is_small = sum(x.numel() * x.element_size() for x in tensors) <= _SMALL
    return [(_copy if is_small else _sums)(x) for x in inputs]


def _copy(value: Any) -> Tensor | None:
    if not isinstance(value, Tensor) or value.layout != torch.strided or not value.numel():
        return None
    copies: list[Tensor] = []
    failed = run_comparison_part(lambda: copies.append(value.detach().clone()))
    return None if failed else copies[0]


def _bytes(value: Tensor) -> Tensor:
    """Returns what a tensor holds, as bytes, in the order of its elements."""
    dense = value.detach().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1).view(torch.uint8)


def _sums(value: Any) -> list[Tensor] | None:
    """Sums of the rows and columns of a tensor's memory, arranged as matrices."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or not value.numel():
        return None
    found: list[Tensor] = []

    def add_up() -> None:
        memory = _bytes(value)
        unit = math.gcd(memory.numel(), memory.storage_offset(), 8)
        for part in memory.view(_INTEGERS[unit]).split(_PART):
            width = math.isqrt(part.numel())
            whole = part.numel() // width * width
            table = part[:whole].view(-1, width)
            found.extend(table.sum(dim, dtype=torch.int64) for dim in (0, 1))
            found.append(part[whole:].clone())

    return None if run_comparison_part(add_up) else found


_SMALL = 1 << 24  # bytes of inputs of which there may be copies
_PART = 1 << 20  # numbers, so that a part stays in the processor's cache
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _is_same(before: Tensor | list[Tensor], value: Tensor) -> bool:
    """Returns whether a tensor holds what it held before; also if that cannot be told."""
    if isinstance(before, Tensor):  # NaN is not equal to itself, its bytes are
        same = [True]
        run_comparison_part(lambda: same.append(torch.equal(_bytes(before), _bytes(value))))
        return same[-1]
    after = _sums(value)
    return after is None or _are_equal(before, after)


def _is_restored(value: Tensor, before: Tensor | list[Tensor]) -> bool:
    """Puts back what a tensor held, if there is a copy of that."""

    def restore() -> None:
        assert isinstance(before, Tensor)
        value.copy_(before)

    return not run_comparison_part(restore)


def _are_equal(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, before, after))


class _Stopwatch:
    """Adds up the seconds that are spent inside of it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._start


def _is_recorded() -> str:
    """Returns why nothing can be compared at the moment; empty if it can."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return "its first call was recorded as part of a CUDA graph"
    return ""


def why_not_repeatable(node: fx.Node) -> str:
    """Returns why a call cannot be run twice: side effects or randomness; empty if it can."""
    if getattr(node.target, "namespace", "") in ("_c10d_functional", "c10d_functional", "c10d"):
        return f"{node.target} communicates with other processes"
    if is_random(node):
        return f"{node.target} draws random numbers"
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return ""  # it could draw, but not with these arguments; torch calls that impure, too
    if node.is_impure() and not any(word in str(node.target) for word in _CHECKS):
        return f"{node.target} has side effects"
    if isinstance(node.target, private.HigherOrderOperator) and "effects" in str(node.target):
        return f"{node.target} has side effects"
    return ""


def _is_where_promised(result: Any, promise: OutputMetadata, expected: Any) -> bool:
    """Returns whether a result is on the device that was promised, and eager's is not."""
    if not isinstance(result, Tensor) or not isinstance(expected, Tensor):
        return False
    return result.device == promise.device != expected.device


def _promise(output: Any) -> OutputMetadata:
    value = output.meta.get("val") if isinstance(output, fx.Node) else None
    if not isinstance(value, Tensor):
        return OutputMetadata()
    strided = value.layout == torch.strided
    return OutputMetadata(value.dtype, tuple(value.stride()) if strided else None, value.device)


def described_region(graph: Graph) -> str:
    """Describes a block by its first and last operator and its source line."""
    names = [str(n.target) for n in graph.calls if isinstance(n.target, private.OpOverload)]
    lines = [line for n in graph.calls if (line := source_line(n)) is not None]
    if not names:
        return "no operators"
    several = f"{len(names)} operators from {names[0]} to {names[-1]}"
    text = several if len(names) > 1 else names[0]
    return text + (f", at {lines[0]}" if lines else "")
