"""What backends make: executables of graphs, and programs of training steps."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from dynamo_backends.interface.report import GraphReport

Bound = Callable[[list["Tensor"]], list["Tensor"]]


class Parts(Protocol):
    """Where the parts of compiled blocks are kept (see `Executable.dump`)."""

    def get(self, key: str) -> Mapping[str, bytes] | None:
        """Returns the parts stored under a key; None if there are none."""

    def put(self, key: str, parts: Mapping[str, bytes]) -> object:
        """Stores parts under a key."""

    def drop(self, key: str) -> None:
        """Forgets a key."""


class Executable(ABC):
    """One compiled graph.

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
        """Prepares the weights.

        Args:
            weights: The tensors of `Graph.weights`, in order.

        Returns:
            A function from the list of activations to the list of outputs, and the positions of
            the weights whose contents it copied. Those are watched for changes of content; the
            others must share memory with the given tensors, and are watched for a new address.
        """

    def bind_live(self, weights: Sequence["Tensor"]) -> tuple[Bound, Collection[int]] | None:
        """As `bind`, for weights that keep changing: without preparing what takes long.

        `binding` decides on it. By default there is no such form (None), and `bind` is called.
        """
        return None

    def report_to(self, report: "GraphReport") -> None:  # noqa: B027 - has a default
        """Gives it the report of its graph, for what turns out only when it is called."""

    def rest(self) -> None:  # noqa: B027 - has a default
        """Gives back what memory it keeps between calls: something else is to take much, once.

        Calls of other threads may be running.
        """

    def dump(self) -> dict[str, bytes] | None:
        """What `SavesExecutables.load` needs in another process; None: it cannot be kept."""
        return None


class StepComparison(Protocol):
    """Who takes the next step of several that compute the same, until the fastest is known."""

    @property
    def turn(self) -> int | None:
        """Which of the compiled ones takes the next step; None: eager does."""

    def note(self, turn: int | None, seconds: float) -> None:
        """Notes how long the step took of one whose turn it was."""


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
        """Runs one step.

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
        """Gets the report of its graph, to which a program that learns later may add."""

    def dump(self) -> dict[str, bytes] | None:
        """Returns what must be kept on disk to load it in another process; None: cannot be."""
        return None
