"""PyPI's torchvision is built for CUDA, and its operators do not load with a CPU build of torch; none is used here."""

import torch

try:
    import torchvision  # noqa: F401 - loads its operators
except RuntimeError:
    LIBRARY = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
