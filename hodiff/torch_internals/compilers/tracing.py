"""The state of a running `make_fx` trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils import _python_dispatch as dispatch

from hodiff.torch_internals.autograd.transforms import in_transform, outside_transforms


def graph_so_far() -> tuple[fx.Graph, Any]:
    """Return the graph that is being made, and the module that holds its constants."""
    mode: Any = get_proxy_mode()
    return mode.tracer.graph, mode.tracer.root


def node_of(tensor: Tensor) -> tuple[fx.Node | None, bool]:
    """Return the node that computes a tensor, or None, and whether the tracer knows the tensor's value."""
    mode: Any = get_proxy_mode()
    found: Any = get_proxy_slot(tensor, mode.tracer, None)
    return (None, False) if found is None else (found.proxy.node, found.constant is not None)


@contextmanager
def outside_of_trace() -> Iterator[None]:
    """Compute with real tensors within the context."""
    with dispatch._disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


@contextmanager
def for_later_calls() -> Iterator[None]:
    """Create tensors that may be kept: outside of transforms, traces and inference mode."""
    with (
        dispatch._disable_current_modes(),
        outside_transforms() if in_transform() else nullcontext(),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        yield
