"""The example of a server: batches, its fallback, its limits, and the script that loads it."""

import asyncio
import http.server
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynamo_backends.bench.torchvision_shim import import_transformers
from tests.bench.programs import load


@pytest.fixture(scope="module")
def serve() -> ModuleType:
    return load("examples/serve.py")


class Encoder(nn.Module):
    """For each sentence the mean of its tokens' rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(200, 4)

    def forward(self, numbers: Tensor, positions: Tensor, mask: Tensor, members: Tensor) -> Tensor:
        return members @ self.table(numbers) / members.sum(1, keepdim=True).clamp(1)


def tokenize(sentence: str) -> list[int]:
    return [ord(c) for c in sentence][:128]


class Watched:
    """A model that notes how many tokens and sentences it gets, and fails or waits when told to."""

    def __init__(self) -> None:
        self.model = Encoder().eval()
        self.sizes: list[tuple[int, int]] = []
        self.fails = False
        self.free = threading.Event()
        self.free.set()

    def __call__(self, numbers: Tensor, positions: Tensor, mask: Tensor, members: Tensor) -> Tensor:
        self.sizes.append((len(numbers), len(members) - 1))
        self.free.wait(60)
        if self.fails:
            raise RuntimeError("planted")
        return self.model(numbers, positions, mask, members)


def expected(model: Encoder, sentence: str) -> list[float]:
    with torch.no_grad():
        return model.table(torch.tensor(tokenize(sentence))).mean(0).tolist()


def during(service: Any, work: Callable[[], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        await service.start()
        try:
            return await work()
        finally:
            await service.stop()

    return asyncio.run(run())


async def behind(service: Any, watched: Watched, sentences: Sequence[str]) -> Any:
    """The answers to a sentence, and to others that come one by one while it is computed."""
    watched.sizes.clear()
    watched.free.clear()
    first = asyncio.create_task(service.embed(["first"]))
    while not watched.sizes:
        await asyncio.sleep(0.001)
    others = [asyncio.create_task(service.embed([s])) for s in sentences]
    await asyncio.sleep(0)
    watched.free.set()
    return await asyncio.gather(first, *others)


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [((2, 7, 3), [(12, 3)]), ((60, 68, 5), [(128, 2), (5, 1)]), ((128, 5), [(128, 1), (5, 1)]),
     ((3,) * 20, [(48, 16), (12, 4)])],
    ids=["all", "tokens", "longest", "sentences"],
)  # fmt: skip
def test_what_waits_together_is_a_batch_without_padding(
    serve: ModuleType, lengths: tuple[int, ...], sizes: list[tuple[int, int]]
):
    watched = Watched()
    service = serve.Service(watched, watched.model, tokenize)
    sentences = [chr(97 + i) * length for i, length in enumerate(lengths)]
    answers = during(service, lambda: behind(service, watched, sentences))
    assert watched.sizes == [(5, 1), *sizes]
    for (vector,), sentence in zip(answers, ("first", *sentences), strict=True):
        assert vector == pytest.approx(expected(watched.model, sentence), rel=1e-5, abs=1e-6)
    assert service.metrics.requests == service.metrics.sentences == len(answers)


def test_each_thread_computes_a_batch(serve: ModuleType):
    model, meet = Encoder().eval(), threading.Barrier(2)

    def together(*given: Tensor) -> Tensor:
        meet.wait(60)  # nobody goes on alone
        return model(*given)

    service = serve.Service(together, model, tokenize, workers=2)

    async def work() -> Any:
        return await asyncio.gather(service.embed(["ab"]), service.embed(["xyz"]))

    ((one,), (other,)) = during(service, work)
    assert one == pytest.approx(expected(model, "ab"), abs=1e-6)
    assert other == pytest.approx(expected(model, "xyz"), abs=1e-6)
    assert service.metrics.fallbacks == 0


def test_sentences_in_one_row_are_kept_apart(serve: ModuleType):
    numbers, positions, mask, members = serve.packed([[7, 8, 9], [5, 6]])
    assert numbers.tolist() == [7, 8, 9, 5, 6]
    assert positions.tolist() == [0, 1, 2, 0, 1]
    assert torch.equal(mask, torch.block_diag(torch.ones(3, 3), torch.ones(2, 2)).bool())
    assert members.tolist() == [[1, 1, 1, 0, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]
    assert [x.shape[-1] for x in serve.packed([[7]])] == [2, 2, 2, 2]  # too few: one is added


def test_the_packed_encoder_gives_what_one_sentence_at_a_time_gives(serve: ModuleType):
    transformers = import_transformers()
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        vocab_size=50,
    )  # fmt: skip
    bert = transformers.BertModel(config).eval()
    sentences = [[1, 2, 3, 4, 5], [6, 7], [8] * 9]
    with torch.no_grad():
        packed = serve.PackedEncoder(bert)(*serve.packed(sentences))
        means = [bert(torch.tensor([s])).last_hidden_state[0].mean(0) for s in sentences]
    alone = nn.functional.normalize(torch.stack(means), dim=1)
    torch.testing.assert_close(packed[:3], alone)


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
        watched.sizes.clear()
        watched.free.clear()
        first = asyncio.create_task(service.embed(["a"]))
        while not watched.sizes:
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
    monkeypatch.setattr(serve, "encoder", lambda: model)
    monkeypatch.setattr(serve, "tokenizer", lambda: tokenize)
    threads = torch.get_num_threads()
    try:
        assert serve.main(["save", str(tmp_path / "small.dbp"), "--backend", "onnxrt"]) == 0
        service = serve.loaded(str(tmp_path / "small.dbp"), workers=2)
    finally:
        torch.set_num_threads(threads)

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
    seconds = 0.0

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        (sentence,) = json.loads(self.rfile.read(length))["sentences"]
        assert 3 <= len(sentence.split()) <= 126
        self._answer(json.dumps({"vectors": [self.vector]}))

    def do_GET(self) -> None:
        lines = f"embed_compiled_total {self.compiled}", f"process_cpu_seconds_total {self.seconds}"
        type(self).seconds += 1.5
        self._answer("\n".join(lines))

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
    assert program.main([url, "--seconds", "1.5"]) == status
    shown = capsys.readouterr().out
    assert f"{compiled} compilations" in shown
    assert ("p95" in shown) == (vector == (0.6, 0.8))


def test_two_servers_take_turns(url: str, capsys: pytest.CaptureFixture[str]):
    program = load("examples/serve_load.py")
    # The same one under two names; it says that 1.5 seconds have passed whenever it is asked.
    other = url.replace("127.0.0.1", "localhost")
    assert program.main([url, "--against", other, "--seconds", "1", "--rounds", "2"]) == 0
    one, answers, second, _, ratios = capsys.readouterr().out.splitlines()
    assert one.startswith(f"{url}: ")
    assert second.startswith(f"{other}: ")
    each = float(one.removesuffix(" s of processors for 1000").split()[-1])
    assert each * int(answers.split()[0]) / 1000 == pytest.approx(2 * 1.5, rel=0.1)
    assert "times the requests" in ratios
    assert "times the p95" in ratios


def test_only_this_machine_is_loaded(capsys: pytest.CaptureFixture[str]):
    assert load("examples/serve_load.py").main(["http://example.com"]) == 2
    assert "is not on this machine" in capsys.readouterr().err
