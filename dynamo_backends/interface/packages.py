"""Looks up which packages are installed, and their versions, without importing them."""

import functools
import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

_FOLDER = re.compile(r"([^-]+)(-.*)?\.(dist|egg)-info")


def is_module_installed(module: str) -> bool:
    """Returns whether a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # the package around it is not there, or it has no spec
        return False


def describe_missing(packages: Mapping[str, str]) -> str:
    """Describes missing packages, as "a and b are not installed"; empty if none.

    Args:
        packages: Modules, each with the package that has it.
    """
    names = list(
        dict.fromkeys(p for module, p in packages.items() if not is_module_installed(module))
    )
    verb = "is" if len(names) == 1 else "are"
    return f"{' and '.join(names)} {verb} not installed" if names else ""


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """Returns versions of the named packages that are installed; accepts "name-*".

    Args:
        names: As on the index; "nvfuser-*" stands for all packages whose names begin so.
    """
    found: dict[str, str] = {}
    for name in names:
        if name.endswith("*"):
            found |= {n: _version(n) for n in sorted(_installed()) if n.startswith(name[:-1])}
        elif version := _version(name):
            found[name] = version
    return found


@functools.cache
def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def _installed() -> frozenset[str]:
    """The normalized names of all packages, from those of their folders: files take a second."""
    places = [Path(entry or ".") for entry in sys.path]
    folders = (p.name for place in places if place.is_dir() for p in place.iterdir())
    names = (_FOLDER.fullmatch(folder) for folder in folders)
    return frozenset(re.sub("[-_.]+", "-", name[1]).lower() for name in names if name)
