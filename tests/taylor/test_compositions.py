"""Random compositions of elementary operators with broadcasting, plain and collapsed, against nested forward mode."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mpmath_series import D
from taylor.routes import assert_as_nested, curves

# Results are of order one, even after eight compositions.
UNARY = {
    "tanh": torch.tanh,
    "sin": torch.sin,
    "exp": lambda a: torch.exp(torch.sin(a)),
    "log": lambda a: torch.log(2 + torch.sin(a)),
    "root": lambda a: torch.sqrt(1 + a * a),
    "power": lambda a: (1.5 + torch.sin(a)) ** 1.7,
    "reversed": lambda a: 1 - a,
    "over": lambda a: 1.5 / (2 + torch.sin(a)),
    "sum": lambda a: a.sum() / max(a.numel(), 1),
    "first sum": lambda a: a.sum(0) / a.shape[0],
    "last mean": lambda a: a.mean(-1, keepdim=True),
    "flat": lambda a: a.reshape(-1),
    "column": lambda a: a.unsqueeze(-1),
    "row": lambda a: a.unsqueeze(0),
    "turned": lambda a: a.transpose(0, -1),
    "flipped": lambda a: a.flip(0),
    "first": lambda a: a[0],
    "last": lambda a: a[..., -1:],
}
BINARY = {
    "plus": torch.add,
    "minus": torch.sub,
    "times": torch.mul,
    "over": lambda a, b: a / (2 + torch.sin(b)),
    "product": lambda a, b: torch.matmul(a, b) / a.shape[-1],
    "turned product": lambda a, b: torch.matmul(a, b.transpose(-1, -2)) / a.shape[-1],
    "outer": lambda a, b: a[..., None] * b[..., None, :],
    "cat": lambda a, b: torch.cat((a, b), -1),
    "stack": lambda a, b: torch.stack(torch.broadcast_tensors(a, b)),
    "power": lambda a, b: (1.5 + torch.sin(a)) ** torch.sin(b),
    "where": lambda a, b: torch.where(a > b, a, b * b),
}
# 2 and 3 are also numbers of directions, which must not be confused with these axes.
SHAPES = [(), (1,), (2,), (3,), (2, 3), (3, 2), (3, 3), (2, 1), (1, 3), (2, 3, 2)]
SHAPE = st.sampled_from(SHAPES)
STEP = st.one_of(
    st.tuples(st.just("one"), st.sampled_from(sorted(UNARY)), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("two"), st.sampled_from(sorted(BINARY)), st.integers(0, 9), st.integers(0, 9)),
)
LARGEST = 200


def apply_step(step, pool):
    kind, name, i, j = step
    a, b = pool[i % len(pool)], pool[j % len(pool)]
    return UNARY[name](a) if kind == "one" else BINARY[name](a, b)


def fitting(steps, pool):
    """Return the steps whose shapes fit, by trying plain tensors."""
    pool, found = list(pool), []
    for step in steps:
        try:
            result = apply_step(step, pool)
        except (RuntimeError, IndexError):
            continue
        if 0 < result.numel() <= LARGEST:
            pool.append(result)
            found.append(step)
    return found


@pytest.mark.slow
@given(
    shapes=st.tuples(SHAPE, SHAPE, SHAPE),
    both=st.booleans(),
    steps=st.lists(STEP, min_size=1, max_size=8),
    directions=st.integers(1, 3),
    order=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_random_compositions_match_nested_forward_mode(shapes, both, steps, directions, order, seed):
    """Two values move, or one with a constant tensor on either side."""
    generator = torch.Generator().manual_seed(seed)
    x, y, c = (torch.randn(shape, generator=generator, dtype=D) for shape in shapes)
    used = fitting(steps, (x, y, c))

    def run(*moving):
        pool = [*moving, *([] if both else [y]), c]
        for step in used:
            pool.append(apply_step(step, pool))
        return tuple(pool[3:]) or (pool[0] * 1,)

    start = (x, y) if both else (x,)
    along = curves(run, start, order, directions, seed)
    assert_as_nested(along, order, range(1, order + 1))
