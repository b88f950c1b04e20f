"""Executables of shared libraries that AOTInductor has made, as packages hold them.

AOTInductor's code compares nothing of its inputs with what it was compiled for, so that is done
here. Weights that Inductor folds or packs are part of a library; all others are inputs.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import SharedLibrary, has_conj_or_neg_bit, open_library
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import resolve_conj_and_neg
from dynamo_backends.graph.symbolic_sizes import SizeReader, sizes_of, strides_of
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.interface.executable import Bound, Executable
from dynamo_backends.runtime.freed_memory import keep_freed_memory
from dynamo_backends.runtime.results import restride

Run = Callable[[list[Tensor]], list[Tensor]]
"""From all inputs of a library to its outputs."""

_CONTENTS = "contents"


class LibraryExecutable(Executable):
    """A graph compiled to one shared library, or one for each set of frozen weights.

    Args:
        graph: Its inputs and outputs; the calls are not read.
        frozen: Positions among the graph's weights of those that libraries contain.
        ranged: It serves all sizes that the symbols allow.
    """

    def __init__(self, graph: Graph, frozen: Collection[int], ranged: bool = False):
        self.serves_range = ranged
        self._frozen = tuple(frozen)
        self._call = _Call(graph, self._frozen, ranged)
        self._programs: list[tuple[list[str], Run]] = []
        self._lock = fork_safe_lock()

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind`: those that are frozen were copied when it was compiled."""
        with self._lock:
            run = self._program([weights[i].detach() for i in self._frozen])
        live = [w.detach() for i, w in enumerate(weights) if i not in self._frozen]
        return self._call.bound(run, live), self._frozen

    def add(self, digests: Sequence[str], library: SharedLibrary) -> None:
        """Loads a library.

        Args:
            digests: Of the weights that it contains.
            library: The library.

        Raises:
            RuntimeError: It cannot be loaded here.
            OSError: Likewise.
        """
        run, lock = open_library(library), fork_safe_lock()

        def alone(inputs: list[Tensor]) -> list[Tensor]:
            with lock:
                return run(inputs)

        self._programs.append((list(digests), alone))

    def _program(self, weights: Sequence[Tensor]) -> Run:
        """Returns the program that has these weights.

        Raises:
            CompileError: There is none.
        """
        if len(self._programs) == 1:  # a package has no other weights
            return self._programs[0][1]
        if self._programs:
            told = _telling([digests for digests, _ in self._programs])
            given = {i: digest(weights[i]) for i in told}
            for digests, run in self._programs:
                if all(digests[i] == given[i] for i in told):
                    return run
        raise CompileError("the package has no library with these weights")


def load_libraries(parts: Mapping[str, bytes], graph: Graph, reserve: bool) -> LibraryExecutable:
    """Recreates an executable from its parts (see `parts_of`).

    Args:
        parts: The parts; large ones may be any buffer.
        graph: Has the inputs and outputs of the one that was compiled.
        reserve: Keep the memory of temporaries between calls.

    Raises:
        CompileError: They are damaged, or cannot be loaded here.
    """
    try:
        contents = json.loads(bytes(parts[_CONTENTS]))
        made = LibraryExecutable(graph, contents["frozen"], contents["ranged"])
        for program in contents["programs"]:
            operators = None if program["operators"] is None else parts[program["operators"]]
            library = SharedLibrary(parts[program["code"]], operators)
            made.add(program["weights"], library)
    except Exception as error:
        raise CompileError(f"the code of Inductor cannot be loaded: {error}") from error
    if reserve:
        keep_freed_memory(contents["temporaries"])
    return made


def parts_of(
    libraries: Sequence[tuple[Sequence[str], SharedLibrary]],
    frozen: Sequence[int],
    ranged: bool,
    temporaries: int,
) -> dict[str, bytes]:
    """Returns the parts of an executable.

    Args:
        libraries: Each with the digests of the weights that it contains.
        frozen: See `LibraryExecutable`.
        ranged: See there.
        temporaries: Bytes that a call allocates and frees.
    """
    parts, programs = dict[str, bytes](), []
    for i, (digests, library) in enumerate(libraries):
        operators = None if library.operators is None else f"{i}.json"
        parts[f"{i}.so"] = library.code
        if operators is not None and library.operators is not None:
            parts[operators] = library.operators
        programs.append({"code": f"{i}.so", "operators": operators, "weights": list(digests)})
    contents = {"programs": programs, "frozen": list(frozen), "ranged": ranged,
                "temporaries": temporaries}  # fmt: skip
    return {**parts, _CONTENTS: json.dumps(contents).encode()}


def digest(weight: Tensor) -> str:
    """Returns a checksum of the elements of a tensor on the CPU."""
    plain = weight.resolve_conj().resolve_neg().contiguous()
    return hashlib.sha256(plain.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def _telling(digests: Sequence[Sequence[str]]) -> list[int]:
    """Returns the positions of weights that tell several sets apart; one, if that suffices."""
    every = range(len(digests[0]))
    alone = [i for i in every if len({each[i] for each in digests}) == len(digests)]
    return alone[:1] or list(every)


class _Call:
    """The inputs and outputs of a library in each call.

    Args:
        graph: See `LibraryExecutable`.
        frozen: See there.
        ranged: See there.
    """

    def __init__(self, graph: Graph, frozen: Collection[int], ranged: bool):
        live = [place for i, place in enumerate(graph.weights) if i not in frozen]
        given = [*live, *graph.activations]
        order = sorted(range(len(given)), key=given.__getitem__)
        # None: they come in the order of the library.
        self._order = None if order == list(range(len(given))) else order
        places = [graph.placeholders[i] for i in graph.activations]
        self._layouts = [_Layout(place) for place in places]
        self._results = [_Layout(node) for node in graph.outputs]
        self._read = _reader(places, graph.outputs) if ranged else None
        self._static = [_numbers(node, ranged=False) for node in (*places, *graph.outputs)]

    def bound(self, run: Run, weights: Sequence[Tensor]) -> Bound:
        """Returns a function from activations to results with the strides of eager.

        Args:
            run: The program.
            weights: The weights that it is given in each call.
        """
        order, layouts, results, read = self._order, self._layouts, self._results, self._read
        static, count = self._static, len(layouts)

        def call(activations: Sequence[Tensor]) -> list[Tensor]:
            numbers = static if read is None else read(activations)
            given = [*weights, *map(_Layout.arrange, layouts, activations, numbers)]
            if order is not None:
                given = [given[i] for i in order]
            made = run(given)
            return list(map(_Layout.restore, results, made, numbers[count:]))

        return call


_Numbers = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""


class _Layout:
    """How a tensor lies in memory where a library reads or writes it."""

    def __init__(self, node: fx.Node):
        self._dtype = node.meta["val"].dtype

    def arrange(self, tensor: Tensor, numbers: _Numbers) -> Tensor:
        """Returns an input, or a copy with the strides that the library reads by.

        Raises:
            ValueError: Shape or dtype differ from what was compiled.
        """
        shape, strides = numbers
        if tensor.shape != shape or tensor.dtype != self._dtype:
            raise ValueError(
                f"compiled for {self._dtype}{list(shape)}, "
                f"called with {tensor.dtype}{list(tensor.shape)}"
            )
        if has_conj_or_neg_bit(tensor):
            tensor = resolve_conj_and_neg(tensor)
        return tensor if tensor.stride() == strides else restride(tensor, strides)

    def restore(self, tensor: Tensor, numbers: _Numbers) -> Tensor:
        """Returns an output with the strides of eager."""
        return tensor if tensor.stride() == numbers[1] else restride(tensor, numbers[1])


def _numbers(node: fx.Node, ranged: bool) -> Any:
    value = node.meta["val"]
    if not ranged:
        return tuple(value.shape), value.stride()
    numbers = (*sizes_of(node), *strides_of(node))
    if None in numbers:
        raise CompileError(f"the sizes of {node.name!r} are not known")
    return numbers


def _reader(places: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Callable[..., list[_Numbers]]:
    """Returns what computes shape and strides of activations and outputs from activations.

    Raises:
        CompileError: They do not follow from the activations' shapes.
    """
    wanted = [_numbers(node, ranged=True) for node in (*places, *outputs)]
    read = SizeReader(places, [n for each in wanted for n in each])
    cuts, end = [], 0
    for each in wanted:
        half = len(each) // 2
        cuts.append((slice(end, end + half), slice(end + half, end + 2 * half)))
        end += 2 * half

    def numbers(activations: Sequence[Tensor]) -> list[_Numbers]:
        found = read(activations)
        return [(tuple(found[shape]), tuple(found[strides])) for shape, strides in cuts]

    return numbers
