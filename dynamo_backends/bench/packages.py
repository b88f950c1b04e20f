"""Packages that only benchmarks need, imported when they are used."""

import importlib
from typing import Any

from dynamo_backends.interface.errors import OptionError


def import_psutil() -> Any:
    """Returns what knows of other processes; see `_imported`."""
    return _imported("psutil", "bench needs psutil")


def import_stats() -> Any:
    """Tests of significance; see `_imported`."""
    return _imported("scipy.stats", "p-values need scipy")


def import_jinja2() -> Any:
    """Returns what fills in pages; see `_imported`."""
    return _imported("jinja2", "pages need jinja2")


def _imported(name: str, need: str) -> Any:
    """Returns a module of such a package.

    Args:
        name: Name of the module.
        need: What needs it, for the error.

    Raises:
        OptionError: The package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, name.partition(".")[0]):
            raise
        remedy = "pip install 'dynamo-backends[bench]'"
        raise OptionError(f"{need}, which is not installed; run: {remedy}") from error
