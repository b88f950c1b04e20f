"""`python -m dynamo_backends.bench.child FILE`: one of a cell's processes.

The file says what to do, and gets what is found, in JSON lines: what is known is not lost if the
process is.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from dynamo_backends.bench.cells import Cell, How

OUT_OF_MEMORY = ("not enough memory", "out of memory", "cannot allocate memory", "bad_alloc")


def main(file: Path) -> None:
    """Does what a file asks for, and appends what comes of it.

    Args:
        file: Its first line has "cell", "how", "kind" ("cold" or "warm") and "parent".
    """
    asked = json.loads(file.read_text(encoding="utf-8").splitlines()[0])
    threading.Thread(target=_end_with, args=(asked["parent"],), daemon=True).start()

    def tell(**values: Any) -> None:
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(values) + "\n")

    try:
        import torch

        from dynamo_backends.bench import measuring, streaming
        from dynamo_backends.bench.sources import find
        from dynamo_backends.bench.suites.changing import StreamCase

        cell, how = Cell(**asked["cell"]), How(**asked["how"])
        tell(stage="load")
        if how.threads is not None:
            torch.set_num_threads(how.threads)
        case = find(how, cell.model, cell.batch)
        if isinstance(case, StreamCase):
            {"cold": streaming.cold, "warm": streaming.warm}[asked["kind"]](case, cell, how, tell)
        else:
            {"cold": measuring.cold, "warm": measuring.warm}[asked["kind"]](case, cell, how, tell)
    except BaseException as error:
        from dynamo_backends.interface.errors import brief_error

        tell(error=brief_error(error), out_of_memory=_is_out_of_memory(error))
        raise


def _is_out_of_memory(error: BaseException) -> bool:
    inner = getattr(error, "inner_exception", None) or error
    text = str(inner).lower()
    return isinstance(inner, MemoryError) or any(words in text for words in OUT_OF_MEMORY)


def _end_with(parent: int) -> None:
    """Ends this process when the one that started it is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
