"""What is said where a package that only benchmarks need is missing."""

import sys
from collections.abc import Callable

import pytest

from dynamo_backends.bench import packages
from dynamo_backends.interface.errors import OptionError
from tests.bench.missing import hide_package


@pytest.mark.parametrize(
    ("name", "find"),
    [
        ("psutil", packages.import_psutil),
        ("scipy", packages.import_stats),
        ("jinja2", packages.import_jinja2),
    ],
)
def test_the_error_says_what_to_install(
    name: str, find: Callable[[], object], monkeypatch: pytest.MonkeyPatch
):
    hide_package(name, monkeypatch)
    with pytest.raises(
        OptionError, match=rf"need.? {name}.*pip install 'dynamo-backends\[bench\]'"
    ):
        find()


def test_an_error_inside_of_a_package_is_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "psutil", None)

    def fail(_: str) -> None:
        raise ModuleNotFoundError("No module named 'other'", name="other")

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(ModuleNotFoundError, match="other"):
        packages.import_psutil()
