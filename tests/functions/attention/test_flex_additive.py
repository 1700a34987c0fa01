"""Tests of the detection of score functions that only add to the score, on sums and on functions that resemble sums."""

import math

import pytest
import torch
from custom_functions import old_style

import hodiff
from hodiff.functions import scale_gradient
from hodiff.functions.attention.flex.additive import is_additive

TABLE = torch.linspace(-1, 1, 5).requires_grad_()


# The identity with a custom gradient
Same = old_style("Same", lambda x: (x,), lambda ctx, g: 2 * g)


class OneMore(Same):
    @staticmethod
    def forward(ctx, x):
        return x + 1


def unrecorded(score, b, h, i, j):
    with torch.no_grad():
        return score + 1


def hooked(score, b, h, i, j):
    score.register_hook(lambda cotangent: 2 * cotangent)
    return score


SUMS = {
    "the score": lambda x, b, h, i, j: x,
    "alibi": lambda x, b, h, i, j: x - 0.5 ** (h + 1) * (i - j).abs(),
    "from the left": lambda x, b, h, i, j: 0.1 * (i - j) + x,
    "table": lambda x, b, h, i, j: x + TABLE[i - j],
    "factor of what is added": lambda x, b, h, i, j: torch.add(x, TABLE[i], alpha=2),
    "hides by where": lambda x, b, h, i, j: torch.where(i >= j, x, -math.inf),
    "hides by masked_fill": lambda x, b, h, i, j: (x + TABLE[i]).masked_fill(i < j, -math.inf),
    "one of two sums": lambda x, b, h, i, j: torch.where(i >= j, x, x + 1),
    "in the score's dtype": lambda x, b, h, i, j: x + TABLE[i].to(x.dtype),
}
OTHERS = {
    "soft-cap": lambda x, b, h, i, j: torch.tanh(x),
    "twice": lambda x, b, h, i, j: x + x,
    "less the score": lambda x, b, h, i, j: TABLE[h] - x,
    "no score": lambda x, b, h, i, j: TABLE[i],
    "factor of the score": lambda x, b, h, i, j: torch.add(TABLE[i], x, alpha=2),
    "sum subtracted with a factor": lambda x, b, h, i, j: torch.sub(TABLE[i], x, alpha=-1),
    "large number": lambda x, b, h, i, j: torch.where(i >= j, x, -1e9),
    "number": lambda x, b, h, i, j: x.masked_fill(i < j, 0.0),
    "tensor that may be finite elsewhere": lambda x, b, h, i, j: torch.where(i >= j, x, -math.inf + 0 * TABLE[i]),
    "condition of the score": lambda x, b, h, i, j: torch.where(x > 0, x, -math.inf),
    "constant": lambda x, b, h, i, j: x.detach() + 1,
    "data": lambda x, b, h, i, j: x.data + 1,
    "number of the score": lambda x, b, h, i, j: x + float(x),
    "in place": lambda x, b, h, i, j: x.add_(1),
    "unrecorded": unrecorded,
    "hooked": hooked,
    "Function": lambda x, b, h, i, j: Same.apply(x),
    "Function that adds": lambda x, b, h, i, j: OneMore.apply(x),
    "sum of a Function": lambda x, b, h, i, j: Same.apply(x) + 1,
    "Function of hodiff": lambda x, b, h, i, j: scale_gradient(x, 2.0),
    "raises": lambda x, b, h, i, j: x + missing,  # noqa: F821
}


def found_additive(function):
    return is_additive(function, torch.float64, torch.device("cpu"))


def in_transform(transform):
    def run(function):
        results = []
        transform(lambda x: (results.append(found_additive(function)), x)[1])
        return results[0]

    return run


def in_corrections(function):
    with hodiff.corrected():
        return found_additive(function)


def unrecorded_outside(function):
    with torch.no_grad():
        return found_additive(function)


ONE = torch.tensor(1.0)
WHERE = {
    "plain": found_additive,
    "corrected": in_corrections,
    "no_grad": unrecorded_outside,
    "grad": in_transform(lambda f: torch.func.grad(f)(ONE)),
    "jvp": in_transform(lambda f: torch.func.jvp(f, (ONE,), (ONE,))),
    "vmap": in_transform(lambda f: torch.func.vmap(f)(ONE[None])),
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", SUMS)
def test_sums_are_detected(name, where):
    assert WHERE[where](SUMS[name])


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_are_not_taken_for_sums(name, where):
    assert not WHERE[where](OTHERS[name])
