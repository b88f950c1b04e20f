"""Lazy Tensor Core, recorded at every call and once, and `openxla`, against eager.

    python benchmarks/lazy.py
    python benchmarks/lazy.py --models mlp bert --json lazy.json

The same table of torch_xla's own lazy tensors: `make lazy-xla`. Here "lazy" is the model on the
device "lazy" of torch: each call copies its input there, records the model, looks the graph up,
runs it and brings the result back; "lazy, 10 calls" waits once for ten calls with different inputs,
so that the recording of one may overlap the execution of the one before. `ltc_trace` does at every
call what "lazy" does, for the graph that Dynamo captured; `ltc` and `openxla` compile that once.
"""

import copy
import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.progress import track

import harness
import plain
from dynamo_backends.lazy import lowering

COMPILED = ("ltc_trace", "ltc", "openxla")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a result is wrong."""
    settings = plain.parser(__doc__ or "").parse_args(arguments)
    console = harness.announce()
    try:
        networks = plain.chosen(settings)
    except plain.NoSuchNetworkError as error:
        console.print(f"[red]{error}[/]")
        return 2
    rows, wrong = {}, []
    for name, network in track(networks.items(), "measuring", console=console, transient=True):
        with torch.no_grad():
            ways = ways_of(network)
            expected = [network.make()(x) for x in network.inputs(plain.CALLS)]
            wrong += [f"{name}, {way}" for way in plain.wrong_ways(ways, expected)]
            rows[name] = plain.measure(ways, settings.rounds)
        torch.compiler.reset()
        gc.collect()
    print(plain.markdown(rows))
    for each in wrong:
        console.print(f"[red]{each}: the result is wrong[/]")
    if settings.json:
        records = [{"model": name, **times} for name, times in rows.items()]
        harness.save_json(settings.json, "lazy", records, settings=vars(settings), wrong=wrong)
    return int(bool(wrong))


def published(content: Mapping[str, Any]) -> list[str]:
    """The table of results as `main` saves them, in Markdown."""
    rows = [dict(row) for row in content["results"]]
    return [plain.markdown({row.pop("model"): row for row in rows})]


def ways_of(network: plain.Network) -> dict[str, plain.Way]:
    """Eager, lazy tensors with one wait for one call and for ten, and what is compiled."""
    lowering.start()
    model, inputs = network.make(), network.inputs(plain.CALLS)
    moved = copy.deepcopy(model).to("lazy")

    def lazy(calls: int) -> list[torch.Tensor]:
        results = []
        for x in inputs[:calls]:
            results.append(moved(x.to("lazy")))
            torch._lazy.mark_step()
        return [result.to("cpu") for result in results]

    ways = {
        "eager": plain.Way(lambda: [model(inputs[0])]),
        "lazy": plain.Way(lambda: lazy(1)),
        f"lazy, {plain.CALLS} calls": plain.Way(lambda: lazy(plain.CALLS), plain.CALLS),
    }
    for name in COMPILED:
        compiled = harness.compile_model(model, (inputs[0],), name, fullgraph=True).function
        ways[name] = plain.Way(lambda compiled=compiled: [compiled(inputs[0])])
    return ways


if __name__ == "__main__":
    raise SystemExit(main())
