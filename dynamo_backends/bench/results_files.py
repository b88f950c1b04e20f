"""Files of results: written whole, and continued only by runs that they belong together with."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamo_backends.interface.errors import DynamoBackendsError
from dynamo_backends.runtime.cache import write_file_atomically


class ResultError(DynamoBackendsError):
    """A file of results cannot be read or continued; the message says why and what to do."""


def write(path: Path, kind: str, content: Mapping[str, Any]) -> None:
    """Writes results; the file appears whole or not at all.

    Args:
        path: The file; its folder is made if absent.
        kind: What was measured.
        content: What else there is, in types that JSON has.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file_atomically(path, (json.dumps({"kind": kind, **content}, indent=1) + "\n").encode())


def read(path: Path, kind: str) -> dict[str, Any]:
    """Returns what a file holds.

    Args:
        path: The file.
        kind: What has to have been measured.

    Raises:
        ResultError: There is no such file, or it is something else.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or content.get("kind") != kind:
            found = content.get("kind") if isinstance(content, dict) else type(content).__name__
            raise ValueError(f"it contains {found!r}")
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise damaged(path, kind, error) from error
    return content


def damaged(path: Path, kind: str, error: Exception) -> ResultError:
    """Creates the error for a file that is not a result of this kind.

    Args:
        path: The file.
        kind: What it should hold.
        error: What was found out.
    """
    return ResultError(f"{path} is not a result of `{kind}` ({type(error).__name__}: {error}).")


def check_context(path: Path, found: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Checks that results were made as new ones will be; the dates may differ.

    Args:
        path: The file.
        found: What its results depend on.
        own: What new ones depend on.

    Raises:
        ResultError: They were not.
    """
    different = differences(found, own)
    if different:
        raise ResultError(
            f"{path} holds results that were measured under other conditions: "
            f"{'; '.join(different)}. Pass another file, or delete this one."
        )


def differences(found: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Returns in words how two contexts differ, apart from their dates."""
    return [
        f"{name} is {own.get(name)!r} and was {found.get(name)!r}"
        for name in sorted({*found, *own} - {"date"})
        if found.get(name) != own.get(name)
    ]
