"""Tests of Triton's attention against plain softmax attention, differentiated by torch.func in float64.

Without a GPU the kernels run in Triton's interpreter, in tiles of 16 queries and 32 keys.
"""

from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hodiff.errors import InputError
from hodiff.functions.attention.dropout import kept

triton = pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() or triton.knobs.runtime.interpret),
        reason="no GPU, and triton without interpreter",
    ),
]

import triton.language as tl  # noqa: E402

from hodiff.kernels.attention import triton_attention as kernels  # noqa: E402
from hodiff.kernels.attention.triton_tiles import tanh  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL = (True, True, True)
# Some versions of Triton do not multiply float64 on a GPU.
WIDE = torch.float64 if kernels.takes(*torch.zeros(3, 1, 1, dtype=torch.float64)) else torch.float32
EXACT = 1e-12 if WIDE.itemsize == 8 else 2e-5


class Options(NamedTuple):
    scale: float = 0.4
    low: int | None = None
    high: int | None = None
    softcap: float | None = None
    dropout_p: float = 0.0
    batch: tuple[int, ...] = ()


class Problem(NamedTuple):
    options: Options
    q: Any
    k: Any
    v: Any
    mask: Any
    seed: Any
    g: Any
    # Tangents of q, k, v and g.
    tangents: Any

    @property
    def inputs(self):
        return self.q, self.k, self.v, self.mask, self.seed


def attention(options, q, k, v, mask, seed):
    """Compute attention by primitives; a row of -inf scores gives zeros."""
    scores = options.scale * q @ k.mT
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    length, keys = scores.shape[-2:]
    ahead = torch.arange(keys, device=q.device) - torch.arange(length, device=q.device)[:, None]
    if options.low is not None:
        scores = scores.masked_fill(ahead < options.low, -torch.inf)
    if options.high is not None:
        scores = scores.masked_fill(ahead > options.high, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    highest = scores.detach().amax(-1, keepdim=True)
    p = torch.exp(scores - highest.masked_fill(highest == -torch.inf, 0))
    total = p.sum(-1, keepdim=True)
    p = p / total.masked_fill(total == 0, 1)
    if options.dropout_p:
        p = p * kept(seed, options.batch, (0, 0), p.shape[-2:], options.dropout_p, p.dtype)
    return p @ v


def expected(problem):
    """Return the value, its tangent, the gradient and its tangent."""
    options, q, k, v, mask, seed, g, tangents = (_double(each) for each in problem)

    def value(q, k, v):
        return attention(options, q, k, v, mask, seed)

    def gradient(q, k, v, g):
        return torch.func.vjp(value, q, k, v)[1](g)

    given = [torch.zeros_like(x) if t is None else t for x, t in zip((q, k, v, g), tangents, strict=True)]
    out, out_t = torch.func.jvp(value, (q, k, v), tuple(given[:3]))
    by_inputs, by_inputs_t = torch.func.jvp(gradient, (q, k, v, g), tuple(given))
    return out, out_t, by_inputs, by_inputs_t


def _double(each):
    if isinstance(each, torch.Tensor):
        # In-place writes to tangents fail on expanded tensors.
        return each.double().contiguous() if each.is_floating_point() else each
    return tuple(map(_double, each)) if type(each) is tuple else each


def draw(*shape, dtype=WIDE):
    return torch.randn(shape, dtype=torch.float64).to(dtype).to(DEVICE)


def seed_of(*shape):
    return torch.randint(2**32, shape).to(DEVICE)


def make(q=(1, 20, 7), k=(1, 35, 7), v=(1, 35, 5), mask=None, seed=None, dtype=WIDE, **options):
    q, k, v = (draw(*each, dtype=dtype) if isinstance(each, tuple) else each.to(DEVICE) for each in (q, k, v))
    given = [each for each in (q, k, v, mask) if each is not None]
    batch = torch.broadcast_shapes(*(each.shape[:-2] for each in given))
    g = draw(*batch, q.shape[-2], v.shape[-1], dtype=dtype)
    tangents = tuple(draw(*each.shape, dtype=dtype) for each in (q, k, v, g))
    mask = mask.to(DEVICE) if isinstance(mask, torch.Tensor) else mask
    return Problem(Options(**options), q, k, v, mask, seed, g, tangents)


def boolean_mask():
    mask = torch.rand(1, 20, 35) < 0.5
    mask[:, 3] = False
    return mask


def additive_mask():
    mask = torch.randn(2, 1, 35, dtype=torch.float32)
    mask[0, :, 20:] = -torch.inf
    mask[1] = -torch.inf
    return mask


CASES = {
    "batches": lambda: {"q": (2, 10, 7), "k": (2, 35, 7), "v": (2, 35, 5)},
    "no batches": lambda: {"q": (20, 7), "k": (35, 7), "v": (35, 5)},
    "boolean mask with rows of nothing": lambda: {"mask": boolean_mask()},
    "additive mask that alone has batches, with rows of nothing": lambda: {"q": (1, 10, 7), "mask": additive_mask()},
    "keys all alike to a mask": lambda: {"mask": torch.randn(1, 20, 1)},
    "causal": lambda: {"high": 0},
    "causal over several tiles": lambda: {"q": (1, 70, 3), "k": (1, 70, 3), "v": (1, 70, 2), "high": 0},
    "some keys ahead over several tiles": lambda: {"q": (1, 70, 3), "k": (1, 99, 3), "v": (1, 99, 2), "high": 7},
    "causal, fewer keys": lambda: {"q": (1, 50, 3), "k": (1, 17, 3), "v": (1, 17, 4), "high": 0},
    "window that passes over tiles": lambda: {"q": (1, 70, 3), "k": (1, 75, 3), "v": (1, 75, 2), "low": -5, "high": 2},
    # Query 32 sees key 31, and query 15 sees key 32. These are the only pairs in their tiles.
    "bounds one past an edge of a tile": lambda: {
        "q": (1, 40, 3), "k": (1, 40, 3), "v": (1, 40, 2), "low": -1, "high": 17,
    },
    "keys ahead only": lambda: {"low": 25},
    "keys long past only": lambda: {"q": (1, 50, 3), "k": (1, 35, 3), "v": (1, 35, 2), "high": -18},
    "bounds that bind nothing": lambda: {"low": -(10**12), "high": 10**12},
    "softcap": lambda: {"softcap": 0.7},
    "grouped heads": lambda: {"q": (1, 2, 20, 7), "k": (1, 1, 35, 7), "v": (1, 1, 35, 5), "high": 3},
    "values alone have batches": lambda: {
        "q": (1, 1, 20, 7), "k": (1, 1, 35, 7), "v": (2, 1, 35, 5), "dropout_p": 0.3, "batch": (1, 1),
        "seed": seed_of(1, 1, 1, 1),
    },
    "dropout": lambda: {
        "q": (2, 1, 10, 7), "k": (1, 2, 20, 7), "v": (1, 2, 20, 5), "dropout_p": 0.3, "batch": (2, 2),
        "seed": seed_of(1, 1, 1, 1),
    },
    "dropout of two seeds": lambda: {
        "q": (2, 2, 10, 7), "k": (2, 1, 20, 7), "v": (2, 1, 20, 5), "dropout_p": 0.6, "batch": (2,),
        "seed": seed_of(2, 1, 1, 1),
    },
    "dropout of everything": lambda: {"dropout_p": 1.0, "batch": (1,), "seed": seed_of(1, 1, 1)},
    "strides": lambda: {
        "q": torch.randn(20, 14, 2, dtype=WIDE).permute(2, 0, 1)[..., ::2],
        "k": torch.randn(7, 35, dtype=WIDE).mT.expand(2, 35, 7),
        "v": torch.randn(2, 5, 70, dtype=WIDE).mT[:, ::2],
        "mask": torch.randn(35, 20).t()[None],
    },
    "everything": lambda: {
        "mask": torch.rand(1, 20, 1) < 0.8, "low": -9, "high": 12, "softcap": 1.5, "dropout_p": 0.2, "batch": (1,),
        "seed": seed_of(1, 1, 1),
    },
}  # fmt: skip


def computed(problem, saved=None):
    q_t, k_t, v_t, g_t = problem.tangents
    out = kernels.value(problem.options, *problem.inputs)
    out_t = kernels.tangent(problem.options, *problem.inputs, q_t, k_t, v_t)
    by_inputs = kernels.gradient(problem.options, ALL, *problem.inputs, problem.g, saved)
    *by_inputs_t, second_out_t = kernels.gradient_tangent(
        problem.options, ALL, True, *problem.inputs, problem.g, q_t, k_t, v_t, g_t
    )
    return out, out_t, by_inputs, tuple(by_inputs_t), second_out_t


def require_close(found, wanted, relative):
    """Compare relative to the largest element of each tensor; a wrong term would change a tensor by about that much."""
    flat_found, flat_wanted = (
        [each for part in parts for each in (part if isinstance(part, tuple) else (part,))] for parts in (found, wanted)
    )
    for one, other in zip(flat_found, flat_wanted, strict=True):
        assert one.shape == other.shape
        assert (one.double() - other).abs().max() <= relative * other.abs().max()


@pytest.mark.one_in(20)
@pytest.mark.parametrize("case", CASES)
def test_all_derivatives_match_formula(case):
    problem = make(**CASES[case]())
    wanted = expected(problem)
    require_close(computed(problem), (*wanted, wanted[1]), EXACT)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", ["boolean mask with rows of nothing", "dropout of two seeds"])
def test_gradient_from_saved_results_matches(case):
    problem = make(**CASES[case]())
    saved = kernels.value_to_save(problem.options, *problem.inputs)
    wanted = expected(problem)
    require_close((saved.out,), wanted[:1], EXACT)
    require_close(kernels.gradient(problem.options, ALL, *problem.inputs, problem.g, saved), wanted[2], EXACT)


# Weights and inputs are rounded to 8 or 11 bits. A wrong term would be off by a tenth or more.
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("dtype", "relative"),
    [
        (torch.float32, 1e-5),
        pytest.param(torch.float16, 4e-3, marks=pytest.mark.slow),  # like bfloat16, which has fewer digits
        (torch.bfloat16, 3e-2),
    ],
    ids=str,
)
def test_low_precision_matches_within_rounding(dtype, relative):
    options = {"mask": torch.rand(1, 20, 35) < 0.8, "softcap": 1.5, "dropout_p": 0.2, "batch": (1,)}
    problem = make(dtype=dtype, seed=seed_of(1, 1, 1), **options)
    wanted, found = expected(problem), computed(problem)
    require_close(found, (*wanted, wanted[1]), relative)
    assert {each.dtype for each in (*found[:2], *found[2], *found[3])} == {dtype}


def test_broadcast_gradients_are_summed_in_float32():
    one = torch.ones(1, 1, 1, dtype=torch.float16)
    problem = make(q=torch.ones(2, 2, 1, dtype=torch.float16), k=one, v=one)
    # The contribution of either batch overflows float16, but their sum does not.
    g = torch.tensor([[[60000.0], [60000.0]], [[-60000.0], [-51200.0]]], dtype=torch.float16).to(DEVICE)
    (by_v,) = kernels.gradient(problem.options, (False, False, True), *problem.inputs, g)
    assert by_v.item() == 8800


SMALL = {"q": (1, 4, 3), "k": (1, 5, 3), "v": (1, 5, 2), "softcap": 0.8, "dropout_p": 0.3, "batch": (1,)}


# Every third case together covers all four combinations of each pair of tangents.
@pytest.mark.one_in(9)
@pytest.mark.parametrize("given", list(product((True, False), repeat=4)))
def test_missing_tangents_count_as_zero(given):
    problem = make(seed=seed_of(1, 1, 1), **SMALL)
    tangents = tuple(each if want else None for each, want in zip(problem.tangents, given, strict=True))
    problem = problem._replace(tangents=tangents)
    _, out_t, _, by_inputs_t = expected(problem)
    found = kernels.gradient_tangent(problem.options, ALL, True, *problem.inputs, problem.g, *tangents)
    require_close(found, (*by_inputs_t, out_t), EXACT)
    require_close((kernels.tangent(problem.options, *problem.inputs, *tangents[:3]),), (out_t,), EXACT)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("chosen", list(product((True, False), repeat=3)))
def test_only_requested_gradients_are_returned(chosen):
    problem = make(seed=seed_of(1, 1, 1), **SMALL)
    _, out_t, by_inputs, by_inputs_t = expected(problem)
    saved = kernels.value_to_save(problem.options, *problem.inputs)
    of_gradient, of_tangent = (
        tuple(each for each, want in zip(parts, chosen, strict=True) if want) for parts in (by_inputs, by_inputs_t)
    )
    for given in (None, saved):
        found = kernels.gradient(problem.options, chosen, *problem.inputs, problem.g, given)
        require_close(found, of_gradient, EXACT)
    for with_output in (True, False):
        found = kernels.gradient_tangent(
            problem.options, chosen, with_output, *problem.inputs, problem.g, *problem.tangents
        )
        require_close(found, (*of_tangent, out_t) if with_output else of_tangent, EXACT)


@pytest.mark.slow
def test_dropout_mask_matches_torch():
    keys = 40
    zeros = torch.zeros(3, 2, 20, 1, device=DEVICE), torch.zeros(3, 2, keys, 1, device=DEVICE)
    options = Options(dropout_p=0.25, batch=(3, 2))
    seed = torch.tensor(0xFEDCBA98).reshape(1, 1, 1, 1).to(DEVICE)
    # With equal weights and the identity matrix as values, the output is the dropout factors times 1 / keys.
    out = kernels.value(options, *zeros, torch.eye(keys, device=DEVICE).expand(3, 2, keys, keys), None, seed)
    factors = kept(seed, (3, 2), (0, 0), (20, keys), 0.25, torch.float32)
    assert torch.equal(out != 0, factors != 0)
    torch.testing.assert_close(out * keys, factors, rtol=1e-5, atol=0)


def test_rows_masked_by_the_lowest_float32_are_uniform():
    """These rows weight all keys equally, like torch; a log-sum-exp would give every key the weight 1."""
    mask = torch.zeros(1, 20, 35)
    mask[:, 4:9] = torch.finfo(torch.float32).min
    problem = make(dtype=torch.float32, mask=mask)
    out = kernels.value(problem.options, *problem.inputs)
    assert (out[:, 4:9] - problem.v.mean(-2, keepdim=True)).abs().max() < 1e-5
    wanted = problem.v.double().requires_grad_()
    weights = torch.softmax(0.4 * problem.q.double() @ problem.k.double().mT, -1)
    weights[:, 4:9] = 1 / 35
    (by_v,) = torch.autograd.grad(weights @ wanted, wanted, problem.g.double())
    (found,) = kernels.gradient(problem.options, (False, False, True), *problem.inputs, problem.g)
    require_close((found,), (by_v,), 1e-5)


def test_scores_beyond_the_exponential_range_match():
    problem = make(dtype=torch.float32, scale=3000.0)
    wanted = expected(problem)
    require_close((kernels.value(problem.options, *problem.inputs),), wanted[:1], 1e-5)


def test_empty_sequences_are_accepted():
    empty = make(q=(1, 0, 7))
    assert kernels.value(empty.options, *empty.inputs).shape == (1, 0, 5)
    by_q, by_k, by_v = kernels.gradient(empty.options, ALL, *empty.inputs, empty.g)
    assert by_q.shape == (1, 0, 7)
    assert not by_k.any()
    assert not by_v.any()


class _Sizes(TorchDispatchMode):
    """Record the largest storage, in bytes, of any result."""

    greatest = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        found = operator(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.greatest = max(self.greatest, found.untyped_storage().nbytes())
        return found


@pytest.mark.slow
def test_no_tensor_has_an_element_per_query_and_key():
    problem = make(q=(33, 2), k=(35, 2), v=(35, 2), high=0)
    with _Sizes() as sizes:
        computed(problem)
    assert sizes.greatest == 35 * 2 * WIDE.itemsize < 33 * 35 * WIDE.itemsize


@triton.jit
def tanh_kernel(x, y, SIZE: tl.constexpr):
    tl.store(y + tl.arange(0, SIZE), tanh(tl.load(x + tl.arange(0, SIZE))))


def test_tanh_has_small_relative_error():
    x = torch.cat((torch.logspace(-12, 2, 255, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))).to(DEVICE)
    x = torch.cat((x, -x))
    for dtype, relative in ((torch.float64, 2e-15), (torch.float32, 1e-6)):
        y = torch.empty_like(x, dtype=dtype)
        tanh_kernel[(1,)](x.to(dtype), y, x.numel())
        exact = torch.tanh(x.to(dtype).double())
        assert ((y.double() - exact).abs() <= relative * exact.abs()).all()


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"q": (1, 20, 257), "k": (1, 35, 257)}, r"heads of at most 256 .* q \(1, 20, 257\)"),
        ({"v": torch.zeros(1, 35, 5, dtype=torch.float32)}, "one dtype .* v .*float32"),
        ({"dtype": torch.complex64}, "one dtype of float16, .*complex64"),
    ],
)
def test_rejects_unsupported_inputs(inputs, says):
    problem = make(**inputs)
    with pytest.raises(InputError, match=f"attention: q, k, v: .*{says}"):
        kernels.value(problem.options, *problem.inputs)
