"""Generates with transformers and a static cache that is written to where it is.

    python examples/generate.py
    python examples/generate.py --backend onnxrt --sample

The model is a small Llama from random weights, so what it says means nothing; a real one is loaded
with `AutoModelForCausalLM.from_pretrained`, and its tokenizer pads prompts with
`padding_side="left", pad_to_multiple_of=32`.
"""

import argparse
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import dynamo_backends

BUCKET = 32


def make_model(layers: int, features: int) -> LlamaForCausalLM:
    """A Llama of random weights that never ends a text by itself."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=features, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=4 * features, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def make_prompt(length: int) -> dict[str, Tensor]:
    """Random ids, padded on the left to a multiple of 32, as a tokenizer would."""
    ids = torch.randint(1, 512, (1, length))
    missing = (-length % BUCKET, 0)
    return {"input_ids": pad(ids, missing), "attention_mask": pad(torch.ones_like(ids), missing)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Answers a few prompts; returns 1 if one is answered otherwise than in eager."""
    settings = parse(arguments)
    model = make_model(settings.layers, settings.features)
    eager = model.forward
    compiled = torch.compile(eager, backend=settings.backend)
    how = GenerationConfig(
        cache_implementation="static", max_cache_len=256, max_new_tokens=settings.tokens,
        min_new_tokens=settings.tokens, do_sample=settings.sample, pad_token_id=0,
        disable_compile=True,  # transformers would compile on accelerators
    )  # fmt: skip
    table = Table("prompt", "seconds", "tokens/s", "executables", "as in eager")
    same = True
    with dynamo_backends.record() as reports:
        for length in settings.prompts:
            prompt = make_prompt(length)
            model.forward = compiled  # type: ignore[method-assign]
            torch.manual_seed(1)
            start = time.perf_counter()
            answer = model.generate(**prompt, generation_config=how)
            seconds = time.perf_counter() - start
            model.forward = eager  # type: ignore[method-assign]
            torch.manual_seed(1)
            is_same = torch.equal(answer, model.generate(**prompt, generation_config=how))
            same = same and is_same
            made = sum(r.executables for r in reports)
            speed = f"{settings.tokens / seconds:.0f}"
            table.add_row(str(length), f"{seconds:.2f}", speed, str(made), str(is_same))
    Console().print(table)
    return 0 if same else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="openxla")
    parser.add_argument("--prompts", type=int, nargs="+", default=[20, 27, 31], metavar="LENGTH")
    parser.add_argument("--tokens", type=int, default=64, help="so many are generated for each")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--sample", action="store_true", help="draws tokens, with a seed")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
