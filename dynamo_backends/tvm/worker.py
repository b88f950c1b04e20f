"""The other process of tuning: compiles and measures schedules, where a crash costs only a trial.

python -m dynamo_backends.tvm.worker

Requests and answers are JSON, one per line, on standard input and output.
"""

from typing import Any

from tvm.script import from_source

from dynamo_backends.tvm.measuring import Bench
from dynamo_backends.tvm.search import structural_fingerprint
from dynamo_backends.workers.worker_process import serve


class Worker:
    """Answers requests about one function at a time."""

    def __init__(self) -> None:
        self._bench: Bench | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns what a request asks for, or the "problem"."""
        try:
            return self._answer(**request)
        except Exception as error:
            return {"problem": f"{type(error).__name__}: {error}"}

    def _answer(self, do: str, **arguments: Any) -> dict[str, Any]:
        if do == "open":
            return self._open(**arguments)
        if self._bench is None:
            raise ValueError("no function is being tuned")
        if do == "attempt":
            made = self._bench.attempt()
            if made is None:
                return {"exhausted": True}
            proposal, seconds = made
            return {"seconds": seconds, "trace": proposal.trace}
        decision = self._bench.decide(arguments["traces"])
        refused = self._bench.refused
        told = {"problem": "; ".join(refused)} if refused else {}
        if decision is None and self._bench.disturbed:
            return {"disturbed": True, **told}
        if decision is None:
            return {"winner": None, **told}
        winner, found, gain = decision
        speedup = [gain.value, gain.low, gain.high]
        return {"winner": winner, "mark": found, "speedup": speedup, **told}

    def _open(
        self, function: str, expected: str, inputs: int, threads: int, seed: int
    ) -> dict[str, Any]:
        self._bench = None  # its memory is free before the next one's is needed
        read = from_source(function)
        if structural_fingerprint(read) != expected:
            raise ValueError("TVM cannot read the program that it has written")
        self._bench = Bench(read, inputs, threads, seed)
        return {"seconds": self._bench.seconds}


if __name__ == "__main__":
    worker = Worker()
    serve(lambda request, _: worker.answer(request))
