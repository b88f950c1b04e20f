"""`optimize`: Dynamo's capture with any compiler, as a decorator and as a context manager."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from dynamo_backends._torch_private import control
from dynamo_backends.capture.backends import CompilerFunction, resolve
from dynamo_backends.capture.first_call import check_block
from dynamo_backends.capture.scopes import Callback, Hook, Scope


def optimize(
    backend_or_compiler_fn: str | CompilerFunction,
    *,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    options: Mapping[str, Any] | None = None,
) -> "Optimize":
    """Captures graphs and hands them to a compiler.

    Examples:
        >>> def compiler(gm, example_inputs):
        ...     gm.graph.print_tabular()
        ...     return gm.forward
        >>> fast = optimize(compiler)(model)  # or @optimize(compiler)
        >>> with optimize(compiler):
        ...     model(images)

    As a decorator it takes functions, methods, generator functions (what they call is captured)
    and modules. Under `with`, what is called inside the block is captured, modules of torch.nn
    included; the block's own lines run in eager, as their frame was running before. The object
    holds no state: it can be nested, entered again while it is in use, and shared by threads, each
    of which is captured only in its own blocks.

    Args:
        backend_or_compiler_fn: A backend of this package or of another, or any that
            `torch.compile` knows, by name; a `Compiler`; or a function of a graph module and its
            example inputs (real tensors) that returns what runs the graph.
        dynamic: True captures sizes as symbols at once, False never, None once they vary.
        fullgraph: A graph break is an error.
        options: Of the backend; a function gets them as the keyword argument `options`.

    Raises:
        UnknownBackendError: Nothing is registered under that name; the message has the nearest.
        OptionError: An option is wrong.
        TypeError: The first argument is no backend.
    """
    backend = resolve(backend_or_compiler_fn, options, dynamic)
    return Optimize(backend, dynamic, fullgraph)


class Optimize(Scope):
    """What `optimize` returns.

    Attributes:
        backend: What Dynamo calls: the same object for equal arguments of `optimize`, so that
            Dynamo does not compile again.
    """

    def __init__(self, backend: str | CompilerFunction, dynamic: bool | None, fullgraph: bool):
        self.backend = backend
        self._dynamic = dynamic
        self._fullgraph = fullgraph
        self._context = self._new_context()
        check_block(self._context)

    def __repr__(self) -> str:
        """As a call that makes it, less what it is called without."""
        given = {"dynamic": self._dynamic, "fullgraph": self._fullgraph}
        settings = "".join(f", {k}={v!r}" for k, v in given.items() if v)
        return f"optimize({self.backend!r}{settings})"

    def __call__(self, fn: Any) -> Any:
        """Returns the function or module, captured whenever it is called."""
        if inspect.isgeneratorfunction(fn):
            return control.run_within(lambda: self, fn)
        return self._new_context()(fn)

    def _new_context(self) -> Any:
        """Dynamo's decorator; each function has its own, whose first call is checked."""
        return control.dynamo_context(self.backend, self._dynamic, self._fullgraph)

    def _callback(self) -> Callback:
        callback: Callable[..., Any] | None = getattr(self._context, "callback", None)
        return control.CaptureEverything(callback) if callback is not None else None

    def _hooks(self) -> tuple[Hook, ...]:
        return (control.CaptureEverything.ask_again, *control.entry_hooks(self._context))
