"""Base class of Functions that save their inputs, and results in the places of the inputs that want them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.elementwise import batch_in_front


class SavingFunction(AnyOrderFunction):
    """Function that saves its first inputs, which are tensors or None, and keeps the others, which are constants.

    Its rules find the constants in `ctx.rest`, and, if several tensors broadcast, the output's shape in `ctx.shape`.

    Attributes:
        saves: Number of inputs to save.
        reads_inputs: Whether backward reads the saved inputs; forward mode always does.
        reads_output: Whether backward reads the output, as the last saved tensor. Forward mode must compute it again.
        broadcasts: Whether the inputs broadcast, with negative dimensions, so that the batching rule puts batches in
            front.
    """

    saves = 1
    reads_inputs = True
    reads_output = False
    broadcasts = False

    def __init_subclass__(cls) -> None:
        """Make the rules of the subclass."""
        # torch.compile traces plain functions only, so make them for each class; mypy takes them for methods.
        if not cls._is_twin:
            cls.setup_context = staticmethod(_make_setup_context(cls))  # type: ignore[method-assign]
            if cls.broadcasts:
                cls.vmap = staticmethod(_make_vmap(cls))  # type: ignore[method-assign]
        super().__init_subclass__()


def _make_setup_context(cls: type[SavingFunction]) -> Callable[..., None]:
    saves, reads_inputs, reads_output = cls.saves, cls.reads_inputs, cls.reads_output
    broadcasts = cls.broadcasts and saves > 1

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if len(inputs) > saves:
            inputs, ctx.rest = inputs[:saves], inputs[saves:]
        if not reads_output:
            ctx.save_for_backward(*inputs)
        elif reads_inputs:
            ctx.save_for_backward(*inputs, output)
        else:
            ctx.save_for_backward(output)
        ctx.save_for_forward(*inputs)
        if broadcasts:
            ctx.shape = output.shape
        ctx.set_materialize_grads(False)

    return setup_context


def _make_vmap(cls: type[SavingFunction]) -> Callable[..., tuple[Tensor, int]]:
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        del info
        return cls.call(*batch_in_front(in_dims, inputs)), 0

    return vmap


def placed(found: Iterable[Tensor | None], wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Put the results of the wanted inputs in their places, and None elsewhere."""
    remaining = iter(found)
    return tuple(next(remaining) if each else None for each in wanted)
