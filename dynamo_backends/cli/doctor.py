"""`dynamo-backends doctor`: what is there, what is missing, and the command that fixes it."""

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from dynamo_backends.autotune.decisions import DecisionStore
from dynamo_backends.cli.listing import Row, print_command, print_rows, print_words
from dynamo_backends.interface.packages import is_module_installed

SUMMARY = "show versions, devices and missing packages, with the commands that install them"


@dataclass(frozen=True)
class Check:
    """One line of `doctor`.

    Attributes:
        name: What was looked at.
        status: "ok", "missing" (optional, and not there) or "broken" (there, and does not work).
        detail: Version, or what is wrong.
        remedy: What fixes it, a command where there is one.
    """

    name: str
    status: Literal["ok", "missing", "broken"]
    detail: str
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Prints what `diagnose` finds; returns the exit status: 1 if something is broken."""
    checks = diagnose()
    if args.json:
        print(json.dumps([asdict(c) for c in checks], indent=2))
    else:
        console = Console()
        console.print(headline(checks), highlight=False, soft_wrap=True)
        there = [check for check in checks if check.status != "missing"]
        print_rows(console, ("status", "what"), [_row(check) for check in there])
        _print_missing(console, [check for check in checks if check.status == "missing"])
    return int(any(c.status == "broken" for c in checks))


def headline(checks: Sequence[Check]) -> str:
    """Returns all of it in one line."""
    backends = [c for c in checks if c.name.startswith("backend ")]
    line = f"{sum(c.status == 'ok' for c in backends)} of {len(backends)} backends usable"
    if broken := [c.name for c in checks if c.status == "broken"]:
        line += f"; broken: {', '.join(broken)}"
    winners = Counter(decision.winner for decision in DecisionStore().all())
    for name, count in winners.most_common(1):
        line += f"; autotune's choice for {count} of {winners.total()} graphs here: {name}"
    return line


def _print_missing(console: Console, checks: Sequence[Check]) -> None:
    """Prints what is missing, by the command that adds it: who needs it, and why."""
    needed: dict[str, dict[str, list[str]]] = {}
    for check in checks:
        commands, reasons = check.remedy.split("; "), check.detail.split("; ")
        if len(commands) != len(reasons):
            reasons = [check.detail] * len(commands)
        for command, reason in zip(commands, reasons, strict=True):
            needed.setdefault(command, {}).setdefault(reason, []).append(check.name)
    if needed:
        console.print(Text("missing, and what adds it", style="yellow"))
    for command, by_reason in needed.items():
        print_command(console, command)
        for reason, names in by_reason.items():
            print_words(console, f"{', '.join(names)}: {reason}", indent=2)


def _row(check: Check) -> Row:
    colors = {"ok": "green", "broken": "red"}
    cells = ((check.status, colors[check.status]), (check.name, ""))
    return Row(cells, check.detail, below=True, command=check.remedy)


def diagnose() -> list[Check]:
    """Looks at everything that this package needs or can use, in a fixed order."""
    checks = [_python(), _torch(), _processor(), _autoload()]
    checks += [*_packages(), _devices(), _cache()]
    checks += _backends()
    checks += _gpu()
    return checks


def _python() -> Check:
    return Check("Python", "ok", platform.python_version())


def _torch() -> Check:
    try:
        import torch
    except Exception as error:
        return Check("torch", "broken", f"{type(error).__name__}: {error}", "pip install torch")
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < (2, 11):
        return Check("torch", "broken", torch.__version__, "pip install --upgrade 'torch>=2.11'")
    return Check("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads")


def _processor() -> Check:
    from dynamo_backends.runtime.cpu_info import cpu_isa_level, cpu_name

    level = cpu_isa_level().partition(" ")[2]  # as oneDNN names it
    return Check("processor", "ok", f"{cpu_name()}, {level}" if level else cpu_name())


def _autoload() -> Check:
    name = "openxla without an import"
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        detail = "TORCH_DEVICE_BACKEND_AUTOLOAD=0 is set: import dynamo_backends before compiling"
        return Check(name, "missing", detail, "unset TORCH_DEVICE_BACKEND_AUTOLOAD")
    points = importlib.metadata.entry_points(group="torch.backends")
    if "dynamo_backends" not in points.names:
        detail = (
            "the entry point of dynamo-backends is not installed: import dynamo_backends before "
            "compiling"
        )
        return Check(name, "missing", detail, "pip install dynamo-backends")
    return Check(name, "ok", "through the entry point group torch.backends")


def _packages() -> list[Check]:
    """Returns the packages that backends need, and the one of the demo's models."""
    from dynamo_backends.interface.registry import get_backend, list_backends

    checks: dict[str, Check] = {}
    for name in list_backends():
        with contextlib.suppress(Exception):  # its own row will tell
            backend = get_backend(name)
            for module, package in backend.packages.items():
                checks.setdefault(package, _package(module, package, backend.install))
    models = _package("transformers", "transformers", "pip install 'dynamo-backends[bench]'")
    return [*checks.values(), models]


def _package(module: str, package: str, remedy: str) -> Check:
    from dynamo_backends.interface.packages import installed_versions, is_module_installed

    if not is_module_installed(module):
        return Check(package, "missing", "not installed", remedy)
    try:
        importlib.import_module(module)
    except Exception as error:
        return Check(package, "broken", f"{type(error).__name__}: {error}", remedy)
    found = installed_versions((package,)) or installed_versions((f"{package}-*",))
    return Check(package, "ok", ", ".join(found.values()) or "version unknown")


def _devices() -> Check:
    try:
        import torch
    except Exception:
        return Check("devices", "broken", "torch cannot be imported", "pip install torch")
    names = [platform.processor() or platform.machine()]
    if torch.cuda.is_available():
        names += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Check("devices", "ok", "; ".join(names))


def _gpu() -> list[Check]:
    """NVIDIA GPUs, and for each backend what it lacks to run there."""
    from dynamo_backends.cli import doctor

    try:
        facts = doctor.collect_environment()
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"
        return [Check("NVIDIA GPU", "broken", detail, "pip install torch; nvidia-smi")]
    missing, remedy = doctor.in_words(doctor.machine_lacks(facts))
    driver = f"driver {facts.driver}, " if facts.driver else ""
    detail = missing or (
        f"{', '.join(facts.visible)}; {driver}torch built for CUDA {facts.built_for}"
    )
    checks = [Check("NVIDIA GPU", "missing" if missing else "ok", detail, remedy)]
    for backend in doctor.GPU_BACKENDS:
        missing, remedy = doctor.in_words(doctor.lacks(backend, facts))
        status: Literal["ok", "missing"] = "missing" if missing else "ok"
        checks.append(Check(f"{backend.name} on GPU", status, missing or "usable", remedy))
    return checks


def _cache() -> Check:
    from dynamo_backends.runtime.cache import DiskCache, cache_folder

    folder = cache_folder()
    parent = next(p for p in (folder, *folder.parents) if p.exists())
    if not os.access(parent, os.W_OK):
        return Check("cache", "missing", f"{folder} cannot be written", "{folder} is not writable")
    return Check("cache", "ok", f"{folder}, {DiskCache(folder).size() / 1e6:.1f} MB")


def _backends() -> list[Check]:
    from dynamo_backends.interface.registry import get_backend, list_backends

    checks = []
    for name in list_backends():
        try:
            found = get_backend(name).availability()
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
            checks.append(Check(f"backend {name}", "broken", detail, "report this as a bug"))
            continue
        status: Literal["ok", "missing"] = "ok" if found.usable else "missing"
        where = f" on {', '.join(found.devices)}" if found.devices else ""
        checks.append(Check(f"backend {name}", status, f"{found.reason}{where}", found.remedy))
    return checks


_NVIDIA = "0x10de"  # PCI vendor
_DISPLAY = "0x03"  # PCI class of graphics cards and accelerators, its first byte

_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cu130"
_DRIVER = "install NVIDIA's driver: https://www.nvidia.com/drivers"


@dataclass(frozen=True)
class Facts:
    """The facts about this machine that decide what works.

    Attributes:
        devices: NVIDIA devices on the PCI bus; None if that cannot be seen here.
        driver: Version of NVIDIA's kernel module; empty without.
        torch: Version of torch.
        built_for: Version of CUDA that torch was built for; empty without.
        visible: Names of the devices that torch sees.
    """

    devices: int | None
    driver: str
    torch: str
    built_for: str
    visible: tuple[str, ...]


@dataclass(frozen=True)
class Lack:
    """One thing that is missing, and what fixes it."""

    what: str
    remedy: str


@dataclass(frozen=True)
class GpuBackend:
    """A backend that needs, or can use, an NVIDIA GPU.

    Attributes:
        name: As users write it.
        modules: Any one of these has to be importable; () if torch is all it takes.
        install: What installs one, or a function that says it.
        check: Says what else is wrong with the packages, if they are there.
    """

    name: str
    modules: tuple[str, ...] = ()
    install: str | Callable[[], str] = ""
    check: Callable[[], str] | None = None


def _onnxruntime_without_cuda() -> str:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        return ""
    return "the installed onnxruntime package supports only CPUs"


def _nvfuser_wheel() -> str:
    from dynamo_backends.nvfuser import vendor

    return vendor.remedy()


_JAX = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_NVFUSER = ("nvfuser_direct", "nvfuser")

GPU_BACKENDS: tuple[GpuBackend, ...] = (
    GpuBackend("autotune"),
    GpuBackend("cudagraphs"),
    GpuBackend("cudagraphs_eager"),
    GpuBackend("fx2trt", ("torch_tensorrt",), "pip install torch-tensorrt"),
    GpuBackend("inductor", ("triton",), "pip install triton"),
    GpuBackend("nvfuser", _NVFUSER, _nvfuser_wheel),
    GpuBackend("nvfuser_cudagraphs", _NVFUSER, _nvfuser_wheel),
    GpuBackend("onnxrt_cuda", ("onnxruntime",),
               "pip uninstall onnxruntime && pip install onnxruntime-gpu",
               _onnxruntime_without_cuda),
    GpuBackend("openxla", _JAX, "pip install 'jax[cuda13]'"),
    GpuBackend("tensorrt", ("tensorrt",), "pip install tensorrt"),
)  # fmt: skip
"""torch's own `cudagraphs` and `inductor` among them."""


def collect_environment() -> Facts:
    """Collects what this machine has: drivers, toolkits, versions."""
    import torch

    from dynamo_backends.bench.environment import driver_version

    visible = torch.cuda.is_available()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Facts(
        devices=_pci_devices(Path("/sys/bus/pci/devices")),
        driver=driver_version(),
        torch=str(torch.__version__),
        built_for=torch.version.cuda or "",
        visible=tuple(names) if visible else (),
    )


def lacks(backend: GpuBackend, facts: Facts) -> list[Lack]:
    """Returns what a backend lacks to run on a GPU, the hardware first; empty if it can run."""
    return [*machine_lacks(facts), *package_lacks(backend)]


def machine_lacks(facts: Facts) -> list[Lack]:
    """Returns what every backend lacks."""
    if facts.visible:
        return []
    found = []
    if facts.devices == 0 and not facts.driver:
        found.append(Lack("this machine has no NVIDIA GPU", "use a machine with an NVIDIA GPU"))
    elif not facts.driver:
        found.append(Lack("the NVIDIA driver is not installed", _DRIVER))
    if not facts.built_for:
        found.append(Lack(f"torch {facts.torch} is built without CUDA", _TORCH))
    elif not found:
        found.append(
            Lack(
                f"torch (built for CUDA {facts.built_for}) finds no device with driver "
                f"{facts.driver}",
                "nvidia-smi; unset CUDA_VISIBLE_DEVICES",
            )
        )
    return found


def package_lacks(backend: GpuBackend) -> list[Lack]:
    """Returns what a backend lacks besides what every one does."""
    if not backend.modules:
        return []
    if any(map(is_module_installed, backend.modules)):
        wrong = _checked(backend)
    else:
        wrong = f"the package {' or '.join(backend.modules)} is not installed"
    if not wrong:
        return []
    install = backend.install if isinstance(backend.install, str) else backend.install()
    return [Lack(wrong, install)]


def _checked(backend: GpuBackend) -> str:
    if backend.check is None:
        return ""
    try:
        return backend.check()
    except Exception as error:
        return f"{backend.modules[0]} cannot be imported ({type(error).__name__}: {error})"


def _pci_devices(folder: Path) -> int | None:
    """Returns how many NVIDIA devices are on the PCI bus; None if that is not known."""
    if not folder.is_dir():
        return None
    return sum(
        _read(device / "vendor") == _NVIDIA and _read(device / "class").startswith(_DISPLAY)
        for device in folder.iterdir()
    )


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def in_words(found: Sequence[Lack]) -> tuple[str, str]:
    """Returns what is missing and what fixes it, each in one line."""
    return "; ".join(x.what for x in found), "; ".join(x.remedy for x in found)
