"""Defines what backends return: `Executable` for graphs, `StepProgram` for steps."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dynamo_backends.interface.deprecated_names import DeprecatedNames

if TYPE_CHECKING:
    from torch import Tensor

    from dynamo_backends.interface.report import GraphReport

Bound = Callable[[list["Tensor"]], list["Tensor"]]


class ArtifactStore(Protocol):
    """Stores serialized executables: named byte strings by cache key."""

    def get(self, key: str) -> Mapping[str, bytes] | None:
        """Returns the byte strings stored under a key; None if there are none."""

    def put(self, key: str, parts: Mapping[str, bytes]) -> object:
        """Stores byte strings under a key."""

    def drop(self, key: str) -> None:
        """Removes the entry of a key."""


class Executable(DeprecatedNames, ABC):
    """The compiled code of one block of a graph.

    A graph's inputs are of two kinds (`Graph.weights` and `Graph.activations`). Weights are bound
    once and again whenever they changed; activations come with every call.

    Attributes:
        serves_range: It was compiled from a graph whose sizes know where they come from (see
            `Backend.serves_ranges`), and takes inputs of all sizes that the symbols allow.
        was_compared: It came from where it was compared with eager, on the same kind of machine:
            with `verify="first"` it is not compared again.
    """

    RENAMED: ClassVar[dict[str, str]] = {"rest": "release_memory", "report_to": "set_report"}

    serves_range: bool = False
    was_compared: bool = False

    @abstractmethod
    def bind(self, weights: Sequence["Tensor"]) -> tuple[Bound, Collection[int]]:
        """Prepares weights; returns a function of activations, and which were copied.

        Args:
            weights: The tensors of `Graph.weights`, in order.

        Returns:
            A function from the list of activations to the list of outputs, and the positions of
            the weights whose contents it copied. Those are watched for changes of content; the
            others must share memory with the given tensors, and are watched for a new address.
        """

    def bind_live(self, weights: Sequence["Tensor"]) -> tuple[Bound, Collection[int]] | None:
        """Binds weights that change often, without slow preparation; None if unsupported.

        `binding` decides on it. By default there is no such form (None), and `bind` is called.
        """
        return None

    def set_report(self, report: "GraphReport") -> None:
        """Sets the `GraphReport` to which calls add what only they can tell."""

    def release_memory(self) -> None:
        """Frees memory that is held between calls; other threads may be calling.

        Calls of other threads may be running.
        """

    def dump(self) -> dict[str, bytes] | None:
        """Serializes to bytes for `SavesExecutables.load`; None if it cannot be saved."""
        return None


class StepComparison(Protocol):
    """Alternates between programs of a step until the fastest is known."""

    @property
    def next_program(self) -> int | None:
        """The index of the program that runs the next step; None stands for eager."""

    def note_seconds(self, turn: int | None, seconds: float) -> None:
        """Records the seconds of the last step, and which program ran it."""


class StepProgram(DeprecatedNames, ABC):
    """A compiled training step: it updates its inputs in place when called.

    Attributes:
        launches: How many steps it has launched. Copying results to where they belong does not
            count.
        from_disk: Whether it was loaded instead of compiled.
        prefers_eager: Whether the function itself is to take the steps from now on, in eager.
        comparison: While it is open whether that is faster: whose turn it is.
    """

    RENAMED: ClassVar[dict[str, str]] = {"report_to": "set_report"}

    launches: int = 0
    from_disk: bool = False
    prefers_eager: bool = False
    comparison: StepComparison | None = None

    @abstractmethod
    def __call__(self, inputs: Sequence["Tensor"], taken: list[Any]) -> None:
        """Runs one step with its inputs.

        Args:
            inputs: One per input of the graph. Those with `Input.updated_by` get their new
                contents, all of them or, if it raises, all or none.
            taken: Gets one element, for `outputs`, if the new contents are there, also if this
                raises afterwards.
        """

    @abstractmethod
    def outputs(self, taken: list[Any]) -> list["Tensor"]:
        """Returns outputs that are not in-place updates; may be called repeatedly.

        Args:
            taken: As `__call__` left it.
        """

    def set_report(self, report: "GraphReport") -> None:
        """Sets the `GraphReport` to which later calls may add."""

    def dump(self) -> dict[str, bytes] | None:
        """Serializes to bytes for `SavesSteps.load_step`; None if it cannot be saved."""
        return None
