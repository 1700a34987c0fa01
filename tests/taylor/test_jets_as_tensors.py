"""A jet (the tensor with derivatives inside f) behaves like a tensor; a comparison with one product detects errors."""

import copy
import functools
import pickle

import pytest
import torch
from mpmath_series import D
from torch import nn
from torch.utils import _pytree as pytree

import hodiff
from hodiff.taylor.jets import Jet

X = torch.tensor([0.3, -0.8], dtype=D)
EYE = torch.eye(2, dtype=D)


@functools.singledispatch
def by_type(x):
    return x


@by_type.register(torch.Tensor)
def _(x):
    return x.sin()


def by_match(x):
    match x:
        case torch.Tensor():
            return x.sin()
    return x


SINES = {
    "isinstance": lambda x: x.sin() if isinstance(x, torch.Tensor) else x,
    "isinstance of several": lambda x: x.sin() if isinstance(x, (int, torch.Tensor)) else x,
    "is_tensor": lambda x: x.sin() if torch.is_tensor(x) else x,
    "issubclass": lambda x: x.sin() if issubclass(type(x), torch.Tensor) else x,
    "match": by_match,
    "singledispatch": by_type,
    "tree_map_only": lambda x: pytree.tree_map_only(torch.Tensor, torch.sin, [x])[0],
    "a method of the class": lambda x: torch.Tensor.sin(x),
    "as_tensor": lambda x: torch.as_tensor(x).sin(),
    "as_tensor of a dtype": lambda x: torch.as_tensor(x, dtype=D).sin(),
    "asarray": lambda x: torch.asarray(x, requires_grad=False).sin(),
    "as_subclass": lambda x: x.as_subclass(torch.Tensor).sin(),
    "writing to as_subclass": lambda x: (y := x.clone(), y.as_subclass(torch.Tensor).sin_(), y)[-1],
    "view(dtype)": lambda x: x.view(x.dtype).sin(),
    "type()": lambda x: x.sin() if x.type() == "torch.DoubleTensor" else x,
    "grad_fn": lambda x: x.sin() if x.grad_fn is None else x,
    "membership": lambda x: x.sin() if 0.3 in x else x,
}


def truth(x):
    """Compute the Laplacian of Σ sin³ x."""
    return (6 * x.sin() * x.cos() ** 2 - 3 * x.sin() ** 3).sum()


def test_as_subclass_of_another_class_is_rejected():
    with pytest.raises(hodiff.InputError, match=r"as_subclass: expected torch\.Tensor for a jet, got Parameter"):
        hodiff.laplacian(lambda x: x.as_subclass(nn.Parameter).sum())(X)


@pytest.mark.parametrize("name", SINES)
@pytest.mark.parametrize("sparse", [True, False])
def test_type_checks_inside_f_see_a_tensor(name, sparse):
    found = hodiff.laplacian(lambda x: SINES[name](x).pow(3).sum(), sparse=sparse)(X)
    torch.testing.assert_close(found, truth(X))


@pytest.mark.parametrize("name", SINES)
def test_type_checks_along_a_line_see_a_tensor(name):
    found = [hodiff.directional_derivatives(lambda x: SINES[name](x).pow(3).sum(), X, v, order=2) for v in EYE]
    torch.testing.assert_close(found[0][2] + found[1][2], truth(X))
    torch.testing.assert_close(found[0][0], X.sin().pow(3).sum())


def test_norm_at_zero_passes_validated_distributions():
    """Distributions with argument validation accept only tensors."""
    x, normal = torch.zeros(3, dtype=D), torch.distributions.Normal(torch.zeros((), dtype=D), torch.ones((), dtype=D))
    for length in (torch.linalg.vector_norm, lambda x: torch.cdist(x[None], 0 * x[None])[0, 0]):
        assert hodiff.laplacian(lambda x, length=length: normal.log_prob(length(x)))(x).item() == pytest.approx(-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["isinstance", "is_tensor", "type is", "match", "as_tensor"])
def test_type_checks_in_compiled_code_see_a_tensor(name):
    sine = SINES.get(name) or (lambda x: x.sin() if type(x) is torch.Tensor else x)
    torch._dynamo.reset()
    run = torch.compile(hodiff.laplacian(lambda x: sine(x).pow(3).sum()), backend="eager", fullgraph=True)
    torch.testing.assert_close(run(X), truth(X))


class ByType(nn.Module):
    """A module that tests for the exact type `Tensor`, which a jet does not have."""

    def forward(self, x):
        return (x.sin() if type(x) is torch.Tensor else x).pow(3).sum()


@pytest.mark.parametrize("operator", [hodiff.laplacian, hodiff.bilaplacian, hodiff.taylor.pure_second_derivatives])
@pytest.mark.parametrize("correct", [True, False])
def test_value_that_differs_from_plain_tensors_is_rejected(operator, correct):
    for f in (ByType(), lambda x: ByType()(x), functools.partial(lambda y, x: y * ByType()(x), 2.0)):
        for _ in range(2):
            with pytest.raises(hodiff.RouteError, match="expected the same value in Taylor mode as with plain tensors"):
                operator(f, correct=correct)(X)


def test_value_that_differs_is_rejected_inside_transforms():
    with pytest.raises(hodiff.RouteError, match="expected the same value in Taylor mode"):
        torch.func.grad(hodiff.laplacian(ByType()))(X)


def test_nested_forward_mode_accepts_type_checks():
    found = [hodiff.directional_derivatives(ByType(), X, v, order=2)[2] for v in EYE]
    torch.testing.assert_close(found[0] + found[1], truth(X))


def test_value_is_compared_once_per_function():
    calls = []

    def f(x):
        calls.append(isinstance(x, Jet))
        return x.square().sum()

    for _ in range(3):
        hodiff.laplacian(f)(X)
    hodiff.laplacian(f)(torch.ones(3, dtype=D))
    assert calls == [True, False, True, True, True, False]


def test_comparison_leaves_buffers_and_random_state_unchanged():
    norm = nn.BatchNorm1d(2, dtype=D)
    torch.manual_seed(0)
    hodiff.laplacian(lambda x: nn.functional.dropout(norm(x)).pow(2).sum())(torch.stack([X, 2 * X]))
    assert norm.num_batches_tracked == 1
    after = torch.rand(())
    torch.manual_seed(0)
    torch.bernoulli(torch.full((2, 2), 0.5, dtype=D))
    assert after == torch.rand(())


def test_rounding_and_random_numbers_do_not_count_as_difference():
    a = torch.tensor([0.1, 0.2, 0.3], dtype=D)
    # Only rounding errors of the value remain.
    f = lambda x: (x * a).sum() - 0.1 * x[0] - 0.2 * x[1] - 0.3 * x[2]  # noqa: E731
    hodiff.laplacian(lambda x: torch.softmax(x, 0).sum() - 1 + f(x))(torch.tensor([0.7, 1 / 3, 11.0], dtype=D))
    drawn = iter(range(100))
    hodiff.laplacian(lambda x: next(drawn) * x.sum())(X)


def test_to_of_a_constant_mask_matches():
    """`mask.to(p)` takes the dtype from its argument."""
    numbers = torch.tensor([1, 8])
    p = torch.tensor([[0.3, -0.8], [1.2, 0.4]], dtype=D)
    f = lambda p: (p * (numbers == 8).to(p)[:, None]).square().sum()  # noqa: E731
    for operator, expected in ((hodiff.laplacian, 4.0), (hodiff.bilaplacian, 0.0)):
        assert operator(f)(p) == expected


# Sums that are accumulated in place


def scattered(x):
    out = torch.zeros(2, dtype=x.dtype)
    out.scatter_add_(0, torch.tensor([0, 0]), x**2)
    return out.square().sum()


def assigned(x):
    out = torch.empty(2, dtype=x.dtype)
    out[0], out[1] = x.prod(), x.sum() ** 2
    return out.square().sum()


def added_by_index(x):
    return torch.zeros(3, dtype=D).index_add_(0, torch.tensor([2, 2]), x**2).square().sum()


def reduced(x):
    base = torch.full((2,), 0.5, dtype=D)
    base.clone().mul_(2)
    copied = base.clone()
    copied += x**2
    return copied.pow(2).sum()


ACCUMULATORS = {"scatter_add_": scattered, "setitem": assigned, "index_add_": added_by_index, "+=": reduced}


@pytest.mark.parametrize("name", ACCUMULATORS)
def test_in_place_accumulation_into_constants_matches(name):
    f = ACCUMULATORS[name]
    expected = hodiff.hessian_matrix(f, X).trace()
    for sparse in (True, False):
        torch.testing.assert_close(hodiff.laplacian(f, sparse=sparse)(X), expected)
    torch.testing.assert_close(hodiff.laplacian(f, correct=False)(X), expected)
    both = torch.stack([X, -2 * X])
    torch.testing.assert_close(
        torch.func.vmap(hodiff.laplacian(f))(both), torch.stack([hodiff.laplacian(f)(each) for each in both])
    )
    # Nested series.
    truth = hodiff.taylor.derivative_tensor(f, 4)(X)
    torch.testing.assert_close(hodiff.laplacian(hodiff.laplacian(f))(X), torch.einsum("iijj", truth))


# Values that f stores


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2, dtype=D)
        self.register_buffer("mean", torch.zeros(2, dtype=D))
        self.log = []

    def forward(self, x):
        self.last = self.mean = self.layer(x).tanh()
        self.log.append(self.last.sum())
        return self.last.square().sum()


def test_values_kept_by_a_module_are_constants_afterwards():
    model = Keeping()
    hodiff.laplacian(model)(X)
    kept, expected = model.last, model.layer(X).detach().tanh()
    for found in (kept + 0, kept.detach(), torch.as_tensor(kept.numpy(force=True)), model.state_dict()["mean"]):
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found.detach(), expected)
    assert float(model.log[0].detach()) == pytest.approx(float(expected.sum()))
    assert repr(kept) == repr(kept.detach()).replace(")", ", grad_fn=<TanhBackward0>)")
    copied = pickle.loads(pickle.dumps(copy.deepcopy(kept.detach())))
    torch.testing.assert_close(copied, expected)
    model.float()
    assert type(model.mean) is torch.Tensor


def test_value_kept_from_an_earlier_pass_is_rejected():
    kept = []

    def f(x):
        kept.append(x.sin())
        return kept[0].sum()

    hodiff.laplacian(f)(X)
    with pytest.raises(hodiff.InputError, match="of an earlier call was kept"):
        hodiff.laplacian(f)(X)


def test_conversions_that_lose_derivatives_are_rejected():
    for f in (
        lambda x: torch.as_tensor(x, dtype=torch.float32),
        lambda x: torch.Tensor.as_subclass(x, torch.Tensor),
        lambda x: torch.nested.nested_tensor([x, x]).to_padded_tensor(0.0),
        lambda x: torch.sparse_coo_tensor(torch.tensor([[0, 1]]), x).to_dense(),
        lambda x: torch.Tensor(x),
    ):
        with pytest.raises(hodiff.InputError, match="where the derivatives of a jet would be lost"):
            hodiff.laplacian(f)(X)
    for f, words in ((lambda x: x * range(3)[x[0]], "an index"), (lambda x: pickle.dumps(x), "pickling")):
        with pytest.raises(hodiff.InputError, match=f"jet: {words} would lose the derivatives"):
            hodiff.laplacian(f)(X)


MEETING = {
    "batch norm in training mode": lambda: nn.BatchNorm1d(2, track_running_stats=False, dtype=D),
    "centred": lambda: lambda x: (x - x.mean(0)).pow(3).sum(-1),
    "attention over the batch": lambda: lambda x: torch.softmax(x @ x.T, -1) @ x,
    "in another order": lambda: lambda x: x.flip(0).pow(3),
    "a total": lambda: lambda x: x.pow(3).sum(),
}
OPERATORS = (
    hodiff.laplacian,
    hodiff.bilaplacian,
    hodiff.taylor.pure_second_derivatives,
    hodiff.taylor.value_grad_laplacian,
)


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("name", MEETING)
def test_interacting_points_are_rejected_with_batched(name, count):
    x = torch.randn(count, 2, dtype=D, generator=torch.Generator().manual_seed(0))
    for operator in OPERATORS:
        for _ in range(2):
            with pytest.raises(hodiff.InputError, match=r"with batched=True, got (some|\(\))"):
                operator(MEETING[name](), batched=True)(x)
    both = torch.stack([x, x + 1])
    with pytest.raises(hodiff.InputError, match="with batched=True, got"):
        torch.func.vmap(hodiff.laplacian(MEETING[name](), batched=True))(both)


def test_independent_points_are_accepted_with_batched():
    x = torch.randn(4, 2, dtype=D, generator=torch.Generator().manual_seed(0))
    norm = nn.BatchNorm1d(2, dtype=D)
    before = norm.running_mean.clone()
    for f in (
        norm.eval(),
        nn.LayerNorm(2, dtype=D),
        lambda x: x[:, None] * torch.ones(3, 1, dtype=D),
        lambda x: torch.ones(4, dtype=D),
        # The means cancel up to rounding.
        lambda x: (x - x.mean(0) + x.mean(0)).pow(3).sum(-1),
        lambda x: torch.where(x > 0, x / x.abs().clamp_min(0), x).sqrt(),
    ):
        found = hodiff.laplacian(f, batched=True)(x)
        one_by_one = torch.stack([hodiff.laplacian(lambda y, f=f: f(y[None])[0])(each) for each in x[:1]])
        torch.testing.assert_close(found[:1], one_by_one, equal_nan=True)
    assert torch.equal(norm.running_mean, before)


def test_non_finite_series_is_not_reported_as_a_branch():
    x = torch.tensor([-torch.inf], dtype=torch.float64)
    with pytest.raises(hodiff.RouteError, match="a formula of its series is not finite at this point"):
        hodiff.taylor.jet(hodiff.functions.swish, (x,), ([torch.ones_like(x)],))


def test_overflow_of_the_torch_formula_is_not_reported_as_a_branch():
    x = torch.tensor([60.0])
    f = lambda x: torch.nn.functional.softplus(x, 2.0, 1000.0)  # noqa: E731
    assert f(x).isinf()
    value, slope, curvature = hodiff.directional_derivatives(f, x, torch.ones(1), order=2)
    assert (value.item(), slope.item(), curvature.item()) == (60.0, 1.0, 0.0)


class Negated(torch.Tensor):
    """A tensor whose cosine is negated."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return -result if func is torch.cos else result


def test_functions_that_a_closed_over_subclass_changes():
    weight = torch.ones(2, dtype=D).as_subclass(Negated)
    f = lambda x: (torch.cos(x * weight) * x).sum()  # noqa: E731
    v = torch.ones_like(X)
    value, slope = torch.func.jvp(f, (X,), (v,))
    for found, expected in zip(hodiff.directional_derivatives(f, X, v, order=1), (value, slope), strict=True):
        torch.testing.assert_close(found.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor))
    with pytest.raises(hodiff.RouteError, match="expected the same value in Taylor mode as with plain tensors"):
        hodiff.laplacian(f)(X)
