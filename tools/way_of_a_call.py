"""Files and functions of the package through which a call of a small model goes.

python tools/way_of_a_call.py
python tools/way_of_a_call.py --backend onnxrt --list

Counted for the first call, which captures and compiles, and for a later one: the files whose
functions run, those of them that are only imported, and how many functions are on the stack at once
at most. The cache of executables is an empty folder. Functions of torch, vendors and the standard
library are not counted.
"""

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1] / "dynamo_backends"


@dataclass
class Way:
    """What a call went through.

    Attributes:
        functions: Code that ran, in the order of its first frame.
        imported: Files whose modules were loaded.
        deepest: How many frames of the package were on one stack, at most.
    """

    functions: dict[CodeType, None] = field(default_factory=dict)
    imported: set[str] = field(default_factory=set)
    deepest: int = 0

    @property
    def files(self) -> list[str]:
        """The files whose functions ran, in the order of their first frame."""
        return list(dict.fromkeys(code.co_filename for code in self.functions))


def followed(call: Callable[[], Any]) -> Way:
    """Calls a function, and returns which of the package's code ran, in any thread."""
    way, prefix = Way(), f"{ROOT}{os.sep}"
    depth = threading.local()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(prefix):
            return
        if code.co_name == "<module>":
            way.imported.add(code.co_filename)
        elif not _is_loading(frame):
            now = getattr(depth, "now", 0) + (1 if event == "call" else -1)
            depth.now = max(now, 0)
            way.functions.setdefault(code)
            way.deepest = max(way.deepest, now)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return way


def _is_loading(frame: FrameType | None) -> bool:
    """Returns whether a frame belongs to a module that is being imported, as a decorator's does."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(str(ROOT)):
            return True
        frame = frame.f_back
    return False


def report(what: str, way: Way, listed: bool) -> None:
    """Prints what a call went through."""
    lines = sum(len(Path(name).read_text(encoding="utf-8").splitlines()) for name in way.files)
    print(
        f"{what}: {len(way.files)} files of {lines} lines, {len(way.functions)} functions, "
        f"{way.deepest} of them on the stack at once; {len(way.imported)} files were imported"
    )
    for name in way.files if listed else ():
        ran = sum(code.co_filename == name for code in way.functions)
        print(f"  {Path(name).relative_to(ROOT)}  {ran} functions")


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the way of a first and of a later call."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--backend", default="openxla")
    parser.add_argument("--list", action="store_true", help="name the files")
    settings = parser.parse_args(arguments)
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    x = torch.randn(2, 8)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        os.environ["DYNAMO_BACKENDS_CACHE"] = folder
        compiled = torch.compile(model, backend=settings.backend)
        first = followed(lambda: compiled(x))
        compiled(x)
        later = followed(lambda: compiled(x))
    report("first call", first, settings.list)
    report("later call", later, settings.list)


if __name__ == "__main__":
    main()
