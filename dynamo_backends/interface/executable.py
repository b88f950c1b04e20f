"""Defines what backends return: executables of graphs, and programs of training steps."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from dynamo_backends.interface.report import GraphReport

Bound = Callable[[list["Tensor"]], list["Tensor"]]


class Parts(Protocol):
    """A store of the parts of compiled blocks (see `Executable.dump`)."""

    def get(self, key: str) -> Mapping[str, bytes] | None:
        """Returns the parts stored under a key; None if there are none."""

    def put(self, key: str, parts: Mapping[str, bytes]) -> object:
        """Stores parts under a key."""

    def drop(self, key: str) -> None:
        """Removes the parts stored under a key."""


class Executable(ABC):
    """The compiled code of one block of a graph.

    A graph's inputs are of two kinds (`Graph.weights` and `Graph.activations`). Weights are bound
    once and again whenever they changed; activations come with every call.

    Attributes:
        serves_range: It was compiled from a graph whose sizes know where they come from (see
            `Backend.serves_ranges`), and takes inputs of all sizes that the symbols allow.
        was_compared: It came from where it was compared with eager, on the same kind of machine:
            with `verify="first"` it is not compared again.
    """

    serves_range: bool = False
    was_compared: bool = False

    @abstractmethod
    def bind(self, weights: Sequence["Tensor"]) -> tuple[Bound, Collection[int]]:
        """Binds weights, which it may prepare.

        Args:
            weights: The tensors of `Graph.weights`, in order.

        Returns:
            A function from the list of activations to the list of outputs, and the positions of
            the weights whose contents it copied. Those are watched for changes of content; the
            others must share memory with the given tensors, and are watched for a new address.
        """

    def bind_live(self, weights: Sequence["Tensor"]) -> tuple[Bound, Collection[int]] | None:
        """Like `bind`, but for weights that keep changing: prepares nothing that takes long.

        `binding` decides on it. By default there is no such form (None), and `bind` is called.
        """
        return None

    def report_to(self, report: "GraphReport") -> None:  # noqa: B027 - has a default
        """Sets the report of the graph, for what is known only when the executable is called."""

    def rest(self) -> None:  # noqa: B027 - has a default
        """Frees memory that the executable keeps between calls, before something else needs much.

        Calls of other threads may be running.
        """

    def dump(self) -> dict[str, bytes] | None:
        """Returns what `SavesExecutables.load` needs in another process; None: cannot be saved."""
        return None


class StepComparison(Protocol):
    """Chooses which of several programs of a step runs next, until the fastest is known."""

    @property
    def turn(self) -> int | None:
        """Returns the index of the program that runs the next step; None for eager."""

    def note(self, turn: int | None, seconds: float) -> None:
        """Notes how long the last step took, and which program ran it."""


class StepProgram(ABC):
    """A compiled graph of the kind "step".

    Attributes:
        launches: How many steps it has launched. Copying results to where they belong does not
            count.
        from_disk: Whether it was loaded instead of compiled.
        prefers_eager: Whether the function itself is to take the steps from now on, in eager.
        comparison: While it is open whether that is faster: whose turn it is.
    """

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
        """Returns the graph's other outputs; may be called again.

        Args:
            taken: As `__call__` left it.
        """

    def report_to(self, report: "GraphReport") -> None:  # noqa: B027 - has a default
        """Sets the report of the graph, to which a program that learns later may add."""

    def dump(self) -> dict[str, bytes] | None:
        """Returns what has to be on disk to load it in another process; None if it cannot be."""
        return None
