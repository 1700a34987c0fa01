"""Corrections do not change values (except for overflow), also at infinite, huge, tiny and zero arguments."""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from corrections.calls import CALLS, CONSTANTS, RUNNING, name_of
from torch.utils import _pytree as pytree

import hodiff
from hodiff.corrections.rules.special.polynomials import FAMILIES

# torch warns once that some functions are deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")

ALIKE = [math.inf, math.nan, 0.0, -0.0, 1e38, -1e30, 1e-45, 1.0]
EXTREMES = [math.inf, -math.inf, math.nan, 0.0, -0.0, 1e38, -1e38, 1e-45, 1e-38, -1e-30, 3e20, 1.0, -1.0, 0.5]

# Values that differ, and why
EXCEPTIONS = {
    F.soft_margin_loss: "torch's value overflows where the loss is a finite number",
    F.ctc_loss: "of probabilities that are infinite",
    torch.ctc_loss: "of probabilities that are infinite",
    F.instance_norm: "the kernel's variance overflows from 1e19 on, torch's is computed in float64",
    torch.instance_norm: "the kernel's variance overflows from 1e19 on, torch's is computed in float64",
    F.scaled_dot_product_attention: "of keys that are infinite",
    **dict.fromkeys((torch.linalg.eigvals, torch.linalg.eigvalsh), "small ones by the rounding of the largest"),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), "beside infinite numbers"),
}
POLYNOMIALS = {getattr(torch.special, name) for name in FAMILIES}


def filled(tensor, kind):
    """A tensor of one number, of random extremes, or with one number replaced by an extreme."""
    what, seed = kind
    if what == "alike":
        return torch.full_like(tensor, ALIKE[seed])
    drawn = random.Random(seed)
    numbers = tensor.flatten().tolist()
    for place in range(len(numbers)) if what == "extremes" else [drawn.randrange(len(numbers))]:
        numbers[place] = drawn.choice(EXTREMES)
    return torch.tensor(numbers, dtype=tensor.dtype).reshape(tensor.shape)


KINDS = [*(("alike", i) for i in range(len(ALIKE))), *((what, i) for what in ("extremes", "one") for i in range(4))]


def outputs(function, leaves, structure, wanted=()):
    """Outputs of the function, or "raises" if it raises."""
    leaves = [each.clone() if isinstance(each, torch.Tensor) else each for each in leaves]
    for place in wanted:
        leaves[place] = 1 * leaves[place].requires_grad_()
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    try:
        found = pytree.tree_leaves(function(*args, **kwargs))
    except (RuntimeError, ValueError):  # the second for negative variances
        return "raises"
    found = [each.detach() for each in found if isinstance(each, torch.Tensor)]
    # The signs of eigenvectors are arbitrary, and statistics that a normalization returns have no derivative.
    of_norm = any(each in name_of(function) for each in ("batch_norm", "group_norm"))
    first = function in (torch.linalg.eigh, torch.linalg.eig) or of_norm
    return found[:1] if first else found


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "call", [each for each in CALLS if each[0] not in EXCEPTIONS], ids=lambda call: name_of(call[0])
)
def test_values_at_extreme_arguments_match_torch(call):
    function, args, kwargs = call
    given, structure = pytree.tree_flatten((args, kwargs))
    leaves = [torch.float32 if each is torch.float64 else each for each in given]
    places = [i for i, each in enumerate(leaves) if isinstance(each, torch.Tensor) and each.is_floating_point()]
    for place in places:
        leaves[place] = leaves[place].float()
    extreme = [place for place in places if not any(given[place] is each for each in RUNNING)]
    wanted = [place for place in places if not any(given[place] is each for each in CONSTANTS)]
    numbers = [each for each in given if isinstance(each, float)]
    for kind in KINDS:
        for which in (extreme, *([place] for place in extreme if len(extreme) > 1)):
            here = [filled(each, kind) if place in which else each for place, each in enumerate(leaves)]
            expected = outputs(function, here, structure)
            if function in POLYNOMIALS:  # torch returns uninitialized memory
                expected = [each.masked_fill(here[0].isnan(), math.nan) for each in expected]
            if any(each in name_of(function) for each in ("norm", "dist")) and 3.0 in numbers:
                # torch's powers overflow or underflow in float32, although the norm does not.
                doubled = [each.double() if i in places else each for i, each in enumerate(here)]
                doubled = [torch.float64 if each is torch.float32 else each for each in doubled]
                expected = [each.float() for each in outputs(function, doubled, structure)]
            if function is torch.native_layer_norm:  # its kernel's variance overflows from 1e20 on
                expected[2] = (here[0].double().var(-1, correction=0, keepdim=True) + args[4]).rsqrt().float()
            with hodiff.corrected():
                got = outputs(function, here, structure, wanted)
            assert (got == "raises") == (expected == "raises"), (kind, which, expected, got)
            if got != "raises":
                torch.testing.assert_close(
                    got, expected, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda m: f"{kind}, {which}: {m}"
                )


def test_soft_margin_loss_is_finite_where_torch_overflows():
    """The loss is -t x to rounding, although torch's exponential overflows."""
    x = torch.tensor([-100.0], requires_grad=True)
    with hodiff.corrected():
        y = F.soft_margin_loss(x, torch.ones(1))
    assert y.item() == 100
    assert torch.autograd.grad(y, x)[0].item() == -1


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_grid_sample_of_non_finite_points_matches_torch(mode, padding):
    image = torch.arange(16.0).reshape(1, 1, 4, 4).requires_grad_()
    points = torch.tensor([math.nan, math.inf, -math.inf, 0.1, 1e20, 2.0]).repeat(2, 1).mT.reshape(1, 2, 3, 2)
    options = {"mode": mode, "padding_mode": padding, "align_corners": False}
    expected = F.grid_sample(image.detach(), points, **options)
    with hodiff.corrected():
        torch.testing.assert_close(F.grid_sample(image, points, **options).detach(), expected, equal_nan=True)


EMPTY = {
    **{name: getattr(torch.linalg, name) for name in ("det", "inv", "pinv", "norm", "svdvals", "matrix_exp")},
    **{name: getattr(torch, name) for name in ("logdet", "prod", "vander")},
    **{name: getattr(F, name) for name in ("normalize", "gelu")},
    "slogdet": lambda x: torch.linalg.slogdet(x)[1],
    "eigh": lambda x: torch.linalg.eigh(x + x.mT)[0],
    "solve": lambda x: torch.linalg.solve(x, x),
    "std": lambda x: x.std(),
    "cdist": lambda x: torch.cdist(x, x),
    "cumprod": lambda x: x.cumprod(0),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "softmax": lambda x: x.softmax(-1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long)),
    "clamp": lambda x: x.clamp(min=x * 2),
    "pow": lambda x: x**x,
}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("shape", [(0,), (0, 0), (0, 3), (3, 0), (2, 0, 0)])
def test_empty_tensors_are_accepted_where_torch_accepts_them(name, shape):
    def gradient():
        x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        try:
            y = EMPTY[name](x)
            return y.shape, torch.autograd.grad(y.sum(), x, create_graph=True)[0].shape
        except (RuntimeError, IndexError, ValueError) as error:
            return type(error)

    expected = gradient()
    with hodiff.corrected():
        assert gradient() == expected
