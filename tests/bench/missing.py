"""Packages that are not there."""

import sys

import pytest


def hide_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes imports of a package fail as if it were not installed, until the test ends."""
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)
