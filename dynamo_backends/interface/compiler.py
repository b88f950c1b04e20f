"""Defines compiler objects: a backend with options, for `torch.compile(backend=...)`."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dynamo_backends import _torch_private as private
from dynamo_backends._autoload import check_first_calls
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.interface import captures
from dynamo_backends.interface.errors import DynamoBackendsError, OptionError
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.registry import get_backend, import_attribute, is_backend

_lock = fork_safe_lock()

IDLE_MODES = (None, "default", "reduce-overhead")
"""Modes that ask for what every backend does. The last is what transformers' `CompileConfig` says
where its user says nothing; on CUDA the option `cudagraphs` is what Inductor makes of it."""


class Compiler:
    """A backend with a set of options, as `torch.compile(backend=...)` takes it.

    There is one object per backend and set of options (see `compiler`): Dynamo recompiles when it
    is given another object.
    """

    _tags: tuple[str, ...] = ()

    def __init__(self, name: str, options: Mapping[str, Any]):
        self.name = name
        self._given = dict(options)

    @property
    def __name__(self) -> str:
        """Returns the backend's name, which torch reads when something is compiled."""
        check_first_calls()
        return self.name

    def __repr__(self) -> str:
        """Returns the call of `compiler` that makes this object."""
        options = "".join(f", {k}={v!r}" for k, v in self._given.items())
        return f"compiler({self.name!r}{options})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes copies, also in other processes, the one object for these options."""
        return _compiler_of, (self.name, self._given)

    def options(self, given: Mapping[str, Any] | None = None) -> Options:
        """Returns validated options; those given to `torch.compile` take precedence."""
        backend = get_backend(self.name)
        return backend.Options.parse({**self._given, **(given or {})}, self.name)

    def refuses_eager(self, given: Mapping[str, Any] | None = None) -> bool:
        """Returns whether `fallback="error"` is set, here or in `torch.compile(options=)`."""
        return {**self._given, **(given or {})}.get("fallback") == "error"

    def __call__(
        self,
        captured: Any,
        example_inputs: Sequence[Any],
        *,
        options: Mapping[str, Any] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        """Compiles what Dynamo captured (see `pipeline.captured.compile_captured`).

        Raises:
            OptionError: An option is wrong, or a `mode` was given that is not in `IDLE_MODES`:
                modes are Inductor's.
            DynamoBackendsError: The graph is not compiled, and the user has to change something.
                Users catch it by its class, for Dynamo lets it pass.
        """
        try:
            return self._compile(captured, example_inputs, options, mode)
        except DynamoBackendsError as error:
            raise private.make_dynamo_passing_error(error, sys._getframe()) from error.__cause__

    def _compile(
        self,
        captured: Any,
        example_inputs: Sequence[Any],
        options: Mapping[str, Any] | None,
        mode: str | None,
    ) -> Callable[..., Any]:
        if mode not in IDLE_MODES:
            raise OptionError(
                f"{self.name} does not support mode; mode={mode!r} is for Inductor. Use "
                "options={...} instead."
            )
        parsed = self.options(options)
        captures.note_graph()
        # By its name: it takes a second to load, and the pipeline lies above this layer.
        compile_captured = import_attribute("dynamo_backends.pipeline.captured:compile_captured")
        compiled: Callable[..., Any] = compile_captured(
            get_backend(self.name), captured, example_inputs, parsed
        )
        return compiled


_compilers: dict[tuple[Any, ...], Compiler] = {}


def compiler(name: str, /, **options: Any) -> Compiler:
    """Returns the one `Compiler` for a backend and options, so Dynamo reuses its cache.

    Examples:
        >>> torch.compile(model, backend=compiler("openxla", verify="always"))

    Raises:
        UnknownBackendError: There is no such backend.
        OptionError: An option is unknown or wrong.
    """
    if not is_backend(name):
        get_backend(name)
    if options:
        parsed = get_backend(name).Options.parse(options, name)
        options = {k: getattr(parsed, k) for k in sorted(options)}
    hashable = tuple(value for value in options.values() if _has_hash(value))
    key = (name, repr(options), hashable)  # values may be dicts, and functions may look alike
    with _lock:
        if key not in _compilers:
            _compilers[key] = Compiler(name, options)
        return _compilers[key]


def _compiler_of(name: str, options: Mapping[str, Any]) -> Compiler:
    return compiler(name, **options)


def _has_hash(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
