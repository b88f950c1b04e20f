"""pytest's options for `BackendConformance`. Loads nothing else: pytest reads it at every start."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

PREFIX = "--conformance-"


def pytest_addoption(parser: "pytest.Parser") -> None:
    """Declares the options for pytest."""
    group = parser.getgroup("conformance", "conformance of torch.compile backends")
    group.addoption(
        f"{PREFIX}full", action="store_true", help="all samples of all operators, in all dtypes"
    )
    group.addoption(
        f"{PREFIX}groups", metavar="A,B", help="instead of the groups that a test class names"
    )
    group.addoption(
        f"{PREFIX}time-limit", type=float, metavar="S", help="seconds that a check may take"
    )
