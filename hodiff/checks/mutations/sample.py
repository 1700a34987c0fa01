"""Calls of functions, as functions of the tensors that they are differentiated by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from hodiff.common.randomness import seed_everywhere
from hodiff.common.trees import tensors_in
from hodiff.corrections import corrected
from hodiff.corrections.mechanism.registry import correction_of


class Layout(NamedTuple):
    """Memory layout of a tensor.

    Attributes:
        arrange: Returns equal numbers in this layout, differentiably.
        source: The Python expression of `arrange`, with "{0}" for the tensor.
    """

    arrange: Callable[[Tensor], Tensor]
    source: str


@dataclass(frozen=True)
class Sample:
    """Call of a function.

    Attributes:
        call: Takes the function's arguments and returns its outputs.
        leaves: The leaves of its arguments, tensors or not.
        structure: The structure of the leaves.
        places: Positions of the leaves that are differentiated.
        layouts: Layouts of differentiated tensors that are not contiguous, by position.
        parameters: The names of the function's arguments, as far as they are known.
        direct: Whether `call` calls the torch function with its arguments and does nothing else.
    """

    call: Callable[..., Any]
    leaves: tuple[Any, ...]
    structure: Any
    places: tuple[int, ...]
    layouts: Mapping[int, Layout] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    direct: bool = False

    @property
    def point(self) -> tuple[Tensor, ...]:
        """The tensors that the call is differentiated by."""
        return tuple(self.leaves[i].detach().clone() for i in self.places)

    @property
    def size(self) -> int:
        """Number of elements of all tensors."""
        return sum(leaf.numel() for leaf in self.leaves if isinstance(leaf, Tensor))

    def function(self, *, correct: bool, seed: int | None = None) -> Callable[..., tuple[Tensor, ...]]:
        """Return the floating outputs as a function of the differentiated tensors; a seed fixes random numbers."""

        def run(*moving: Tensor) -> tuple[Tensor, ...]:
            filled = [leaf.detach().clone() if is_buffer(leaf) else leaf for leaf in self.leaves]
            for place, tensor in zip(self.places, moving, strict=True):
                copy = tensor.clone()  # some operators write into their arguments
                filled[place] = self.layouts[place].arrange(copy) if place in self.layouts else copy
            if seed is not None:
                seed_everywhere(seed)
            mode: AbstractContextManager[Any] = corrected() if correct else nullcontext()
            with mode:
                output = self.call(*tree_unflatten(filled, self.structure))
            return tuple(
                each.resolve_conj() for each in tensors_in(output) if each.is_floating_point() or each.is_complex()
            )

        return run

    def is_corrected(self) -> bool:
        """Whether hodiff has a rule for any torch function that the call uses."""
        with torch.no_grad(), _Listener() as listener:
            self.function(correct=False)(*self.point)
        return listener.found


class _Listener(torch.overrides.TorchFunctionMode):
    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        correction = correction_of(func, args)
        self.found = self.found or (correction is not None and correction.kind != "slow")
        return func(*args, **(kwargs or {}))


def is_buffer(leaf: Any) -> bool:
    """Whether the leaf is a dense floating tensor, which operators may change, such as running statistics."""
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.layout == torch.strided
