"""One of a cell's processes: `python -m dynamo_backends.bench.child`.

It is told what to do (see `workers.worker_process`), and says what it finds as soon as that is
known: it may not live to the end.
"""

from typing import Any

from dynamo_backends.bench.cells import BenchConfig, Cell
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.workers.worker_process import Say, serve

OUT_OF_MEMORY = ("not enough memory", "out of memory", "cannot allocate memory", "bad_alloc")


def answer(request: dict[str, Any], say: Say) -> dict[str, Any]:
    """Does what is asked for, and says what comes of it.

    Args:
        request: "cell", "how" and "kind" ("cold" or "warm").
        say: Tells the parent.

    Returns:
        The error that ended it, if one did.
    """
    try:
        import torch

        from dynamo_backends.bench import measuring, streaming
        from dynamo_backends.bench.sources import find
        from dynamo_backends.bench.suites.streams import StreamCase

        def tell(**values: Any) -> None:
            say(values)

        cell, how = Cell(**request["cell"]), BenchConfig(**request["how"])
        tell(stage="load")
        if how.threads is not None:
            torch.set_num_threads(how.threads)
        case = find(how, cell.model, cell.batch)
        if isinstance(case, StreamCase):
            {"cold": streaming.measure_cold, "warm": streaming.measure_warm}[request["kind"]](
                case, cell, how, tell
            )
        else:
            {"cold": measuring.measure_cold, "warm": measuring.measure_warm}[request["kind"]](
                case, cell, how, tell
            )
    except BaseException as error:
        return {"error": brief_error(error), "out_of_memory": _is_out_of_memory(error)}
    return {}


def _is_out_of_memory(error: BaseException) -> bool:
    inner = getattr(error, "inner_exception", None) or error
    text = str(inner).lower()
    return isinstance(inner, MemoryError) or any(words in text for words in OUT_OF_MEMORY)


if __name__ == "__main__":
    serve(answer, ends_with_thread=True)
