"""One exception class per kind of failure, all under `DynamoBackendsError`.

Every message says what was given, what is valid, and what to do about it.
"""


class DynamoBackendsError(Exception):
    """Base class of every error that this package raises on purpose."""


class UnknownBackendError(DynamoBackendsError):
    """No backend is registered under the given name."""


class BackendUnavailableError(DynamoBackendsError):
    """The backend exists but cannot run here: a package or a device is missing."""


class OptionError(DynamoBackendsError):
    """An option is unknown, of the wrong type, or has a value that is not allowed."""


class DeviceError(DynamoBackendsError):
    """A device was asked for that is absent, or tensors live on different devices."""


class LoweringError(DynamoBackendsError):
    """One operator could not be lowered.

    Attributes:
        node_name: Name of the FX node, so that the pipeline can keep that node in eager.
        reason: Why, in words for the user.
    """

    def __init__(self, node_name: str, op: str, reason: str):
        super().__init__(f"{op} (node {node_name!r}) cannot be lowered: {reason}")
        self.node_name = node_name
        self.op = op
        self.reason = reason


class CompileError(DynamoBackendsError):
    """The vendor's compiler refused a graph whose operators were all lowered."""


class SaveError(DynamoBackendsError):
    """A compiled graph cannot be saved to a file, or loaded from one of another version."""


class FallbackRefusedError(DynamoBackendsError):
    """Something would have run in eager, and the option `fallback="error"` forbids that."""


class VerificationError(DynamoBackendsError):
    """With `verify=True`: a compiled graph's results differ from eager's."""


class StepCaptureError(DynamoBackendsError):
    """A training step cannot be captured, or run, as one graph (see `compile_step`)."""


class DoubleBackwardError(DynamoBackendsError, RuntimeError):
    """Gradients of gradients were asked of a compiled graph."""


class NormalFormError(DynamoBackendsError):
    """A graph lacks a property that it should have (see `dynamo_backends.graph.check`)."""


class DecisionError(DynamoBackendsError):
    """There is no such decision of autotune, or a file does not hold what it should."""


class ModelError(DynamoBackendsError):
    """The command line cannot build the model that it was given."""


class ForkedProcessError(DynamoBackendsError):
    """A runtime that was started before `fork()` was called in the child process."""
