"""Calls of a program for static shapes with smaller inputs: padded before, cut after it."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence

import sympy
import torch
from torch import Tensor

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import InputConverter
from dynamo_backends.graph.symbolic_sizes import (
    SIZES,
    SizeReader,
    SizeWithExpression,
    collect_varying_sizes,
    sizes_of,
    strides_of,
)
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.interface.executable import Bound, Executable
from dynamo_backends.runtime.results import restride
from dynamo_backends.xla.lowering.padded.extents import Extents
from dynamo_backends.xla.runtime import PjrtDevice, XlaExecutable
from dynamo_backends.xla.updating import executable_for


def allocate_padded_input(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates uninitialised memory for a padded input."""
    return torch.empty(shape, dtype=dtype, device=device)


@dataclasses.dataclass(frozen=True)
class ValidRegion:
    """Describes the valid region of a padded output, and cuts it out.

    Attributes:
        grid: The bounds of all factors of all dimensions (see `extents`).
        places: For each factor, where the real size is among the numbers of a call; -1: all of it.
        merged: Whether a dimension has several factors.
    """

    grid: tuple[int, ...]
    places: tuple[int, ...]
    merged: bool

    @classmethod
    def of(cls, extents: Extents, places: Mapping[sympy.Expr, int]) -> "ValidRegion":
        """The outline of an output, given where expressions are among the numbers of a call."""
        if all(len(e) <= 1 for e in extents):
            flat = [(e[0].bound, e[0].size) if e else (1, None) for e in extents]
        else:
            flat = [(f.bound, f.size) for e in extents for f in e]
        where = tuple(-1 if size is None else places[size] for _, size in flat)
        return cls(tuple(b for b, _ in flat), where, any(len(e) > 1 for e in extents))

    def cut(self, tensor: Tensor, numbers: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Returns the valid part.

        Args:
            tensor: The output with its padding.
            numbers: Numbers of the call.
            shape: Shape of the valid part.
        """
        grid = tensor.reshape(self.grid) if self.merged else tensor
        for d, place in enumerate(self.places):
            if place >= 0 and numbers[place] != self.grid[d]:
                grid = grid.narrow(d, 0, numbers[place])
        return grid.reshape(shape) if self.merged else grid


class _Padder:
    """Gives one input the shape of the bounds.

    What was cut from memory of the bounds, as results of another padded program are, is read there:
    what lies beside it is padding as good as any. Else it is copied.

    Args:
        importer: Importer of the input at the bounds.
        reads_beside: Whether the program may read what lies beside an input.
    """

    def __init__(self, importer: InputConverter, reads_beside: bool):
        self._importer = importer
        self._inverse = [importer.storage.order.index(d) for d in range(len(importer.shape))]
        self._reads_beside = reads_beside
        dense = torch.empty(importer.dense_shape, dtype=importer.dtype, device="meta")
        self._strides = dense.permute(self._inverse).stride()
        self._bytes = dense.nbytes

    def __call__(self, tensor: Tensor) -> Tensor:
        importer = self._importer
        if tensor.shape == importer.shape:
            return tensor
        if self._reads_beside and self._is_cut(tensor):
            return tensor.detach().as_strided(importer.shape, self._strides)
        if tensor.dtype != importer.dtype or tensor.dim() != len(importer.shape):
            importer.to_program_order(tensor)  # which says what is wrong
        memory = allocate_padded_input(importer.dense_shape, importer.dtype, tensor.device)
        padded = memory.permute(self._inverse)
        inner = padded
        for d, n in enumerate(tensor.shape):
            if n != inner.shape[d]:
                inner = inner.narrow(d, 0, n)
        inner.copy_(tensor.detach())
        return padded

    def _is_cut(self, tensor: Tensor) -> bool:
        """Returns whether memory goes on, around an input, as it would at the bounds."""
        if tensor.stride() != self._strides or tensor.dtype != self._importer.dtype:
            return False
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_conj() or tensor.is_neg():
            return False
        start = tensor.storage_offset() * tensor.element_size()
        return start + self._bytes <= tensor.untyped_storage().nbytes()


class PaddedExecutable(Executable):
    """A program that serves all sizes up to those that it was compiled for.

    Args:
        inner: The program; its last input has the real sizes.
        graph: Specialised at the bounds.
        numbers: The sizes that it needs of each call.
        outlines: Outlines of its outputs.
    """

    serves_range = True

    def __init__(
        self,
        inner: XlaExecutable,
        graph: Graph,
        numbers: Sequence[SizeWithExpression],
        outlines: Sequence[ValidRegion],
    ):
        self._inner = inner
        self._outlines = outlines
        dims = {
            s.expression
            for n in graph.module.graph.nodes
            for s in collect_varying_sizes(n.meta.get(SIZES))
        }
        self._count = len(numbers)
        self._bounds = [int(n) for n in numbers if n.expression in dims]
        places = [graph.placeholders[i] for i in graph.activations]
        self._padders: list[tuple[int, Callable[[Tensor], Tensor]]] = [
            (i, _Padder(InputConverter(node.meta["val"]), not graph.updates))
            for i, node in enumerate(places)
            if collect_varying_sizes(node.meta.get(SIZES))
        ]
        shapes = [_known(sizes_of(n)) for n in graph.outputs]
        strides = [_known(strides_of(n)) for n in graph.outputs]
        promised = [x for pair in zip(shapes, strides, strict=True) for x in pair]
        ends = itertools.accumulate(map(len, promised), initial=len(numbers))
        self._slices = [slice(*pair) for pair in itertools.pairwise(ends)]
        self._read = SizeReader(places, [*numbers, *itertools.chain(*promised)])

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind`."""
        run, copied = self._inner.bind(weights)
        read, padders, count = self._read, self._padders, self._count
        slices, outlines = self._slices, self._outlines

        def bound(activations: Sequence[Tensor]) -> list[Tensor]:
            numbers = read(activations)
            real = numbers[:count]
            self._check(real)
            inputs = list(activations)
            for i, pad in padders:
                inputs[i] = pad(inputs[i])
            inputs.append(torch.tensor(real, dtype=torch.int64))
            results = run(inputs)
            found = []
            for k, (result, outline) in enumerate(zip(results, outlines, strict=True)):
                shape = tuple(numbers[slices[2 * k]])
                strides = tuple(numbers[slices[2 * k + 1]])
                tensor = outline.cut(result, real, shape)
                found.append(tensor if tensor.stride() == strides else restride(tensor, strides))
            return found

        return bound, copied

    def _check(self, real: Sequence[int]) -> None:
        # Numbers that are no sizes of dimensions come last, and may be what they are.
        if any(n > most for n, most in zip(real, self._bounds, strict=False)):
            raise ValueError(
                f"the program was compiled for sizes up to {self._bounds}, but called with "
                f"{list(real)}"
            )

    @property
    def temporary_bytes(self) -> int:
        """See `XlaExecutable.temporary_bytes`."""
        return self._inner.temporary_bytes

    def dump(self) -> dict[str, bytes] | None:
        """See `Executable.dump`."""
        outlines = [dataclasses.asdict(o) for o in self._outlines]
        return {**self._inner.dump(), "outlines": json.dumps(outlines).encode()}

    @classmethod
    def load(
        cls,
        device: PjrtDevice,
        graph: Graph,
        complete: Graph,
        numbers: Sequence[SizeWithExpression],
        parts: dict[str, bytes],
    ) -> "PaddedExecutable":
        """Recreates an executable from `dump`.

        Raises:
            CompileError: The parts are incomplete, or XLA refuses them.
        """
        try:
            outlines = [
                ValidRegion(tuple(o["grid"]), tuple(o["places"]), o["merged"])
                for o in json.loads(parts.pop("outlines"))
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise CompileError(f"the cached executable is incomplete: {error}") from error
        inner = executable_for(complete).load(device, complete, parts)
        return cls(inner, graph, numbers, outlines)


def _known(numbers: Sequence[int | None]) -> list[int]:
    if any(n is None for n in numbers):
        raise CompileError("the sizes of an output are not known")
    return [n for n in numbers if n is not None]
