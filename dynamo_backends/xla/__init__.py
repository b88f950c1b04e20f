"""Defines the backend `openxla`."""

from typing import Any

from dynamo_backends.interface.compiler import compiler

openxla = compiler("openxla")

__all__ = ["openxla", "to_device"]


def __getattr__(name: str) -> Any:
    if name == "to_device":  # imports jax
        from dynamo_backends.xla.device_transfer import to_device

        return to_device
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
