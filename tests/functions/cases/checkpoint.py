"""Recomputation."""

import torch
from functions.case import FunctionCase, normal

from hodiff.recompute.checkpoint import checkpoint, checkpoint_sequential
from hodiff.recompute.programs import Checkpoint


def block(x, w):
    return torch.sin(torch.tanh(x @ w) * x.sum(-1, keepdim=True))


def closed_over(x, w):
    return checkpoint(lambda x: block(x, w), x)


def nested(x, w):
    return checkpoint(lambda x: checkpoint(block, checkpoint(block, x, w).sum() * x, w), x)


def sequential(x, w):
    return checkpoint_sequential([lambda x: block(x, w).sum() * x, torch.sin, lambda x: block(x, w)], 2, x)


def draw(dtype, generator):
    return normal((2, 3), dtype, generator), 0.5 * normal((3, 2), dtype, generator)


def case(name, function, reference, **options):
    return FunctionCase(
        name=name,
        function=function,
        Function=Checkpoint,
        inputs=draw,
        formula=r"f(x)",
        reference=reference,
        saved="arguments and closed-over tensors, by reference",
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype), torch.ones(3, 2, dtype=dtype)),
        **options,
    )


CASES = [
    case(
        "checkpoint",
        lambda x, w: checkpoint(block, x, w),
        block,
        saved_bytes=lambda x, w: x.nbytes + w.nbytes,
    ),
    case(
        "checkpoint-closed-over",
        closed_over,
        block,
        saved_bytes=lambda x, w: x.nbytes + w.nbytes,
    ),
    case(
        "checkpoint-nested",
        nested,
        lambda x, w: block(block(x, w).sum() * x, w),
        order=2,
        compile=False,  # compiled, checkpoint calls the function directly
        saved_bytes=lambda x, w: x.nbytes + w.nbytes,
    ),
    case(
        "checkpoint_sequential",
        sequential,
        lambda x, w: block(torch.sin(block(x, w).sum() * x), w),
        order=2,
        compile=False,  # compiled, checkpoint calls the function directly
        # Three functions form two segments, and the intermediate is held too.
        saved_bytes=lambda x, w: 2 * x.nbytes + w.nbytes,
    ),
]
