"""Writes the tables of verdicts that come with the package, for this class of processors.

python tools/verdicts.py [onnxrt ov ...]
python tools/verdicts.py --check

They are in `dynamo_backends/runtime/shipped/`. Every model of the suites is captured, with static
and with symbolic shapes, for inference and for training, and all trials that its graphs ask for are
made; nothing else is compiled. What was found for a model is kept in build/verdicts, so that a run
that was interrupted goes on; --kept writes what is there. --check says which tables do not hold for
this machine and source.
"""

import argparse
import contextlib
import functools
import importlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import harness  # noqa: E402
from dynamo_backends import get_backend  # noqa: E402
from dynamo_backends.bench.suites import ModelCase, call  # noqa: E402
from dynamo_backends.bench.suites.case import image  # noqa: E402
from dynamo_backends.bench.suites.streams import embeddings  # noqa: E402
from dynamo_backends.bench.torchvision_shim import import_torchvision  # noqa: E402
from dynamo_backends.interface.errors import CompileError  # noqa: E402
from dynamo_backends.runtime.shipped_verdicts import (  # noqa: E402
    TrialVerdict,
    read_verdict_table,
    write_verdict_table,
)
from dynamo_backends.runtime.verdicts import VerdictStore  # noqa: E402

TRIALS = {"onnxrt": "ort", "ov": "openvino", "tvm": "tvm", "iree": "iree"}
"""Backends with verdicts, each with its folder."""

SHIPPED = ("onnxrt", "ov")
"""Those whose tables are part of a release."""

PARTS = ROOT / "build" / "verdicts"

IMAGES = (
    "convnext_tiny", "densenet121", "efficientnet_b0", "mobilenet_v3_large", "mobilenet_v3_small",
    "regnet_y_400mf", "resnet101", "resnet34", "shufflenet_v2_x1_0", "swin_t", "vgg11",
    "wide_resnet50_2",
)  # fmt: skip
"""Builders of torchvision.models, besides those of the suite."""

Work = tuple[str, Callable[[str], None]]
"""A name, and a function that asks a backend about the graphs of a model."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes tables, or says which do not hold; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("backends", nargs="*", metavar="BACKEND", help="default: onnxrt ov")
    parser.add_argument("--check", action="store_true", help="only say which tables do not hold")
    parser.add_argument("--kept", action="store_true", help="ask about no further models")
    settings = parser.parse_args(arguments)
    if unknown := set(settings.backends) - set(TRIALS):
        parser.error(f"no trials of {', '.join(unknown)}; there are those of {', '.join(TRIALS)}")
    if settings.check:
        return check()
    torch.set_num_threads(1)  # trials are small
    logging.getLogger("dynamo_backends").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DYNAMO_BACKENDS_CACHE"] = folder
        for backend in settings.backends or SHIPPED:
            make_table(backend, settings.kept)
    return 0


def check() -> int:
    """Says which tables do not hold here; 0 in any case, for that is no mistake."""
    for backend in TRIALS:
        here = asdict(_verdicts(backend).current_conditions())
        table = read_verdict_table(backend, here["processor"])
        if table is None:
            if backend in SHIPPED:
                print(f"{backend}: none for {here['processor']}; run: make verdicts ARGS={backend}")
            continue
        differs = [name for name, value in asdict(table[0]).items() if value != here[name]]
        if differs:
            print(f"{backend}: other {', '.join(differs)}; run: make verdicts ARGS={backend}")
        else:
            print(f"{backend}: {len(table[1])} verdicts, which hold here")
    return 0


def make_table(backend: str, kept: bool) -> None:
    """Asks about all models, and writes the table of a backend; `kept`: only writes it."""
    verdicts = VerdictStore(backend, _verdicts(backend).sources, shipped=False)
    _trial_module(backend)._verdicts = verdicts
    holds_for = verdicts.current_conditions()
    folder = PARTS / backend / holds_for.sources
    folder.mkdir(parents=True, exist_ok=True)
    with planned_only(backend):
        for name, ask in track([] if kept else list(work()), f"trials of {backend}"):
            part = folder / f"{name}.json"
            if not part.exists():
                try:
                    ask(backend)
                except Exception as error:  # a model that this torch or backend cannot take
                    print(f"{backend}: {name}: {error!r:.200}")
                known = {kind: asdict(verdict) for kind, verdict in verdicts.known_verdicts.items()}
                part.write_text(json.dumps(known), encoding="utf-8")
    everything: dict[str, TrialVerdict] = {}
    for part in folder.glob("*.json"):
        kinds = json.loads(part.read_text(encoding="utf-8"))
        everything |= {kind: TrialVerdict(**verdict) for kind, verdict in kinds.items()}
    path = write_verdict_table(backend, holds_for, everything)
    print(f"{path}: {len(everything)} verdicts, {path.stat().st_size / 1e3:.0f} kB")


def _trial_module(backend: str) -> Any:
    return importlib.import_module(f"dynamo_backends.{TRIALS[backend]}.trial")


def _verdicts(backend: str) -> VerdictStore:
    verdicts: VerdictStore = _trial_module(backend)._verdicts
    return verdicts


@contextlib.contextmanager
def planned_only(backend: str) -> Iterator[None]:
    """Within it the backend answers about calls and compiles no graph: eager runs."""

    def refuse(*_: object) -> None:
        raise CompileError("only asked about")

    kind = type(get_backend(backend))
    compile_graph = kind.compile
    kind.compile = refuse
    try:
        yield
    finally:
        kind.compile = compile_graph


def work() -> Iterator[Work]:
    """What is asked about: for each model inference, symbolic shapes and training."""
    yield "embeddings", _ask_embeddings
    small = [*harness.suite("transformers", "test"), *harness.suite("classic", "test")]
    for case in small:
        yield f"test-{case.name}", functools.partial(_ask, case=case)
    for case in small:
        if "attention" in case.tags:
            yield f"test-{case.name}-dynamic", functools.partial(_ask, case=case, dynamic=True)
        yield f"test-{case.name}-training", functools.partial(_train, case=case)
    for case in (*harness.suite("classic"), *harness.suite("transformers"), *_of_images()):
        yield case.name, functools.partial(_ask, case=case)


def _of_images() -> Iterator[ModelCase]:
    """Networks whose convolutions are those of many others; verdicts hold for every batch."""
    models = import_torchvision().models
    for name in IMAGES:
        build = functools.partial(models.get_model, name, weights=None)
        yield ModelCase(name, build, image(2, 224), frozenset({"conv"}), enliven=False)


def _ask_embeddings(backend: str) -> None:
    """The stream of MiniLM: four graphs with more and more symbols, then a batch of one."""
    stream = embeddings("bench", 1)
    vocabulary = 30522
    torch._dynamo.reset()
    compiled = stream.serve(stream.model, lambda f: torch.compile(f, backend=backend))
    for batch, length in ((4, 32), (4, 48), (6, 40), (1, 24), (1, 100), (8, 9)):
        inputs = [_resized(x, batch, length, vocabulary) for x in stream.requests[0]]
        with torch.no_grad():
            compiled(*inputs)


def _resized(x: Any, batch: int, length: int, vocabulary: int) -> Any:
    if not isinstance(x, Tensor):
        return x
    largest = max(2, min(vocabulary, int(x.max()) + 1))
    return torch.randint(0, largest, (batch, length)).to(x.dtype)


def _ask(backend: str, case: ModelCase, dynamic: bool = False) -> None:
    torch._dynamo.reset()
    model = case.make()
    with torch.no_grad():
        call(torch.compile(model, backend=backend, dynamic=dynamic or None), case.inputs())


def _train(backend: str, case: ModelCase) -> None:
    torch._dynamo.reset()
    model = case.make().train()
    result = call(torch.compile(model, backend=backend), case.inputs())
    leaves = torch.utils._pytree.tree_leaves(result)
    tensors = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    torch.autograd.backward([t.sum() for t in tensors])


if __name__ == "__main__":
    sys.exit(main())
