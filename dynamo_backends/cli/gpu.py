"""What each backend for NVIDIA GPUs lacks on this machine: the device, its driver, or a package."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamo_backends.interface.packages import is_there

_NVIDIA = "0x10de"  # PCI vendor
_DISPLAY = "0x03"  # PCI class of graphics cards and accelerators, its first byte

_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cu130"
_DRIVER = "install NVIDIA's driver: https://www.nvidia.com/drivers"


@dataclass(frozen=True)
class Facts:
    """What is known of this machine.

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
    return "the installed onnxruntime is the one for CPUs"


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


def look() -> Facts:
    """Reads the driver, the toolkit and the packages of this machine."""
    import torch

    visible = torch.cuda.is_available()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Facts(
        devices=_pci_devices(Path("/sys/bus/pci/devices")),
        driver=_driver_version(Path("/proc/driver/nvidia/version")),
        torch=str(torch.__version__),
        built_for=torch.version.cuda or "",
        visible=tuple(names) if visible else (),
    )


def lacks(backend: GpuBackend, facts: Facts) -> list[Lack]:
    """What stands between a backend and a GPU, the hardware first; nothing if it can run there."""
    return [*machine_lacks(facts), *package_lacks(backend)]


def machine_lacks(facts: Facts) -> list[Lack]:
    """Returns what every backend lacks."""
    if facts.visible:
        return []
    found = []
    if facts.devices == 0 and not facts.driver:
        found.append(Lack("no NVIDIA GPU in this machine", "use a machine with an NVIDIA GPU"))
    elif not facts.driver:
        found.append(Lack("no NVIDIA driver", _DRIVER))
    if not facts.built_for:
        found.append(Lack(f"torch {facts.torch} is built without CUDA", _TORCH))
    elif not found:
        found.append(
            Lack(
                f"torch, built for CUDA {facts.built_for}, sees no device with the driver "
                f"{facts.driver}",
                "nvidia-smi; unset CUDA_VISIBLE_DEVICES",
            )
        )
    return found


def package_lacks(backend: GpuBackend) -> list[Lack]:
    """Returns what a backend lacks besides what every one does."""
    if not backend.modules:
        return []
    if any(map(is_there, backend.modules)):
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
        return f"{backend.modules[0]} does not import ({type(error).__name__}: {error})"


def _pci_devices(folder: Path) -> int | None:
    """How many NVIDIA graphics cards or accelerators are on the bus; None if it is not shown."""
    if not folder.is_dir():
        return None
    return sum(
        _read(device / "vendor") == _NVIDIA and _read(device / "class").startswith(_DISPLAY)
        for device in folder.iterdir()
    )


def _driver_version(file: Path) -> str:
    """The version in a line such as "NVRM version: NVIDIA UNIX ... Module  580.65.06  ..."."""
    words = _read(file).split()
    numbers = [w for w in words if w[:1].isdigit() and "." in w]
    return numbers[0] if numbers else ("unknown" if words else "")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def in_words(found: Sequence[Lack]) -> tuple[str, str]:
    """What is missing and what fixes it, each in one line."""
    return "; ".join(x.what for x in found), "; ".join(x.remedy for x in found)
