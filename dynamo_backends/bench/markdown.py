"""Tables in Markdown."""

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """Returns a table.

    Args:
        head: Names of the columns.
        rows: Texts of the cells.
        words: How many columns, from the first, are words; others are numbers, at the right.
    """
    rule = ["---" if i < words else "--:" for i in range(len(head))]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *rows))
