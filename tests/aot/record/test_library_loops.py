"""Steps by replay: training loops of libraries that are not installed everywhere, unchanged.

Each trains twice in float64, in eager and compiled, for 20 steps, as those of `test_real_loops.py`.
Requires timm, diffusers, peft, and stable-baselines3 with gymnasium.
"""

import random
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dynamo_backends.bench.torchvision_shim import import_torchvision, import_transformers
from tests.aot.record.test_real_loops import (
    EVERY,
    STEPS,
    WORDS,
    Compile,
    _assert_equal,
    _left,
    _text,
)
from tests.aot.step_backends import BACKENDS


def _require(*names: str) -> None:
    import_torchvision()  # the libraries import it
    import_transformers()
    for name in names:
        pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)


def _seed() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def adapters(compiler: Compile) -> dict[str, Any]:
    """Low-rank adapters of peft in a language model, as torchtune's recipe trains them."""
    import peft

    transformers = import_transformers()
    _seed()
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    lora = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"]
    )
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config).double(), lora).double()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.01)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 3, STEPS)
    log: list[Any] = []
    words = running = 0.0

    def step(batches: list[dict[str, Tensor]]) -> Tensor:
        nonlocal words, running
        for batch in batches:
            labels = batch.pop("labels")
            scores = model(**batch).logits
            labels = torch.hstack((labels[..., 1:], torch.full_like(labels[..., -1:], -100)))
            loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)
            count = (labels != -100).sum()
            words, running = words + count, running + loss * count
            (loss * count).backward()
        for p in trained:
            if p.grad is not None:
                p.grad.mul_(1 / words)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        shown = running.item() / words.item()
        log.append({"loss": shown, "lr": optimizer.param_groups[0]["lr"], "norm": norm.item()})
        words = running = 0.0
        return loss

    run = compiler(step, model=model, optimizer=optimizer)
    for i in range(STEPS):
        texts = (_text(2 * i), _text(2 * i + 1))
        run([{"input_ids": t, "labels": t, "attention_mask": torch.ones_like(t)} for t in texts])
        if i % EVERY == 0:
            model.eval()
            with torch.no_grad():
                log.append(model(input_ids=_text(100), labels=_text(100)).loss.item())
            model.train()
    return _left(model, optimizer, log=log)


def diffusion(compiler: Compile) -> dict[str, Any]:
    """The example of diffusers for unconditional images, with its average of weights."""
    import diffusers
    from diffusers.optimization import get_cosine_schedule_with_warmup
    from diffusers.training_utils import EMAModel

    _seed()
    model = diffusers.UNet2DModel(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(8, 16), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    ).double()  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    noises = diffusers.DDPMScheduler(num_train_timesteps=100)
    schedule = get_cosine_schedule_with_warmup(optimizer, 3, STEPS)
    average = EMAModel(model.parameters(), decay=0.99, use_ema_warmup=True)
    log: list[Any] = []

    def step(clean: Tensor) -> Tensor:
        noise = torch.randn(clean.shape, dtype=clean.dtype)
        times = torch.randint(0, noises.config.num_train_timesteps, (clean.shape[0],))
        guess = model(noises.add_noise(clean, noise, times), times, return_dict=False)[0]
        loss = F.mse_loss(guess, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        logs = {"loss": loss.detach().item(), "lr": schedule.get_last_lr()[0], "step": len(log)}
        log.append(logs)
        return loss

    run = compiler(step, model=model, optimizer=optimizer)
    for i in range(STEPS):
        generator = torch.Generator().manual_seed(i)
        run(torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=generator))
        if i % EVERY == 0:
            average.store(model.parameters())
            average.copy_to(model.parameters())
            with torch.no_grad():
                image = torch.ones(1, 3, 8, 8, dtype=torch.float64)
                log.append(model(image, 3).sample.sum().item())
            average.restore(model.parameters())
    shadow = [p.clone() for p in average.shadow_params]
    return _left(model, optimizer, log=log, average=shadow)


def images(compiler: Compile, cutmix: float = 0.0) -> dict[str, Any]:
    """The step of timm's train.py: mixed images, clipped gradients, an average of the weights."""
    import timm
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from timm.utils import AverageMeter, ModelEmaV3

    _seed()
    model = timm.create_model("resnet10t", num_classes=5, drop_path_rate=0.1).double()
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
    schedule = CosineLRScheduler(
        optimizer, t_initial=STEPS, warmup_t=3, warmup_lr_init=1e-5, t_in_epochs=False
    )
    average = ModelEmaV3(model, decay=0.99, use_warmup=True)
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=cutmix, num_classes=5)
    criterion, losses = SoftTargetCrossEntropy(), AverageMeter()
    log: list[Any] = []
    updates = 0

    def step(x: Tensor, target: Tensor) -> Tensor:
        nonlocal updates
        x, target = mixup(x, target)
        loss = criterion(model(x), target)
        loss.backward()
        timm.utils.dispatch_clip_grad(
            timm.models.model_parameters(model, exclude_head=False), value=1.0, mode="norm"
        )
        optimizer.step()
        updates += 1
        average.update(model, step=updates)
        optimizer.zero_grad()
        losses.update(loss.item(), x.size(0))
        if updates % EVERY == 0:
            log.append(f"{losses.val:#.3g} ({losses.avg:.9f}) {optimizer.param_groups[0]['lr']}")
        schedule.step_update(num_updates=updates, metric=losses.avg)
        return loss

    run = compiler(step, model=[model, average], optimizer=optimizer)
    for i in range(STEPS):
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(4, 3, 32, 32, dtype=torch.float64, generator=generator)
        run(x, torch.randint(0, 5, (4,), generator=generator))
        if i % EVERY == 0:
            model.eval()
            with torch.no_grad():
                log.append((model(x).sum().item(), average.module(x).sum().item()))
            model.train()
    return _left(model, optimizer, log=log, average=average.state_dict())


def _features() -> Any:
    """The library's features in float64, so that its networks may be."""
    from stable_baselines3.common.torch_layers import FlattenExtractor

    class Features(FlattenExtractor):
        def forward(self, observations: Tensor) -> Tensor:
            return super().forward(observations).double()

    return Features


def _agent(kind: str, environment: str, **settings: Any) -> Any:
    import stable_baselines3

    _seed()
    policy = {"net_arch": [16], "features_extractor_class": _features()}
    agent = getattr(stable_baselines3, kind)(
        "MlpPolicy", environment, seed=0, device="cpu", policy_kwargs=policy, **settings
    )
    agent.policy.double()
    return agent


def ppo(compiler: Compile) -> dict[str, Any]:
    """`PPO.train` of stable-baselines3: two epochs over a rollout in one step."""
    agent = _agent("PPO", "CartPole-v1", n_steps=32, batch_size=16, n_epochs=2)
    run = compiler(agent.train, model=agent.policy, optimizer=agent.policy.optimizer)
    losses: list[Any] = []

    def train() -> None:
        run()
        losses.append(dict(agent.logger.name_to_value))

    agent.train = train
    agent.learn(32 * STEPS)
    for values in losses:
        values.pop("time/fps", None)
    return _left(agent.policy, agent.policy.optimizer, losses=_training(losses))


def sac(compiler: Compile) -> dict[str, Any]:
    """`SAC.train` of stable-baselines3: three optimizers, a target network, a learned entropy."""
    agent = _agent("SAC", "Pendulum-v1", learning_starts=20, batch_size=16)
    optimizers = [agent.actor.optimizer, agent.critic.optimizer, agent.ent_coef_optimizer]
    run = compiler(agent.train, model=agent.policy, optimizer=optimizers)
    losses: list[Any] = []

    def train(**settings: Any) -> None:
        run(**settings)
        losses.append(dict(agent.logger.name_to_value))

    agent.train = train
    agent.learn(20 + STEPS)
    return _left(
        agent.policy, optimizers[0], losses=_training(losses),
        others=[o.state_dict() for o in optimizers[1:]], entropy=agent.log_ent_coef,
    )  # fmt: skip


def _training(losses: list[dict[str, Any]]) -> list[dict[str, float]]:
    return [{k: float(v) for k, v in values.items() if k.startswith("train/")} for values in losses]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("backend", BACKENDS)
def test_low_rank_adapters(backend: str) -> None:
    _require("peft")
    llama = "transformers.models.llama.modeling_llama"
    _assert_equal(adapters, backend, most_eager=4, single=(llama,))


@pytest.mark.parametrize("backend", BACKENDS)
def test_diffusion(backend: str) -> None:
    _require("diffusers")
    _assert_equal(diffusion, backend, most_eager=4, single=("diffusers.models.embeddings",))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_train_script_of_timm(backend: str) -> None:
    _require("timm")
    _assert_equal(images, backend)


@pytest.mark.long
def test_boxes_of_other_sizes_are_other_ways() -> None:
    """Half of the batches have a box from another image, of another size at each call."""
    _require("timm")
    _assert_equal(lambda compiler: images(compiler, cutmix=1.0), "aot_eager", most_eager=12)


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
def test_ppo(backend: str) -> None:
    _require("stable_baselines3")
    _assert_equal(ppo, backend, most_eager=6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sac(backend: str) -> None:
    _require("stable_baselines3")
    _assert_equal(sac, backend, most_eager=6)
