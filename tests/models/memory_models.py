"""Models whose weights and inputs are put into every kind of memory (`tests.memory`)."""

import copy
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import dynamo_backends
from dynamo_backends import GraphReport
from dynamo_backends.bench.torchvision_shim import import_transformers
from dynamo_backends.conformance.subject import OPERATORS, compiler_of
from tests import memory
from tests.checking import assert_same, tensors

Model = tuple[nn.Module, dict[str, Tensor]]
"""In evaluation, and its inputs by name."""


def head(features: int) -> Callable[[Path], Model]:
    """The last layer of a language model: products of few rows and many columns."""

    def build(_: Path) -> Model:
        return nn.Linear(512, features), {"input": torch.randn(1, 32, 512)}

    return build


class ConvNet(nn.Module):
    """A small net with batch normalization, a large linear layer and a weight without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 16, 3, stride=2)
        self.norm = nn.BatchNorm2d(16)
        self.linear = nn.Linear(16 * 7 * 7, 128)
        self.none = nn.Parameter(torch.empty(0, 128))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.norm(self.first(x)).relu()).relu()
        y = self.linear(y.flatten(1))
        return torch.cat([y, functional.linear(y, self.none)], 1)


def conv_net(_: Path) -> Model:
    """See `ConvNet`."""
    return ConvNet(), {"x": torch.randn(2, 8, 16, 16)}


_VOCABULARY = 2048
_LAYERS = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
_ENDS = {"bos_token_id": 0, "eos_token_id": 0, "vocab_size": _VOCABULARY}


def _ids() -> dict[str, Any]:
    return {"input_ids": torch.randint(_VOCABULARY, (2, 12))}


def bert(_: Path) -> Model:
    """One layer, with a mask."""
    kind = import_transformers().BertModel
    config = kind.config_class(intermediate_size=128, vocab_size=_VOCABULARY, **_LAYERS)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[-1, 6:] = 0
    return kind(config), {**_ids(), "attention_mask": mask}


def llama(_: Path) -> Model:
    """One layer."""
    kind = import_transformers().LlamaForCausalLM
    config = kind.config_class(
        intermediate_size=128, num_key_value_heads=2, use_cache=False, **_LAYERS, **_ENDS
    )
    return kind(config), _ids()


def gpt2(folder: Path) -> Model:
    """One layer, from a file of safetensors."""
    kind = import_transformers().GPT2LMHeadModel
    config = kind.config_class(n_layer=1, n_embd=64, n_head=4, use_cache=False, **_ENDS)
    model = kind(config)
    model.save_pretrained(folder)
    memory.write_safetensors(memory.contents(model), folder / "model.safetensors")
    logging.getLogger("transformers.modeling_utils").setLevel(logging.ERROR)  # about PAD
    return kind.from_pretrained(folder), _ids()


MODELS: dict[str, Callable[[Path], Model]] = {
    "linear head": head(32000),
    "small linear head": head(4000),
    "conv net": conv_net,
    "bert": bert,
    "llama": llama,
    "gpt2": gpt2,
}


def build(name: str, folder: Path) -> Model:
    """A model in evaluation, with seeded weights."""
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    module, inputs = MODELS[name](folder)
    return module.eval().requires_grad_(False), inputs


def check(
    backend: str, name: str, kinds: Iterable[str], folder: Path, **options: Any
) -> list[GraphReport]:
    """Compares a model with eager, with weights and inputs of one kind after the other.

    The module stays the same and is compiled once; only what its tensors are changes.

    Args:
        backend: What compiles it.
        name: In `MODELS`.
        kinds: Names in `memory.KINDS`; the first is that of the first call.
        folder: For files.
        options: Of the backend.

    Returns:
        The reports of the compiled graphs.

    Raises:
        AssertionError: It says which kinds were wrong, or what ran in eager instead.
    """
    torch._dynamo.reset()
    module, inputs = build(name, folder / "model")
    given = memory.contents(module)
    twin = copy.deepcopy(module).double()
    compiled = torch.compile(
        module, backend=compiler_of(backend, **(OPERATORS | options)), dynamic=False
    )
    problems = {}
    limits = torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=256)
    with limits, dynamo_backends.record() as reports, torch.no_grad():
        for kind in kinds:
            memory.place_weights(module, given, kind, folder / kind)
            placed = memory.place_inputs(inputs, kind, folder / kind / "inputs")
            expected = _output(module(**placed))
            twin.load_state_dict(module.state_dict())
            wide = {name: _plain(tensor) for name, tensor in placed.items()}
            precise = _output(twin(**wide))
            try:
                assert_same(expected, _output(compiled(**placed)), precise)
            except AssertionError as error:
                problems[kind] = str(error)
    assert not problems, problems
    assert sum(r.ops_on_backend for r in reports) > 0
    assert not any(r.runtime_fallbacks for r in reports), [r.runtime_fallbacks for r in reports]
    return reports


def _plain(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.double() if tensor.is_floating_point() else tensor


def _output(result: Any) -> Tensor:
    return result if isinstance(result, Tensor) else tensors(tuple(result.values()))[0]
