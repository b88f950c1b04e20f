"""torch_xla itself, on the CPU: lazy tensors at every call against what it captures by Dynamo.

    make lazy-xla
    make lazy-xla ARGS="--models mlp bert --json torch_xla.json"

torch_xla needs an older torch than this package, so it has an environment of its own, which the
target makes once, and nothing of this package is imported here. The same columns for Lazy Tensor
Core and `openxla` are those of `benchmarks/lazy.py`. Inputs are on torch_xla's device beforehand,
and results stay there. "lazy" traces the model, looks the graph up, runs it and waits at each call;
"lazy, 10 calls" waits once for ten calls with different inputs, so that the tracing of one may
overlap the execution of the one before; "torch_xla openxla" is `torch.compile(backend="openxla")`.
"""

import copy
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import plain

COMMAND = "python benchmarks/lazy_torch_xla.py"
"""That `make lazy-xla` runs, with the Python of the environment that it makes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a result is wrong, 2 if it cannot run."""
    settings = plain.parser(__doc__ or "").parse_args(arguments)
    try:
        networks = plain.chosen(settings)
        torch_xla = started()
    except (plain.NoSuchNetworkError, ImportError) as error:
        print(error, file=sys.stderr)
        return 2
    known = plain.facts(torch_xla=torch_xla.__version__)
    print(known)
    rows, wrong = {}, []
    for name, network in networks.items():
        with torch.no_grad():
            ways = ways_of(network, torch_xla)
            expected = [network.make()(x) for x in network.inputs(plain.CALLS)]
            wrong += [f"{name}, {way}" for way in plain.wrong_ways(ways, expected)]
            rows[name] = plain.measure(ways, settings.rounds)
        torch._dynamo.reset()
    print(plain.markdown(rows))
    for each in wrong:
        print(f"{each}: the result is wrong", file=sys.stderr)
    if settings.json:
        content = {
            "kind": "lazy",
            "command": plain.typed(COMMAND, arguments),
            "environment": known,
            "results": rows,
            "wrong": wrong,
        }
        Path(settings.json).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return int(bool(wrong))


def published(content: Mapping[str, Any]) -> list[str]:
    """The table of results as `main` saves them, in Markdown."""
    return [plain.markdown(content["results"])]


def started() -> Any:
    """The package torch_xla, on the CPU.

    Raises:
        ImportError: It is not in this environment.
    """
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    os.environ.setdefault("PJRT_NPROC", str(torch.get_num_threads()))
    try:
        import torch_xla
    except ImportError as error:
        raise ImportError(
            f"torch_xla cannot be imported ({error}). `make lazy-xla` makes an environment that "
            "has it and runs this program there."
        ) from error
    return torch_xla


def ways_of(network: plain.Network, torch_xla: Any) -> dict[str, plain.Way]:
    """Eager, lazy tensors with one wait for one call and for ten, and what Dynamo captures."""
    device = torch_xla.device()
    model, inputs = network.make(), network.inputs(plain.CALLS)
    moved = copy.deepcopy(model).to(device)
    given = [x.to(device) for x in inputs]
    compiled = torch.compile(moved, backend="openxla")

    def lazy(calls: int) -> list[torch.Tensor]:
        results = []
        for x in given[:calls]:
            results.append(moved(x))
            torch_xla.sync()
        wait(torch_xla)
        return results

    def captured() -> list[torch.Tensor]:
        result = compiled(given[0])
        wait(torch_xla)
        return [result]

    return {
        "eager": plain.Way(lambda: [model(inputs[0])]),
        "lazy": plain.Way(lambda: lazy(1)),
        f"lazy, {plain.CALLS} calls": plain.Way(lambda: lazy(plain.CALLS), plain.CALLS),
        "torch_xla openxla": plain.Way(captured),
    }


def wait(torch_xla: Any) -> None:
    """Waits until all is computed that was asked for."""
    torch_xla.core.xla_model.wait_device_ops()


if __name__ == "__main__":
    raise SystemExit(main())
