"""Imports torchvision beside a torch build that its compiled operators do not fit.

torchvision's wheels are built for one CUDA build of torch. Beside another build its library does
not load, and the import stops at "operator torchvision::nms does not exist" although none of the
classification models use such an operator. With the schemas declared, everything in Python works.
"""

import importlib
import importlib.util
from types import ModuleType

import torch

_ROI = "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width"

SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": f"({_ROI}, int sampling_ratio, bool aligned) -> Tensor",
    "_roi_align_backward": (
        "(Tensor grad, Tensor rois, float spatial_scale, SymInt pooled_height,"
        " SymInt pooled_width, SymInt batch_size, SymInt channels, SymInt height, SymInt width,"
        " int sampling_ratio, bool aligned) -> Tensor"
    ),
    "roi_pool": f"({_ROI}) -> (Tensor, Tensor)",
    "ps_roi_align": f"({_ROI}, int sampling_ratio) -> (Tensor, Tensor)",
    "ps_roi_pool": f"({_ROI}) -> (Tensor, Tensor)",
    "deform_conv2d": (
        "(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h,"
        " SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w,"
        " SymInt groups, SymInt offset_groups, bool use_mask) -> Tensor"
    ),
}
"""Operators of torchvision's library whose absence stops its import (torchvision/csrc/ops)."""

_declared: torch.library.Library | None = None


def import_torchvision() -> ModuleType:
    """Imports torchvision, declaring its operators' schemas if it does not import without.

    The declarations stay for the life of the process. The operators themselves stay unusable:
    calling one raises torch's own error that it has no kernel.

    Returns:
        The module `torchvision`.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
    """
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name == "torchvision":
            raise ModuleNotFoundError(
                "these models need torchvision: pip install --no-deps torchvision pillow",
                name="torchvision",
            ) from None
        raise
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    declare_operators()
    return importlib.import_module("torchvision")


def import_transformers() -> ModuleType:
    """Imports transformers, which imports torchvision where that is installed.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    if importlib.util.find_spec("torchvision") is not None:
        import_torchvision()
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModuleNotFoundError(
            "these models need transformers: pip install transformers", name="transformers"
        ) from None


def declare_operators() -> list[str]:
    """Declares the schemas that are absent.

    Returns:
        Names of the operators declared by this call.
    """
    global _declared
    if _declared is None:
        _declared = torch.library.Library("torchvision", "FRAGMENT")
    absent = [name for name in SCHEMAS if not hasattr(torch.ops.torchvision, name)]
    for name in absent:
        _declared.define(name + SCHEMAS[name])
    return absent
