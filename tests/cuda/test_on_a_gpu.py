"""Every backend that runs on an NVIDIA GPU, there: values, gradients, streams, steps.

Results are compared with eager's and with float64's. On a machine without a GPU nothing of this can
run: what can be tested without one is beside each backend, with doubles that compute.

    DYNAMO_BACKENDS_TEST_DEVICE=cpu python -m pytest tests/cuda    # the same checks on the CPU
"""

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import compile_step
from dynamo_backends.conformance.comparing import assert_same, widen
from dynamo_backends.conformance.subject import Subject, float64_copy, gradients
from dynamo_backends.interface.report import record

DEVICE = os.environ.get("DYNAMO_BACKENDS_TEST_DEVICE", "cuda")
BACKENDS = ("openxla", "onnxrt", "cudagraphs_eager", "inductor_freezing", "tensorrt", "nvfuser")
TRAINS = ("openxla", "cudagraphs_eager")
MOST = {"openxla": 0, "inductor_freezing": 0, "onnxrt": 0}
"""How many operators may stay in eager, of backends that promise something."""

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="torch sees no CUDA device here"
)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def usable(name: str) -> str:
    """The backend's name; skips where it cannot run on the device."""
    available = dynamo_backends.get_backend(name).availability()
    if not available.usable:
        pytest.skip(f"{name}: {available.reason}")
    if available.devices and DEVICE not in available.devices:
        pytest.skip(f"{name} runs on {', '.join(available.devices)} here")
    return name


def network() -> nn.Module:
    layers = (
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
    return nn.Sequential(*layers, nn.Conv2d(8, 16, 3, stride=2), nn.SiLU(), nn.Flatten(),
                         nn.Linear(16 * 7 * 7, 10), nn.LogSoftmax(-1)).to(DEVICE)  # fmt: skip


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(DEVICE)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (network, (4, 3, 32, 32)),
    "attention": (encoder, (2, 16, 32)),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", BACKENDS)
def test_results_are_right_and_nothing_stays_in_eager(name: str, model: str):
    make, shape = MODELS[model]
    subject = Subject(usable(name), {})
    with subject.watching() as reports:
        subject.check(make().eval(), torch.randn(shape, device=DEVICE))
    assert reports
    assert not any(r.runtime_fallbacks for r in reports), reports
    if name in MOST:
        left = [f for r in reports for f in r.fallbacks]
        assert sum(f.count for f in left) <= MOST[name], left


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", TRAINS)
def test_gradients_are_right(name: str, model: str):
    make, shape = MODELS[model]
    subject, owner = Subject(usable(name), {}), make().train()
    inputs = (torch.randn(shape, device=DEVICE),)
    exact = float64_copy(owner)
    with subject.watching() as reports:
        got = gradients(subject.compile(owner), owner, inputs)
    assert {r.kind for r in reports} >= {"forward", "backward"}
    assert not any(r.runtime_fallbacks for r in reports), reports
    assert_same(
        gradients(owner, owner, inputs),
        got,
        gradients(exact, exact, (inputs[0].double(),)),
        "gradient",
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_changed_weights_are_seen(name: str):
    model = network().eval()
    compiled = torch.compile(model, backend=usable(name))
    x = torch.randn(4, 3, 32, 32, device=DEVICE)
    with torch.no_grad():
        for _ in range(3):
            assert_same(model(x), compiled(x), widen(model)(widen(x)))
            for parameter in model.parameters():
                parameter.mul_(1.1)
        model.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()})
        assert_same(model(x), compiled(x), widen(model)(widen(x)))


@pytest.mark.parametrize("name", BACKENDS)
def test_the_only_row_is_indexed(name: str):
    """A trial that asked for another row would end all that this process does on the device."""

    def rows(x: Tensor, places: Tensor) -> Tensor:
        return (x[places] + x.gather(0, places[:, None])).relu()

    x, places = torch.randn(1, 8, device=DEVICE), torch.zeros(5, dtype=torch.int64, device=DEVICE)
    found = torch.compile(rows, backend=usable(name))(x, places)
    torch.testing.assert_close(found, rows(x, places))


@pytest.mark.parametrize("name", BACKENDS)
def test_batches_of_all_sizes(name: str):
    model = encoder().eval()
    compiled = torch.compile(model, backend=usable(name))
    with torch.no_grad():
        for batch, length in ((2, 16), (3, 9), (5, 21), (1, 7), (3, 9), (4, 64)):
            x = torch.randn(batch, length, 32, device=DEVICE)
            assert_same(
                model(x), compiled(x), widen(model)(widen(x)), f"output of {batch} x {length}"
            )


@pytest.mark.parametrize("name", BACKENDS)
def test_inputs_that_are_not_dense_or_not_aligned(name: str):
    def f(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a @ b + 1, b.t() * 2

    compiled = torch.compile(f, backend=usable(name))
    memory = torch.randn(1000, device=DEVICE)
    for offset in (0, 1, 3):
        a = memory[offset : offset + 20].view(5, 4).t()
        b = memory[offset + 100 : offset + 130].view(5, 6)[:, ::2]
        for got, want, exact in zip(
            compiled(a, b), f(a, b), f(a.double(), b.double()), strict=True
        ):
            assert_same(want, got, exact)


@pytest.mark.parametrize("name", BACKENDS)
def test_dropout_draws_what_eager_draws(name: str):
    def f(x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, training=True) * 2 + torch.rand_like(x)

    compiled = torch.compile(f, backend=usable(name))
    x = torch.ones(64, 64, device=DEVICE)
    for seed in range(3):
        torch.manual_seed(seed)
        want = f(x)
        torch.manual_seed(seed)
        if name.startswith("inductor"):
            assert compiled(x).shape == want.shape  # Inductor draws numbers of its own
        else:
            assert torch.equal(compiled(x), want)


@pytest.mark.parametrize("name", BACKENDS)
def test_buffers_are_updated(name: str):
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.norm(x)

    model, other = Counting().to(DEVICE), Counting().to(DEVICE)
    compiled = torch.compile(model, backend=usable(name))
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(16, 8, device=DEVICE)
            torch.testing.assert_close(compiled(x), other(x))
    for (key, got), want in zip(
        model.state_dict().items(), other.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(got, want, msg=key)


@pytest.mark.skipif(DEVICE != "cuda", reason="streams are CUDA's")
@pytest.mark.parametrize("name", BACKENDS)
def test_work_is_in_the_order_of_the_callers_stream(name: str):
    compiled = torch.compile(lambda x: (x * 2 + 1) @ x, backend=usable(name))
    x = torch.randn(64, 64, device=DEVICE)
    want = (x * 2 + 1) @ x
    compiled(x)
    torch.cuda.synchronize()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for _ in range(20):
                y = torch.zeros_like(x)
                torch.cuda._sleep(2_000_000)  # about a millisecond
                y.copy_(x)
                result = compiled(y)
                y.fill_(float("nan"))  # must not be seen by the call before
                copied = result.clone()
                result.fill_(7.0)
                torch.testing.assert_close(copied, want)


@pytest.mark.skipif(DEVICE != "cuda", reason="streams are CUDA's")
@pytest.mark.parametrize("make", [network, nn.ReLU], ids=["with weights", "without"])
def test_calls_return_before_the_device_has_finished(make: Callable[[], nn.Module]):
    model = make().eval()
    compiled = torch.compile(model, backend=usable("openxla"))
    x = torch.randn(4, 3, 32, 32, device=DEVICE)
    with torch.no_grad():
        compiled(x)
        compiled(x)
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # about a second
        result = compiled(x)
        done = torch.cuda.Event()
        done.record()
        assert not done.query()
        assert_same(model(x), result, widen(model)(widen(x)))


@pytest.mark.parametrize("name", BACKENDS)
def test_threads_call_at_the_same_time(name: str):
    model = network().eval()
    compiled = torch.compile(model, backend=usable(name))
    inputs = [torch.randn(4, 3, 32, 32, device=DEVICE) for _ in range(4)]
    with torch.no_grad():
        wanted = [model(x) for x in inputs]
        compiled(inputs[0])
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    wrong: list[str] = []

    def work(k: int) -> None:
        mine = torch.cuda.stream(torch.cuda.Stream()) if DEVICE == "cuda" else torch.no_grad()
        with mine, torch.no_grad():
            for _ in range(30):
                got = compiled(inputs[k])
                try:
                    torch.testing.assert_close(got, wanted[k], rtol=1e-3, atol=1e-3)
                except AssertionError as error:
                    wrong.append(f"{k}: {error}")

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


@pytest.mark.skipif(DEVICE != "cuda", reason="torch counts the memory of CUDA devices")
@pytest.mark.parametrize("name", BACKENDS)
def test_memory_is_flat(name: str):
    compiled = torch.compile(network().eval(), backend=usable(name))
    x = torch.randn(4, 3, 32, 32, device=DEVICE)
    with torch.no_grad():
        for _ in range(10):
            compiled(x)
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        for _ in range(500):
            compiled(x)
        torch.cuda.synchronize()
    assert before - torch.cuda.mem_get_info()[0] <= 8 << 20


@pytest.mark.parametrize("backend", ["openxla", "inductor", "cudagraphs_eager"])
def test_steps_train_as_eager_does(backend: str):
    def losses(dtype: torch.dtype, compiled: bool) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(1)
        model = network().to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=DEVICE == "cuda")

        def train(x: Tensor, y: Tensor) -> Tensor:
            loss = nn.functional.nll_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step: Any = train
        if compiled:
            step = compile_step(train, model=model, optimizer=optimizer, backend=backend)
        made = torch.Generator().manual_seed(2)
        result = []
        for _ in range(6):
            x = torch.randn(8, 3, 32, 32, generator=made).to(DEVICE, dtype)
            y = torch.randint(10, (8,), generator=made).to(DEVICE)
            result.append(float(step(x, y)))
        return result, {k: v.double() for k, v in model.state_dict().items()}

    if backend != "inductor":
        usable(backend)
    exact, plain = losses(torch.float64, False), losses(torch.float32, False)
    got = losses(torch.float32, True)
    eager_error = max(abs(a - b) for a, b in zip(plain[0], exact[0], strict=True))
    error = max(abs(a - b) for a, b in zip(got[0], exact[0], strict=True))
    assert error <= 10 * eager_error + 1e-4, (got[0], plain[0], exact[0])
    for key, value in exact[1].items():
        torch.testing.assert_close(got[1][key], value, rtol=2e-3, atol=2e-3, msg=key)


def test_autotune_chooses_among_them():
    model = network().eval()
    options = {"budget_s": 40}
    with record() as reports:
        compiled = torch.compile(model, backend="autotune", options=options)
        x = torch.randn(4, 3, 32, 32, device=DEVICE)
        with torch.no_grad():
            assert_same(model(x), compiled(x), widen(model)(widen(x)))
            assert_same(model(x), compiled(x), widen(model)(widen(x)))
    assert reports


@pytest.mark.parametrize("name", ["openxla"])
def test_bfloat16(name: str):
    subject = Subject(usable(name), {})
    with subject.watching() as reports:
        subject.check(encoder().eval().bfloat16(),
                      torch.randn(2, 16, 32, device=DEVICE, dtype=torch.bfloat16))  # fmt: skip
    assert not any(r.runtime_fallbacks for r in reports), reports
