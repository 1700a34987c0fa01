"""Calls of layers, recorded in the graph, for observers that wait for the layers' parameters.

A note is stored in the metadata of the node that computed the layer's output. It lives as long as the graph, and a
walk through the graph of a loss finds exactly the calls on which the loss depends.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.modules.module import register_module_forward_hook

from hodiff.graphs import nodes_of
from hodiff.operators.kfac.recorded_layers import Call
from hodiff.operators.kfac.sources import known_type
from hodiff.torch_internals.compilers.dynamo import expect_hooks_of_all_modules

_KEY = "hodiff.layer_calls"


class LayerObserver:
    """Object that waits for calls of layers."""

    @abstractmethod
    def awaits_layers_of(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether the observer waits for a layer with these parameters."""


@dataclass(frozen=True, eq=False)
class _Note:
    """Record of a call. It has no reference to its node, which would make an uncollectable cycle."""

    number: int
    module: nn.Module
    x: Tensor
    shape: torch.Size
    output: int


_waiting: WeakSet[LayerObserver] = WeakSet()
_hooks: list[Any] = []
_numbers = itertools.count()


def wait_for_layers(observer: LayerObserver, waits: bool) -> None:
    """Start or stop waiting for calls of layers."""
    (_waiting.add if waits else _waiting.discard)(observer)
    if _waiting and not _hooks:
        expect_hooks_of_all_modules()
        _hooks.append(register_module_forward_hook(_note, with_kwargs=True))
    elif not _waiting:
        _stop()


def calls_in(loss: Tensor) -> dict[nn.Module, list[Call]]:
    """Return the calls of layers on which a loss depends, in the order of the calls."""
    noted = [(note, node) for node in nodes_of(loss) for note in node.metadata.get(_KEY, ())]
    found: dict[nn.Module, list[Call]] = {}
    for note, node in sorted(noted, key=lambda pair: pair[0].number):
        found.setdefault(note.module, []).append(Call(note.x, note.shape, GradientEdge(node, note.output)))
    return found


def _note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if torch.compiler.is_compiling() or known_type(module) is None or not isinstance(output, Tensor):
        return
    node: Any = output.grad_fn
    if node is None:
        return
    if not _waiting:
        # The observers were garbage-collected.
        _stop()
        return
    parameters = list(module.parameters(recurse=False))
    if any(each.awaits_layers_of(parameters) for each in _waiting):
        x = args[0] if args else next(iter(kwargs.values()))
        note = _Note(next(_numbers), module, x.detach(), output.shape, output.output_nr)
        node.metadata.setdefault(_KEY, []).append(note)


def _stop() -> None:
    while _hooks:
        _hooks.pop().remove()
