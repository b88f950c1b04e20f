"""Fills in the templates of pages, each one file without network, and makes Markdown tables."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo_backends.bench.packages import import_jinja2

_TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **values: Any) -> str:
    """Returns an HTML page from a template.

    Args:
        template: Name of the template.
        **values: What it shows.

    Raises:
        OptionError: jinja2 is not installed.
    """
    jinja2 = import_jinja2()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page: str = environment.get_template(template).render(values)
    return page


def environment_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns what is known of a machine, in names and texts.

    Args:
        facts: In types that JSON has; what is empty is left out.
    """
    return [
        (name.replace("_", " "), _text(value))
        for name, value in facts.items()
        if value not in ("", None, [], {})
    ]


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {of}" for name, of in value.items() if of)
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(map(str, value))
    return str(value)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """Returns a table in Markdown.

    Args:
        head: Names of the columns.
        rows: Texts of the cells.
        words: How many columns, from the first, are words; others are numbers, at the right.
    """
    rule = ["---" if i < words else "--:" for i in range(len(head))]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *rows))
