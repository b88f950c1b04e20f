"""The options of `openxla`, and what they mean for lowering."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dynamo_backends.graph.precision import float32_matmul_precision, read_tf32_settings
from dynamo_backends.interface.errors import OptionError
from dynamo_backends.interface.mesh import Mesh
from dynamo_backends.interface.options import Limits, Options

if TYPE_CHECKING:
    from dynamo_backends.xla.mesh.placements import MeshPlacements


PLATFORMS: tuple[str, ...] = ("cpu", "cuda", "tpu")
"""Those that jax knows."""


def parse_device_name(device: str) -> tuple[str, int] | None:
    """Parses a device name such as "tpu:1" to platform and index; None if it is none."""
    platform, colon, index = device.partition(":")
    if platform not in PLATFORMS or (colon and not index.isdecimal()):
        return None
    return platform, int(index or 0)


def check_buckets(buckets: Any, backend: str) -> None:
    """Checks the option `buckets`.

    Raises:
        OptionError: Something in it is neither bounds nor says of what they are.
    """
    if not isinstance(buckets, Mapping):
        _check_bounds(buckets, "", backend)
        return
    for name, dims in buckets.items():
        if not isinstance(name, str) or not isinstance(dims, Mapping):
            raise OptionError(
                f"option 'buckets' of {backend} must map input names to dimensions, such as "
                f"{{'ids': {{1: [16, 32]}}}}, not {{{name!r}: {dims!r}}}."
            )
        for dim, bounds in dims.items():
            if not _is_integer(dim):
                raise OptionError(
                    f"option 'buckets' of {backend}: a dimension of {name!r} must be an integer, "
                    f"not {dim!r}."
                )
            _check_bounds(bounds, f" of dimension {dim} of {name!r}", backend)


def _check_bounds(bounds: Any, place: str, backend: str) -> None:
    is_list = isinstance(bounds, list | tuple) and all(_is_integer(b) and b > 0 for b in bounds)
    if not is_list or any(a >= b for a, b in itertools.pairwise(bounds)):
        raise OptionError(
            f"option 'buckets' of {backend}: bounds{place} must be an increasing list of positive "
            f"integers, not {bounds!r}."
        )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class XlaOptions(Options):
    """The options of `openxla`, besides those that every backend has.

    Attributes:
        device: Device that XLA runs on: "cpu", "cuda", "tpu", or one of several, such as "tpu:1".
            "auto": the device of the tensors. If torch cannot access the memory of the device,
            results stay there (docs/openxla.md).
        precision: "float32" computes in the dtypes that the model has; "bf16" lets XLA run float32
            matrix products and convolutions at the device's fastest precision (bfloat16 passes
            on TPU, TF32 on NVIDIA GPUs; on CPUs XLA keeps float32).
        matmul_precision: For float32 products where the device offers less: "highest", "high" or
            "medium" as in `torch.set_float32_matmul_precision`; "torch" follows that setting.
        reserve: On CPUs with glibc, keep the memory of temporaries between calls.
        bucket_growth: With dynamic shapes: ratio between consecutive bucket bounds. Sizes are
            rounded up to the next bound, and inputs are padded (docs/shapes.md). 1: every set of
            concrete shapes is compiled separately, except for sizes in `buckets`.
        buckets: With dynamic shapes: the bounds of all sizes that vary, such as
            (16, 32, 64, 128), or those of single dimensions, by input and dimension, such as
            {"ids": {1: (16, 32, 64, 128)}}. Larger sizes are rounded up by `bucket_growth`.
        exact_after: With dynamic shapes: number of calls after which a size is compiled without
            padding, in the background. None: when the overhead of its padding exceeds the compile
            time.
        collectives: Library that runs functional collectives of torch.distributed
            (docs/scaling.md): "xla", if the process group contains all processes, or "torch".
        mesh: For inference: devices over which weights and batches are split (docs/scaling.md): a
            torch `DeviceMesh`, or a dict from names to sizes of its dimensions.
        placements: Placements of weights on the mesh: a dict from patterns of names to one `Shard`
            or `Replicate` of `torch.distributed.tensor` for each dimension of the mesh.
        batch_placements: Placements of the other inputs: one for each dimension of the mesh. By
            default their first dimension is split over the mesh dimensions that split no weight.
    """

    device: str = "auto"
    precision: Literal["float32", "bf16"] = "float32"
    matmul_precision: Literal["torch", "highest", "high", "medium"] = "torch"
    reserve: bool = True
    bucket_growth: float | int = 1.1
    buckets: tuple | list | dict = ()  # see `check_buckets`
    exact_after: int | None = None
    max_executables: int = 24
    collectives: Literal["xla", "torch"] = "xla"
    mesh: dict | object | None = None
    placements: dict | None = None
    batch_placements: tuple | list | None = None

    LIMITS: ClassVar[Limits] = {"bucket_growth": (1, None), "exact_after": (1, None)}

    def __post_init__(self) -> None:
        """Says of the mesh in plain numbers what users say in torch's objects."""
        super().__post_init__()
        if (spread := self.spread) is not None:
            object.__setattr__(self, "mesh", spread.mesh)
            object.__setattr__(self, "placements", spread.placements)
            object.__setattr__(self, "batch_placements", spread.batch)

    @property
    def spread(self) -> "MeshPlacements | None":
        """Returns how graphs are spread over a mesh; None: they are compiled for one device."""
        if self.mesh is None and not self.placements and not self.batch_placements:
            return None
        from dynamo_backends.xla.mesh.placements import parse_mesh_options

        return parse_mesh_options(self.mesh, self.placements or {}, self.batch_placements)

    def validate(self, backend: str) -> None:
        """See `Options.validate`."""
        super().validate(backend)
        if isinstance(self.mesh, Mesh):
            self.refuse_background_compile("a mesh")
            _check_mesh(self, self.mesh)
        check_buckets(self.buckets, backend)
        _check_device(self.device, backend)

    @property
    def allows_reduced_precision(self) -> bool:
        """See `Options.allows_reduced_precision`."""
        return self.precision == "bf16" or self.matmul_precision in ("high", "medium")


def _check_mesh(options: XlaOptions, mesh: Mesh) -> None:
    """Raises if a mesh of several processes may leave some of them behind."""
    if mesh.of_ranks and options.fallback != "error":
        raise OptionError(
            f"mesh ({mesh}) spans {mesh.size} processes, which must all run each call compiled: "
            "the others would wait for a process that falls back to eager. Also pass 'fallback': "
            "'error'."
        )


def _check_device(device: str, backend: str) -> None:
    if device != "auto" and parse_device_name(device) is None:
        raise OptionError(
            f"option 'device' of {backend} must be one of "
            f"{', '.join(map(repr, ('auto', *PLATFORMS)))}, not {device!r}. To select one of "
            "several devices, append its index: 'tpu:1'."
        )


def lowering_options(platform_name: str, options: XlaOptions) -> Any:
    """Returns how graphs are lowered for a platform.

    Args:
        platform_name: "cpu", "cuda" or "tpu"; it need not be here.
        options: Options of the backend.
    """
    from dynamo_backends.xla.lowering.context import LoweringOptions

    return LoweringOptions(
        platform=platform_name,
        matmul_precision=matmul_precision(options),
        convolution_precision=convolution_precision(platform_name, options),
        channels_last=platform_name == "cpu",
    )


def matmul_precision(options: XlaOptions) -> str:
    """jax's name of the precision of float32 products."""
    if options.precision == "bf16":
        return "default"
    asked = options.matmul_precision
    if asked == "torch":
        asked = float32_matmul_precision()  # type: ignore[assignment]
    return {"highest": "highest", "high": "high", "medium": "default"}[asked]


def convolution_precision(platform_name: str, options: XlaOptions) -> str:
    """jax's name of the precision of float32 convolutions: on CUDA torch has a switch for them."""
    if platform_name == "cuda" and options.matmul_precision == "torch":
        return "default" if read_tf32_settings().convolutions else matmul_precision(options)
    return matmul_precision(options)
