"""The example of a server: batches, its fallback, its limits, and the script that loads it."""

import asyncio
import http.server
import json
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bench.programs import load


@pytest.fixture(scope="module")
def serve() -> ModuleType:
    return load("examples/serve.py")


class Encoder(nn.Module):
    """The mean of the tokens' rows of a table, where the mask is not 0."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200, 4)

    def forward(self, numbers: Tensor, mask: Tensor) -> Tensor:
        kept = mask.unsqueeze(-1).to(torch.float32)
        return (self.table(numbers) * kept).sum(1) / kept.sum(1)


def tokenize(sentence: str) -> list[int]:
    return [ord(c) for c in sentence][:128]


class Watched:
    """A model that notes the sizes of its batches, and fails or waits when told to."""

    def __init__(self) -> None:
        self.model = Encoder().eval()
        self.sizes: list[tuple[int, ...]] = []
        self.fails = False
        self.free = threading.Event()
        self.free.set()

    def __call__(self, numbers: Tensor, mask: Tensor) -> Tensor:
        self.free.wait(60)
        self.sizes.append(tuple(numbers.shape))
        if self.fails:
            raise RuntimeError("planted")
        return self.model(numbers, mask)


def expected(model: Encoder, sentence: str) -> list[float]:
    numbers = torch.tensor([tokenize(sentence)])
    with torch.no_grad():
        return model(numbers, torch.ones_like(numbers))[0].tolist()


def during(service: Any, work: Callable[[], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        await service.start()
        try:
            return await work()
        finally:
            await service.stop()

    return asyncio.run(run())


def test_what_waits_together_is_one_padded_batch(serve: ModuleType):
    watched = Watched()
    service = serve.Service(watched, watched.model, tokenize)

    async def work() -> Any:
        watched.sizes.clear()
        watched.free.clear()
        first = asyncio.create_task(service.embed(["first"]))
        await asyncio.sleep(0)  # it is in the queue
        while not service._waiting.empty():
            await asyncio.sleep(0.001)
        others = [asyncio.create_task(service.embed([s])) for s in ("ab", "abcdefg", "xyz")]
        await asyncio.sleep(0)
        watched.free.set()
        return await asyncio.gather(first, *others)

    answers = during(service, work)
    assert watched.sizes == [(2, 5), (3, 7)]
    for (vector,), sentence in zip(answers, ("first", "ab", "abcdefg", "xyz"), strict=True):
        assert vector == pytest.approx(expected(watched.model, sentence), abs=1e-6)
    assert service.metrics.requests == service.metrics.sentences == 4


def test_a_request_that_the_compiled_model_fails_at_is_answered_by_eager(serve: ModuleType):
    watched = Watched()
    service = serve.Service(watched, watched.model, tokenize)

    async def work() -> Any:
        watched.fails = True
        ((failed,), watched.fails) = await service.embed(["abc"]), False
        return failed, (await service.embed(["abc"]))[0]

    failed, after = during(service, work)
    assert failed == pytest.approx(expected(watched.model, "abc"), abs=1e-6) == after
    assert service.metrics.fallbacks == 1
    assert "embed_fallbacks_total 1" in service.metrics.text(0)


def test_too_many_are_refused_and_the_rest_is_answered(
    serve: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(serve, "QUEUE", 3)
    watched = Watched()
    service = serve.Service(watched, watched.model, tokenize)

    async def work() -> Any:
        watched.free.clear()
        first = asyncio.create_task(service.embed(["a"]))
        await asyncio.sleep(0)
        while not service._waiting.empty():
            await asyncio.sleep(0.001)
        second = asyncio.create_task(service.embed(["a", "b", "c"]))
        await asyncio.sleep(0)
        with pytest.raises(serve.BusyError, match="more than 3 sentences are waiting"):
            await service.embed(["d"])
        watched.free.set()
        return await asyncio.gather(first, second)

    assert list(map(len, during(service, work))) == [1, 3]
    assert service.metrics.refused == 1


def test_an_error_of_eager_reaches_its_request_and_the_service_goes_on(serve: ModuleType):
    watched = Watched()
    service = serve.Service(watched, watched, tokenize)

    async def work() -> Any:
        watched.fails = True
        with pytest.raises(RuntimeError, match="planted"):
            await service.embed(["abc"])
        watched.fails = False
        return await service.embed(["abc"])

    assert len(during(service, work)) == 1


def test_metrics_have_quantiles_and_counts(serve: ModuleType):
    metrics = serve.Metrics(requests=100)
    metrics.latencies.extend(i / 1000 for i in range(100))
    lines = metrics.text(compiled=2).splitlines()
    assert "embed_requests_total 100" in lines
    assert "embed_compiled_total 2" in lines
    assert 'embed_request_seconds{quantile="0.5"} 0.050000' in lines
    assert 'embed_request_seconds{quantile="0.95"} 0.095000' in lines


@pytest.mark.parametrize(
    "body", [None, [], {}, {"sentences": "a"}, {"sentences": []}, {"sentences": ["a"] * 17}]
)
def test_bodies_that_are_no_requests_are_refused(serve: ModuleType, body: Any):
    with pytest.raises(ValueError, match=r"the body has to be|1 to 16 sentences"):
        serve.checked(body)


def test_a_package_is_served_without_compilations(
    serve: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("onnxruntime")
    model = Encoder().eval()
    inputs = torch.ones(3, 9, dtype=torch.int64), torch.ones(3, 9, dtype=torch.int64)
    demo = ModuleType("demo")
    demo.sentence_encoder = lambda: (
        model,
        {"input_ids": inputs[0], "attention_mask": inputs[1]},
    )
    monkeypatch.setitem(sys.modules, "demo", demo)
    monkeypatch.setattr(serve, "tokenizer", lambda: tokenize)
    assert serve.main(["save", str(tmp_path / "small.dbp")]) == 0
    service = serve.loaded(str(tmp_path / "small.dbp"))

    async def work() -> Any:
        return [await service.embed(["x" * n]) for n in (1, 5, 77, 128, 300)]

    answers = during(service, work)
    for (vector,), n in zip(answers, (1, 5, 77, 128, 300), strict=True):
        assert vector == pytest.approx(expected(model, "x" * n), abs=1e-5)
    assert service.compiled == 0
    assert service.metrics.fallbacks == 0


def test_the_application_answers(serve: ModuleType):
    pytest.importorskip("starlette")  # the example's own requirement: the extra `examples`
    watched = Watched()
    app = serve.application(serve.Service(watched, watched.model, tokenize))

    async def call(method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
        await app(scope, receive, send)
        return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:])

    async def run() -> list[tuple[int, bytes]]:
        async with app.router.lifespan_context(app):
            return [
                await call("POST", "/embed", b'{"sentences": ["abc"]}'),
                await call("POST", "/embed", b"no JSON"),
                await call("GET", "/metrics"),
                await call("GET", "/health"),
            ]

    (status, body), (wrong, _), (_, metrics), (healthy, _) = asyncio.run(run())
    assert (status, wrong, healthy) == (200, 400, 200)
    (vector,) = json.loads(body)["vectors"]
    assert vector == pytest.approx(expected(watched.model, "abc"), abs=1e-6)
    assert b"embed_requests_total 1\n" in metrics


class Answering(http.server.BaseHTTPRequestHandler):
    vector = (0.6, 0.8)
    compiled = 0

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        (sentence,) = json.loads(self.rfile.read(length))["sentences"]
        assert 3 <= len(sentence.split()) <= 126
        self._answer(json.dumps({"vectors": [self.vector]}))

    def do_GET(self) -> None:
        self._answer(f"embed_requests_total 3\nembed_compiled_total {self.compiled}\n")

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("vector", "compiled", "status"),
    [((0.6, 0.8), 0, 0), ((0.6, 0.8), 1, 1), ((0.6, 0.9), 0, 1)],
    ids=["right", "compiled", "wrong"],
)
def test_the_load_is_bounded_and_judged(
    vector: tuple[float, ...],
    compiled: int,
    status: int,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(Answering, "vector", vector)
    monkeypatch.setattr(Answering, "compiled", compiled)
    program = load("examples/serve_load.py")
    assert program.main([url, "--seconds", "0.3"]) == status
    shown = capsys.readouterr().out
    assert f"{compiled} compilations" in shown
    assert ("p95" in shown) == (vector == (0.6, 0.8))


def test_only_this_machine_is_loaded(capsys: pytest.CaptureFixture[str]):
    assert load("examples/serve_load.py").main(["http://example.com"]) == 2
    assert "is not on this machine" in capsys.readouterr().err
