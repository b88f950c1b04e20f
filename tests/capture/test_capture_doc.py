"""The blocks of docs/capture.md run in order and print what the page shows."""

import dis
from collections.abc import Iterator
from types import CodeType
from typing import Any

import pytest

from tests.pages import Example, compared, differences, examples, executed, run


@pytest.fixture(scope="module")
def page() -> Iterator[tuple[list[Example], dict[str, Any]]]:
    with executed("docs/capture.md") as found:
        yield found


def test_the_page_shows_what_its_code_prints(page: Any) -> None:
    assert differences(page[0]) == []
    assert compared(page[0]) >= 7


def names(code: CodeType) -> list[str]:
    return [i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"]


def test_on_any_python_the_bytecode_is_as_the_page_says(page: Any) -> None:
    _, namespace = page
    original, first = namespace["toy"].__code__, namespace["rewritten"]["toy"]
    assert names(original) == []
    called = [name for name in names(first) if name.startswith(("__compiled_fn", "__resume_at"))]
    assert [name.split("_")[2] for name in called] == ["compiled", "resume", "resume"]
    assert any("JUMP" in i.opname and "IF_FALSE" in i.opname for i in dis.get_instructions(first))
    assert not any(
        i.opname == "BINARY_OP" for i in dis.get_instructions(first) if i.argrepr in "+/"
    )
    second = namespace["rewritten"]["torch_dynamo_resume_in_toy"]
    assert [n.startswith("__compiled_fn") for n in names(second)].count(True) == 1


def test_a_page_that_shows_something_else_would_be_noticed() -> None:
    first, second = examples("```python\nprint(1)\n```\n```text\n2\n```\n```python\nx = 1\n```\n")
    assert run(first, {}) == "1\n" != first.shown
    assert differences([first]) == [("2\n", "1\n")]
    assert second.shown is None
