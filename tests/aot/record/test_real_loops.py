"""Steps by replay: the loops of libraries and well-known scripts, unchanged inside of one step.

Each trains twice in float64, in eager and compiled, for 20 steps: with logging, a schedule, clipped
gradients, an average of the weights and an evaluation every five steps. Backends other than
`aot_eager` round in another order. There what libraries compute in float32, whatever the dtype of
the model, is computed in float64, too, so that differences are none of float32's roundings.
"""

import contextlib
import copy
import importlib
import math
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamo_backends import compile_step
from dynamo_backends.bench.torchvision_shim import import_transformers
from tests.aot.record.checks import compare, copied
from tests.aot.step_backends import BACKENDS

STEPS, EVERY, WORDS = 20, 5, 32

Compile = Callable[..., Any]
"""`compile_step` with its settings, or what returns the function as it is."""


def _eager(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    return function


def _text(i: int, length: int = 12) -> Tensor:
    return torch.randint(0, WORDS, (3, length), generator=torch.Generator().manual_seed(i))


def _words(i: int) -> tuple[Tensor, Tensor]:
    text = _text(i)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _assert_equal(
    train: Callable[[Compile], dict[str, Any]],
    backend: str,
    most_eager: int = 3,
    single: tuple[str, ...] = (),
) -> None:
    """Trains twice, and compares what is left.

    Args:
        train: What trains, given what compiles.
        backend: What compiles the step.
        most_eager: How many steps may be recorded.
        single: Modules of libraries that name float32.
    """
    steps: list[Any] = []

    def compile_it(function: Callable[..., Any], **objects: Any) -> Any:
        steps.append(compile_step(function, **objects, backend=backend, python="replay"))
        return steps[-1]

    with contextlib.nullcontext() if backend == "aot_eager" else in_double(*single):
        expected = train(_eager)
        compare("left", train(compile_it), expected)
    (step,) = steps
    assert not step.refusals, step.refusals
    assert step.eager_steps <= most_eager, step.divergences


class _Double(ModuleType):
    """`torch`, whose float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def in_double(*modules: str) -> Iterator[None]:
    """Inside, casts to float32 and tensors without a dtype are float64.

    Args:
        modules: Where this holds for `torch.float32` as well.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        stack.enter_context(mock.patch.object(Tensor, "float", Tensor.double))
        for name in modules:
            module = importlib.import_module(name)
            stack.enter_context(mock.patch.object(module, "torch", _Double("torch")))
        yield


class Block(nn.Module):
    """A layer of a small GPT."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(features) for _ in range(2)])
        self.qkv = nn.Linear(features, 3 * features, bias=False)
        self.out = nn.Linear(features, features, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(features, 4 * features), nn.GELU(), nn.Linear(4 * features, features)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, length, features]."""
        b, n, c = x.shape
        q, k, v = (
            t.view(b, n, self.heads, c // self.heads).transpose(1, 2)
            for t in self.qkv(self.norms[0](x)).split(c, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).contiguous().view(b, n, c)))
        return x + self.dropout(self.mlp(self.norms[1](x)))


class GPT(nn.Module):
    """A small GPT whose output layer is its table of words."""

    def __init__(self, features: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, features), nn.Embedding(64, features)
        self.blocks = nn.ModuleList([Block(features, 2) for _ in range(layers)])
        self.norm = nn.LayerNorm(features)
        self.head = nn.Linear(features, WORDS, bias=False)
        self.words.weight = self.head.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        """Scores and, with targets, the loss."""
        x = self.words(ids) + self.places(torch.arange(ids.size(1)))
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        if targets is None:
            return scores, None
        return scores, F.cross_entropy(scores.view(-1, WORDS), targets.view(-1), ignore_index=-1)


def gpt(compiler: Compile) -> dict[str, Any]:
    """A script in the style of nanoGPT: two micro-batches, cosine rate, decay in groups, EMA."""
    torch.manual_seed(0)
    model = GPT().double()
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    log: list[str] = []
    state = SimpleNamespace(number=0, best=math.inf)
    warm, low = 5, 1e-4

    def rate(n: int) -> float:
        if n < warm:
            return 1e-3 * (n + 1) / (warm + 1)
        part = (n - warm) / (STEPS - warm)
        return low + 0.5 * (1.0 + math.cos(math.pi * part)) * (1e-3 - low)

    def step(micro_batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        lr = rate(state.number)
        for group in optimizer.param_groups:
            group["lr"] = lr
        for ids, targets in micro_batches:
            _, loss = model(ids, targets)
            loss = loss / len(micro_batches)
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average.update_parameters(model)
        if state.number % EVERY == 0:
            lossf = loss.item() * len(micro_batches)
            log.append(
                f"iter {state.number}: loss {lossf:.4f}, norm {norm.item():.3f}, lr {lr:.2e}"
            )
        state.number += 1
        return loss

    run = compiler(step, model=[model, average], optimizer=optimizer)
    for i in range(STEPS):
        run([_words(2 * i), _words(2 * i + 1)])
        if i % EVERY == 0:
            model.eval()
            with torch.no_grad():
                ids, targets = _words(1000 + i)
                state.best = min(state.best, model(ids, targets)[1].item())
                log.append(f"{average(ids)[0].sum().item():.6f}")
            model.train()
    return _left(model, optimizer, log=log, best=state.best, average=average.state_dict())


def _left(model: nn.Module, optimizer: Any, **further: Any) -> dict[str, Any]:
    return copied(
        {
            "model": dict(model.state_dict()),
            "optimizer": optimizer.state_dict(),
            "random": torch.get_rng_state(),
            **further,
        }
    )


@contextlib.contextmanager
def _accelerate_anew() -> Iterator[None]:
    """The first `Accelerator` of a process decides for all."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def _gpt2() -> Any:
    transformers = import_transformers()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config).double()


def huggingface(compiler: Compile, folder: str) -> dict[str, Any]:
    """`Trainer.training_step`, and what its loop does after it."""
    transformers = import_transformers()
    with _accelerate_anew():
        arguments = transformers.TrainingArguments(
            folder, per_device_train_batch_size=3, max_steps=STEPS, warmup_steps=4, use_cpu=True,
            learning_rate=1e-3, weight_decay=0.01, max_grad_norm=0.5, report_to=[], seed=0,
            lr_scheduler_type="cosine",
        )  # fmt: skip
        trainer = transformers.Trainer(_gpt2(), arguments, train_dataset=[{"x": 0}] * 60)
        trainer.create_optimizer_and_scheduler(STEPS)
        model, optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
        scheduler = trainer.lr_scheduler
        trainer.current_gradient_accumulation_steps = 1  # set by its loop
        model.train()
        average = copy.deepcopy(model)
        log: list[Any] = []

        def step(inputs: dict[str, Tensor]) -> Tensor:
            loss = trainer.training_step(model, inputs)
            norm = trainer.accelerator.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
            optimizer.step()
            scheduler.step()
            model.zero_grad()
            trainer.state.global_step += 1
            with torch.no_grad():
                for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(p, 0.1)
            if trainer.state.global_step % EVERY == 0:
                log.append((trainer.state.global_step, f"{loss.item():.6f} {float(norm):.6f}"))
                log.append(scheduler.get_last_lr()[0])
            return loss

        run = compiler(step, model=[model, average], optimizer=trainer.optimizer)
        losses = []
        for i in range(STEPS):
            ids = _text(i)
            losses.append(run({"input_ids": ids, "labels": ids}).detach().clone())
            if i % EVERY == 0:
                model.eval()
                with torch.no_grad():
                    log.append(model(input_ids=ids, labels=ids).loss.item())
                model.train()
        return _left(model, trainer.optimizer, log=log, losses=losses, mean=average.state_dict())


def accelerated(compiler: Compile) -> dict[str, Any]:
    """The loop of accelerate's documentation, with gradients of two batches."""
    from accelerate import Accelerator

    with _accelerate_anew():
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        inner = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
        plain = torch.optim.AdamW(inner.double().parameters(), lr=1e-2)
        model, optimizer, scheduler = accelerator.prepare(
            inner, plain, torch.optim.lr_scheduler.CosineAnnealingLR(plain, STEPS)
        )
        log: list[Any] = []

        def step(x: Tensor, y: Tensor) -> Tensor:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    log.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            return loss

        run = compiler(step, model=model, optimizer=plain)
        generator = torch.Generator().manual_seed(1)
        for i in range(STEPS):
            x = torch.randn(6, 4, dtype=torch.float64, generator=generator)
            loss = run(x, torch.randint(0, 3, (6,), generator=generator))
            log.append((loss.item(), scheduler.get_last_lr()))
            if i % EVERY == 0:
                model.eval()
                with torch.no_grad():
                    log.append(accelerator.gather_for_metrics(model(x)).sum().item())
                model.train()
        return _left(model, plain, log=log)


def lightning(compiler: Compile) -> dict[str, Any]:
    """Automatic optimization: Lightning gives the optimizer a closure with the training step."""
    import_transformers()  # torchmetrics imports it, and it imports torchvision
    import lightning as L

    torch.manual_seed(0)
    log: list[Any] = []

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
            self.double()
            self.compiled: Any = None

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
            if number % EVERY == 0:
                log.append((self.trainer.global_step, outputs["loss"].item()))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        def optimizer_step(self, epoch: int, number: int, optimizer: Any, closure: Any) -> None:
            def step() -> None:
                L.LightningModule.optimizer_step(self, epoch, number, optimizer, closure)

            if self.compiled is None:
                self.compiled = compiler(
                    lambda run: run(), model=self.net, optimizer=optimizer.optimizer
                )
            self.compiled(step)

    module = Module()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6 * STEPS, 4, dtype=torch.float64, generator=generator)
    data = torch.utils.data.TensorDataset(x, torch.randint(0, 3, (6 * STEPS,), generator=generator))
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.5,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data, 6))
    return _left(module, trainer.optimizers[0], log=log)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_script_like_nanogpt(backend: str) -> None:
    _assert_equal(gpt, backend, most_eager=4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_trainer_of_hugging_face(backend: str, tmp_path: Any) -> None:
    _assert_equal(lambda compiler: huggingface(compiler, str(tmp_path)), backend, most_eager=4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_accelerate(backend: str) -> None:
    _assert_equal(accelerated, backend, most_eager=4)


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated")
@pytest.mark.parametrize("backend", BACKENDS)
def test_lightning_with_automatic_optimization(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", torch.compile)  # its import replaces it
    _assert_equal(lightning, backend, most_eager=4)
