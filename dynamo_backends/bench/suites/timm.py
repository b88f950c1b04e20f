"""The CPU list of PyTorch's own runner for timm, with random weights.

Names and batch sizes are those of timm_models_list_cpu.txt in PyTorch's benchmarks/dynamo.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch

from dynamo_backends.bench.suites.case import Inputs, ModelCase, Scale
from dynamo_backends.bench.suites.smaller import shorten
from dynamo_backends.bench.torchvision_shim import import_torchvision
from dynamo_backends.interface.errors import ModelError

INSTALL = "pip install --no-deps timm"

MODELS: Mapping[str, int] = {
    "adv_inception_v3": 128, "beit_base_patch16_224": 64, "botnet26t_256": 128,
    "cait_m36_384": 4, "coat_lite_mini": 32, "convit_base": 64, "convmixer_768_32": 2,
    "convnext_base": 64, "crossvit_9_240": 32, "cspdarknet53": 64,
    "deit_base_distilled_patch16_224": 64, "dm_nfnet_f0": 128, "dpn107": 32,
    "eca_botnext26ts_256": 128, "eca_halonext26ts": 128, "fbnetc_100": 32, "fbnetv3_b": 32,
    "gernet_l": 128, "ghostnet_100": 128, "gluon_inception_v3": 128, "gmixer_24_224": 16,
    "gmlp_s16_224": 128, "hrnet_w18": 128, "inception_v3": 128, "jx_nest_base": 32,
    "lcnet_050": 64, "mixer_b16_224": 128, "mixnet_l": 128, "mnasnet_100": 32,
    "mobilenetv2_100": 32, "mobilenetv3_large_100": 32, "mobilevit_s": 256, "nfnet_l0": 128,
    "pnasnet5large": 16, "poolformer_m36": 64, "repvgg_a2": 128, "res2net101_26w_4s": 64,
    "res2net50_14w_8s": 128, "res2next50": 128, "resnest101e": 64, "rexnet_100": 128,
    "sebotnet33ts_256": 64, "selecsls42b": 128, "spnasnet_100": 32,
    "swin_base_patch4_window7_224": 64, "swsl_resnext101_32x16d": 32, "tf_efficientnet_b0": 128,
    "tf_mixnet_l": 32, "tnt_s_patch16_224": 32, "twins_pcpvt_base": 64, "visformer_small": 128,
    "vit_base_patch16_224": 64, "volo_d1_224": 64, "xcit_large_24_p8_224": 5,
}  # fmt: skip
"""Name to batch size."""

_FEW = 2  # images at scale "test"; of one, batch norms of single values have no statistics


def timm(scale: Scale = "bench", batch: int | None = None) -> list[ModelCase]:
    """Returns the suite of the timm list of PyTorch's runners.

    Weights are those of `ModelCase.enliven`: batch norms of a network that was never trained would
    be the identity.

    Args:
        scale: "bench": models of the list. "test": no more than two blocks alike in a row (see
            `shorten`), and two images. Images have their published size at both.
        batch: Images per call; None: as many as the list has.

    Raises:
        ModelError: timm is not installed.
    """
    if importlib.util.find_spec("timm") is None:
        raise ModelError(f"the suite timm needs timm, which is not installed; run: {INSTALL}")
    counts = MODELS if scale == "bench" else dict.fromkeys(MODELS, _FEW)
    tags = frozenset({"conv"})
    return [
        ModelCase(name, _build(name, scale), _images(name, batch or usual), tags)
        for name, usual in counts.items()
    ]


def _import() -> ModuleType:
    import_torchvision()
    return importlib.import_module("timm")


def _build(name: str, scale: Scale) -> Callable[[], Any]:
    def build() -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Mapping deprecated model name")
            model = _import().create_model(name, pretrained=False)
        if scale == "test":
            shorten(model)
        return model

    return build


def _images(name: str, batch: int) -> Callable[[], Inputs]:
    def example() -> Inputs:
        models = _import().models
        known = models.get_deprecated_models().get(name) or name
        config = models.get_pretrained_cfg(known)
        shape = tuple(config.input_size) if config is not None else (3, 224, 224)
        return (torch.randn(batch, *shape),)

    return example
