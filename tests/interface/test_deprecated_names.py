"""Backends of other packages that use the names of the version before."""

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import fx

import dynamo_backends as db
from dynamo_backends import verify
from dynamo_backends.interface.executable import Executable


class Copied(Executable):
    def bind(self, weights: Any) -> Any:
        return list, ()


def test_a_backend_with_old_names_works_and_is_told():
    with pytest.warns(DeprecationWarning, match=r"Old\.keeps is called preserved_operators now"):

        class Old(db.Backend):
            name = "old"
            summary = "a backend of the version before"

            def availability(self) -> db.Availability:
                return db.Availability(True, "here")

            def keeps(self, options: Any) -> Collection[Any]:
                return [torch.ops.aten.gelu.default]

            def supports(self, node: fx.Node, options: Any) -> db.Support:
                return db.Support(True)

            def compile(self, graph: Any, options: Any) -> Executable:
                return Copied()

    assert Old().preserved_operators(Old.Options()) == [torch.ops.aten.gelu.default]
    with pytest.warns(DeprecationWarning, match="Old.lacks is called check_packages now"):
        assert Old().lacks() == Old().check_packages()


def test_old_members_of_executables():
    with pytest.warns(DeprecationWarning, match="Copied.rest is called release_memory now"):
        Copied().rest()
    with pytest.raises(AttributeError, match="'Copied' object has no attribute 'unheard_of'"):
        Copied().unheard_of  # noqa: B018


@pytest.mark.parametrize("old", ["difference", "in_float64", "widen"])
def test_old_names_of_functions_for_backend_authors(old: str):
    with pytest.warns(DeprecationWarning, match=f"verify.{old} is called"):
        assert getattr(verify, old).__name__ in verify.__all__
    with pytest.raises(AttributeError, match="has no attribute 'unheard_of'"):
        verify.unheard_of  # noqa: B018
