"""PyPI's torchvision is built for CUDA, and does not load its operators with a CPU build of torch.

laplace-torch only needs the package, through torchmetrics; its import asks for these operators.
"""

import torch

try:
    import torchvision  # noqa: F401 - loads its operators
except RuntimeError:
    LIBRARY = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
