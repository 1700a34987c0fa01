"""Random programs of operators: the pattern contains every entry of the Hessian."""

import numpy as np
import pytest
import torch

import hodiff
from hodiff.sparse import hessian_pattern

D = torch.float64
N = 7
INDEX = torch.tensor([2, 0, 3, 1])
MASK = torch.tensor([True, False, True, True, False, True, False])

# All functions map a vector to a vector of any length, with elements of order one.
UNARY = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "square": lambda a: a * a,
    "root": lambda a: torch.sqrt(1.5 + torch.sin(a)),
    "sigmoid": torch.sigmoid,
    "softplus": torch.nn.functional.softplus,
    "relu": torch.relu,
    "absolute": torch.abs,
    "floor": lambda a: a.floor() + a,
    "clamped": lambda a: a.clamp(-0.4, 0.6),
    "detached": lambda a: a.detach() * a,
    "shifted": lambda a: a.roll(1),
    "turned": lambda a: a.flip(0),
    "differences": lambda a: a[1:] - a[:-1] if len(a) > 1 else a,
    "odd": lambda a: a[::2],
    "padded": lambda a: torch.nn.functional.pad(a, (1, 0)),
    "gathered": lambda a: a[INDEX % len(a)],
    "added": lambda a: torch.zeros(4, dtype=D).index_add(0, INDEX[: min(len(a), 4)], a[:4]),
    "scattered": lambda a: torch.zeros(len(a) + 1, dtype=D).scatter_add(0, (torch.arange(len(a)) * 2) % len(a), a),
    "written": lambda a: torch.zeros(len(a) + 2, dtype=D).index_put((torch.arange(len(a)),), a),
    "in place": lambda a: _in_place(a),
    "masked": lambda a: torch.where(MASK[: len(a)], a, a.flip(0)) if len(a) <= N else a,
    "cut": lambda a: a.masked_fill(torch.arange(len(a)) % 3 == 0, 0.5),
    "sum": lambda a: a.sum()[None],
    "mean": lambda a: a.mean().repeat(2),
    "cumulated": lambda a: a.cumsum(0) / len(a),
    "pairs": lambda a: a[: len(a) // 2 * 2].view(-1, 2).sum(1) if len(a) > 1 else a,
    "rows": lambda a: a[: len(a) // 2 * 2].view(-1, 2).softmax(1).reshape(-1) if len(a) > 1 else a,
    "normed": lambda a: (
        torch.nn.functional.layer_norm(a[: len(a) // 3 * 3].view(-1, 3), (3,)).view(-1) if len(a) > 2 else a
    ),
    "sorted": lambda a: a.sort().values,
    "largest": lambda a: a.topk(min(2, len(a))).values,
    "matrix": lambda a: (torch.eye(len(a), dtype=D) + 0.1) @ a,
    "filtered": lambda a: torch.nn.functional.conv1d(a[None, None], torch.ones(1, 1, 2, dtype=D) / 2, padding=1)[0, 0],
    "pooled": lambda a: torch.nn.functional.max_pool1d(a[None, None], 2)[0, 0] if len(a) > 1 else a,
    "logs": lambda a: a.logsumexp(0)[None],
    "unfolded": lambda a: a.unfold(0, 2, 1).reshape(-1)[:N] if len(a) > 1 else a,
}
BINARY = {
    "plus": torch.add,
    "times": torch.mul,
    "over": lambda a, b: a / (2 + torch.sin(b)),
    "larger": torch.maximum,
    "where": lambda a, b: torch.where(a > b, a, b * b),
    "powers": lambda a, b: (1.5 + torch.sin(a)) ** torch.sin(b),
    "angle": lambda a, b: torch.atan2(a, b + 2),
    "cat": lambda a, b: torch.cat([a, b])[:N],
    "outer": lambda a, b: torch.outer(a, b).sum(1),
    "distance": lambda a, b: torch.hypot(a + 1.1, b),
    "dot": lambda a, b: (a @ b)[None],
}


def _in_place(a):
    y = a.clone()
    y[:1] *= 2
    y[1:] += a[:-1]
    y.tanh_()
    return y


def program(seed):
    """Draw a scalar function of N numbers with up to eight operators."""
    random = np.random.default_rng(seed)
    steps = [
        (random.random() < 0.6, random.integers(len(UNARY)), random.integers(len(BINARY)), random.integers(99, size=2))
        for _ in range(random.integers(1, 9))
    ]

    def f(x):
        pool = [x]
        for is_unary, one, two, (i, j) in steps:
            a, b = pool[-1 - i % min(len(pool), 2)], pool[j % len(pool)]
            if is_unary:
                pool.append(list(UNARY.values())[one](a))
            else:
                length = min(len(a), len(b))
                pool.append(list(BINARY.values())[two](a[:length], b[:length]))
        weights = torch.linspace(0.5, 1.5, len(pool[-1]), dtype=D)
        return (weights * pool[-1].sin()).sum() + (x * 0.1).sum()

    return f


def assert_nothing_is_missing(seed):
    f = program(seed)
    generator = torch.Generator().manual_seed(seed)
    pattern = hessian_pattern(f, torch.randn(N, generator=generator, dtype=D)).toarray()
    for _ in range(2):
        x = torch.randn(N, generator=generator, dtype=D)
        dense = hodiff.hessian_matrix(f, x).numpy()
        here = hessian_pattern(f, x, at_point=True).toarray()
        for found in (pattern, here):
            assert not ((dense != 0) & ~found).any(), seed
    return pattern.all()


# torch has no batching rules for some gradients, and loops instead.
pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    # Some points have tied maxima, which are not smooth.
    pytest.mark.filterwarnings("ignore:.*is not symmetric:hodiff.HodiffWarning"),
]


# Rules know their own operator alone: four hundred programs call each of the 47 operators some forty times.
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 400, 100))
def test_patterns_of_random_programs_are_complete(first):
    full = sum(assert_nothing_is_missing(seed) for seed in range(first, first + 100))
    assert full < 90


def test_wrong_rule_is_detected(monkeypatch):
    """A wrong rule is detected, so the comparison can fail."""
    from hodiff.sparse.detection.call import RULES

    monkeypatch.setitem(RULES, "gather", lambda call: [None])
    monkeypatch.setitem(RULES, "index", lambda call: [None])
    x = torch.randn(N, dtype=D)
    f = lambda x: (x[INDEX] ** 3).sum()  # noqa: E731
    dense = hodiff.hessian_matrix(f, x).numpy()
    assert ((dense != 0) & ~hessian_pattern(f, x).toarray()).any()
