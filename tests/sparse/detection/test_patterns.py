"""Tests of the patterns of known functions, in various contexts, and with wrong input."""

import warnings

import numpy as np
import pytest
import torch
from cases import rosenbrock
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import hodiff
from hodiff import HodiffWarning, InputError
from hodiff.sparse import hessian_pattern, jacobian_pattern
from hodiff.sparse.detection import supports
from tests.sparse.problems import message_passing, point

D = torch.float64


def band(n, width):
    i, j = np.indices((n, n))
    return abs(i - j) <= width


def block(n, size):
    i, j = np.indices((n, n))
    return i // size == j // size


INDEX = torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 4, 5]])
MASK = torch.tensor([True, False, True, True, False, True])


def edges(x):
    return ((x[INDEX[0]] - x[INDEX[1]]) ** 4).sum()


def written(x):
    y = torch.zeros(7, dtype=x.dtype)
    y[1:] = x
    y[2] = x[0] * x[3]
    y[4:] *= x[:3]
    return (y**3).sum()


def messages(x):
    """Sum messages of neighbours in place."""
    m = torch.zeros(6, dtype=x.dtype).index_add_(0, INDEX[0], x[INDEX[1]])
    return (m**2).sum()


def message_pattern():
    pattern = np.zeros((6, 6), dtype=bool)
    for i in range(6):
        found = INDEX[1][INDEX[0] == i]
        pattern[np.ix_(found, found)] = True
    return pattern


def edge_pattern():
    pattern = np.zeros((6, 6), dtype=bool)
    for i, j in INDEX.T:
        pattern[np.ix_([i, j], [i, j])] = True
    return pattern


def written_pattern():
    pattern = np.zeros((6, 6), dtype=bool)
    # y = 0, x0, x0 x3, x2, x3 x0, x4 x1, x5 x2
    for found in ([0], [0, 3], [2], [0, 3], [1, 4], [2, 5]):
        pattern[np.ix_(found, found)] = True
    return pattern


KNOWN = {
    "linear": (lambda x: (3 * x).sum() + x.prod() * 0 + x[0] * 2 - x.prod() * 0, None),
    "separable": (lambda x: x.exp().sum() + x.sum(), np.eye(6, dtype=bool)),
    "rosenbrock": (rosenbrock, band(6, 1)),
    "square of a sum": (lambda x: x.sum() ** 2, np.ones((6, 6), dtype=bool)),
    "steps": (lambda x: (x.floor() * x.sign() * (x > 0) + x**2).sum(), np.eye(6, dtype=bool)),
    "pairs": (lambda x: (x.view(3, 2)[:, 0].sin() * x.view(3, 2)[:, 1] ** 2).sum(), block(6, 2)),
    "matrices": (lambda x: torch.linalg.det(x.view(1, 2, 3) @ x.view(1, 2, 3).mT).sum(), np.ones((6, 6), dtype=bool)),
    "rows of softmax": (lambda x: x.view(2, 3).softmax(-1)[:, 0].sum(), block(6, 3)),
    "edges": (edges, edge_pattern()),
    "written in place": (written, written_pattern()),
    "messages": (messages, message_pattern()),
    "fixed mask": (lambda x: torch.where(MASK, x, 3.0).pow(2).sum(), np.diag(MASK.numpy())),
    "filled": (lambda x: (x.masked_fill(MASK, 0.0) ** 2).sum(), np.diag(~MASK.numpy())),
    "padded": (lambda x: nn.functional.pad(x, (2, 1)).roll(1).flip(0).square().sum(), np.eye(6, dtype=bool)),
    "cat": (lambda x: torch.cat([x[:2], x[3:], x[:1]]).pow(4).sum(), np.diag([1, 1, 0, 1, 1, 1]).astype(bool)),
    "views": (lambda x: (x.view(2, 3).t().reshape(-1)[::2] * x.view(2, 3).t().reshape(-1)[1::2]).sum(), None),
    "convolution": (
        lambda x: nn.functional.conv1d(x[None, None], torch.ones(1, 1, 2, dtype=D))[0, 0].tanh().sum(),
        band(6, 1),
    ),
    "pooling": (lambda x: nn.functional.avg_pool1d(x[None, None], 2).square().sum(), block(6, 2)),
    "a product of all": (lambda x: x.prod(), ~np.eye(6, dtype=bool)),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", KNOWN)
def test_patterns_match_known_ones(name):
    f, expected = KNOWN[name]
    x = torch.linspace(0.5, 1.7, 6, dtype=D)
    pattern = hessian_pattern(f, x).toarray()
    truth = hodiff.hessian_matrix(f, x).numpy() != 0
    assert not (truth & ~pattern).any()
    if expected is not None and name != "a product of all":
        assert (pattern == expected).all(), pattern.astype(int)
    assert (pattern == pattern.T).all()


@pytest.mark.slow
def test_pattern_at_a_point_is_smaller_than_for_all_points():
    def f(x):
        return (x[:3].relu() * x[3:]).sum() + torch.maximum(x[0], x[1]) ** 2 + x[torch.argsort(x)[:2]].prod()

    x = torch.tensor([-1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=D)
    everywhere, here = hessian_pattern(f, x).toarray(), hessian_pattern(f, x, at_point=True).toarray()
    for seed in range(20):
        at = torch.randn(6, dtype=D, generator=torch.Generator().manual_seed(seed))
        truth = hodiff.hessian_matrix(f, at).numpy() != 0
        assert not (truth & ~everywhere).any()
        assert not (truth & ~hessian_pattern(f, at, at_point=True).toarray()).any()
    assert here.sum() < everywhere.sum()
    assert not (here & ~everywhere).any()


def test_constants_may_change_their_values_but_masks_may_not():
    x, w = torch.ones(3, dtype=D), torch.zeros(3, dtype=D)
    f = lambda x, w: (w * x**2).sum()  # noqa: E731
    assert hessian_pattern(f, x, w).nnz == 3
    assert hessian_pattern(f, x, w, at_point=True).nnz == 0
    mask = torch.tensor([True, False, True])
    assert hessian_pattern(lambda x, m: torch.where(m, x, 0).square().sum(), x, mask).nnz == 2


def test_pytrees_modules_and_transforms_match():
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    inputs = torch.randn(4, 2, dtype=D)

    def loss(p):
        return torch.func.functional_call(model, p, (inputs,)).square().sum()

    truth = hodiff.hessian_matrix(loss, parameters).numpy() != 0
    assert not (truth & ~hessian_pattern(loss, parameters).toarray()).any()

    def energy(x):
        return torch.func.vmap(torch.func.grad(lambda z: z.prod() ** 2))(x.view(3, 2)).pow(2).sum()

    assert (hessian_pattern(energy, torch.ones(6, dtype=D)).toarray() == block(6, 2)).all()


def test_jacobian_patterns_of_pytrees_and_complex_numbers():
    def f(x):
        z = torch.view_as_complex(x.view(3, 2))
        return {"a": (z * z.conj()).real, "b": x[2:] - x[:-2]}

    pattern = jacobian_pattern(f, torch.ones(6, dtype=D)).toarray()
    pairs = np.kron(np.eye(3), np.ones((1, 2))).astype(bool)
    steps = (np.eye(4, 6, 2) + np.eye(4, 6)).astype(bool)
    assert (pattern == np.vstack([pairs, steps])).all()


def test_reused_memory_has_no_stale_dependences():
    """A tensor in reused memory does not inherit the dependences of the earlier tensor."""

    def f(x):
        for i in range(50):
            (x * i).exp()
            torch.ones(6, dtype=D).mul_(2)
        return (torch.zeros(6, dtype=D) + 1 + x[:1] ** 2).sum()

    assert hessian_pattern(f, torch.ones(6, dtype=D)).nnz == 1


def test_operator_without_rule_is_dense_with_a_warning():
    x = torch.ones(3, dtype=D)
    with (
        torch.sparse.check_sparse_tensor_invariants(False),
        pytest.warns(HodiffWarning, match="no rule for .* to_sparse .test_patterns.py:"),
    ):
        pattern = hessian_pattern(lambda x: (x.to_sparse().to_dense() ** 2).sum(), x)
    assert pattern.nnz == 9


def test_branches_on_values_are_rejected_unless_at_a_point():
    def f(x):
        return (x**2).sum() if x.sum() > 0 else x.prod()

    x = torch.ones(3, dtype=D)
    with pytest.raises(InputError, match=r"course that does not depend .*\(test_patterns.py:\d+, in f.* at_point=True"):
        hessian_pattern(f, x)
    assert hessian_pattern(f, x, at_point=True).nnz == 3
    assert hessian_pattern(f, -x, at_point=True).nnz >= 6
    with pytest.raises(InputError, match="got index of a tensor"):
        hessian_pattern(lambda x: (x[x > 0] ** 2).sum(), x)
    assert hessian_pattern(lambda x: (x[x > 0] ** 2).sum(), x - 1 + torch.eye(3, dtype=D)[0], at_point=True).nnz == 1


def test_validation_inside_torch_is_allowed():
    f = lambda x: nn.functional.gaussian_nll_loss(x[:3], torch.zeros(3, dtype=D), x[3:].exp())  # noqa: E731
    assert hessian_pattern(f, torch.ones(6, dtype=D)).nnz == 12


@pytest.mark.parametrize("leave", ["numpy", "tolist", "__array__"])
def test_numbers_that_leave_torch_are_rejected(leave):
    def f(x):
        return (x * torch.tensor(np.asarray(getattr(x.detach(), leave)()))).sum()

    with pytest.raises(InputError, match=f"Tensor.{leave} .*test_patterns.py:"):
        hessian_pattern(f, torch.ones(3, dtype=D), at_point=True)


def test_rejects_bad_arguments():
    x = torch.ones(3, dtype=D)
    with pytest.raises(InputError, match="hessian_pattern: expected a function that returns one real number"):
        hessian_pattern(torch.sin, x)
    with pytest.raises(InputError, match="jacobian_pattern: f: expected a callable"):
        jacobian_pattern(x, x)
    with pytest.raises(InputError, match=r"hessian_pattern: x: expected a tensor outside of torch.func transforms"):
        torch.func.vmap(lambda x: hessian_pattern(torch.sum, x))(torch.ones(2, 3))
    with pytest.raises(InputError, match=r"jacobian_pattern: x: expected a tensor outside of torch.func transforms"):
        torch.func.grad(lambda x: jacobian_pattern(torch.sum, x))(torch.ones(3))
    with pytest.raises(InputError, match=r"write hodiff.sparse.jacobian\(f\)\(x\)"):
        hodiff.sparse.jacobian(torch.sin, torch.ones(3))
    with pytest.raises(InputError, match="at_point"):
        hessian_pattern(rosenbrock, x, at_point=1)
    with pytest.raises(InputError, match="does not depend"):
        hessian_pattern(lambda x: torch.ones(()), x)


@pytest.mark.parametrize(
    "operator",
    [
        torch.cumsum,
        torch.cumprod,
        torch.logcumsumexp,
        lambda x, dim: x.cummax(dim).values,
        lambda x, dim: x.cummin(dim)[0],
    ],
    ids=["sum", "product", "logsumexp", "maximum", "minimum"],
)
def test_cumulative_operators_depend_on_earlier_elements(operator):
    x = torch.arange(1, 7, dtype=D).view(2, 3)
    along = np.tril(np.ones((3, 3), bool))
    np.testing.assert_array_equal(jacobian_pattern(lambda x: operator(x, 1), x).toarray(), np.kron(np.eye(2), along))
    along = np.tril(np.ones((2, 2), bool))
    np.testing.assert_array_equal(jacobian_pattern(lambda x: operator(x, 0), x).toarray(), np.kron(along, np.eye(3)))
    assert jacobian_pattern(lambda x: operator(x, 0), x[0, 0]).toarray().tolist() == [[True]]


def test_dense_patterns_are_rejected(monkeypatch):
    monkeypatch.setattr(supports, "MOST_ENTRIES", 10_000)
    monkeypatch.setattr(supports, "MOST_OF_EACH", 10)
    with pytest.raises(InputError, match=r"got more than 10,000 pairs .* from cumsum .*this is not sparse"):
        hessian_pattern(lambda x: x.sum() ** 2 + x.square().sum().exp() * x.cumsum(0).sum(), torch.ones(200, dtype=D))
    # A correction's rule runs here, which takes other InputErrors for a refusal of its arguments.
    with pytest.raises(InputError, match=r"got more than 20,000 pairs .*this is not sparse"):
        hodiff.sparse.hessian(lambda x: x.prod())(torch.ones(2000, dtype=D))


def test_search_has_no_side_effects():
    x = torch.ones(3, dtype=D, requires_grad=True)
    hessian_pattern(rosenbrock, x)
    assert x.grad is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hessian_pattern(rosenbrock, torch.rand(20_000)).nnz == 3 * 20_000 - 2


def test_message_passing_pattern_has_the_reach_of_its_rounds():
    """Each round reaches the next nodes on both sides, and the energy couples nodes that share a source."""
    found = hessian_pattern(message_passing, point(24)).toarray()
    nodes = np.arange(12)
    apart = np.abs(nodes[:, None] - nodes)
    near = np.minimum(apart, 12 - apart) <= 4
    assert (found == near.repeat(2, 0).repeat(2, 1)).all()


class Rounded(torch.autograd.Function):
    """Rounds with the derivative of the identity, and also returns a non-differentiable tensor."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        steps = (x * scale).round()
        ctx.mark_non_differentiable(steps)
        return steps / scale, steps

    @staticmethod
    def backward(ctx, cotangent, _):
        return cotangent, None


class Flipped(torch.autograd.Function):
    """Elementwise in forward; backward reverses the order of cotangents and multiplies them by the other argument."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, y):
        return x.sign() * y.sign()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, cotangent):
        x, y = ctx.saved_tensors
        return (cotangent * y).flip(0), cotangent * x.flip(0)

    @staticmethod
    def jvp(ctx, dx, dy):
        x, y = ctx.saved_tensors
        return dx.flip(0) * y + dy * x.flip(0)


class Overwriting(torch.autograd.Function):
    """Adds random numbers to its argument and rounds it down, in place."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.copy_((x + torch.rand_like(x)).floor())

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent.cumsum(0)


@hodiff.authoring.custom_vjp
def turned(x, y):
    """Round one argument, and pass its cotangent to the next element."""
    return x.floor() + y.sin()


turned.defvjp(lambda x, y: (turned(x, y), y), lambda y, cotangent: (cotangent.roll(1), cotangent * y.cos()))
steps = hodiff.authoring.elementwise(torch.floor, derivative=lambda x: 1 + x**2)


rounded, through = Rounded.apply, hodiff.straight_through(torch.round, lambda x: x.roll(1) ** 2)
OWN = {
    "rounded": lambda x: rounded(x, 4.0)[0],
    "flipped": lambda x: Flipped.apply(x, x.roll(1)),
    "overwriting": lambda x: Overwriting.apply(x * 2),
    "straight through": through,
    "turned": lambda x: turned(x, x),
    "steps": lambda x: steps(4 * x) * x.roll(1),
    "quantized": lambda x: hodiff.functions.quantize_ste(x, 4),
    "rounded twice": lambda x: rounded(rounded(x.sin(), 2.0)[0], 4.0)[0],
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", OWN)
def test_functions_with_custom_derivatives_match(name):
    """The pattern follows the custom derivative, not operations in forward such as rounding."""
    f, x = OWN[name], point(6)
    expected = torch.stack([torch.autograd.grad(f(y)[i], y)[0] for i in range(6) for y in [x.clone().requires_grad_()]])
    state = torch.get_rng_state()
    found = jacobian_pattern(f, x).toarray()
    assert found[expected.numpy() != 0].all()
    if name != "quantized":  # its scale depends on all inputs, without a derivative
        np.testing.assert_array_equal(found, expected.numpy() != 0)
    assert torch.equal(torch.get_rng_state(), state)

    def scalar(x):
        return (f(x) ** 2).sum() + (f(x)[:1] * f(x)[-1:]).sum()

    dense = hodiff.hessian(scalar)(x)
    assert (torch.from_numpy(hessian_pattern(scalar, x).toarray()) | (dense == 0)).all()
    torch.testing.assert_close(hodiff.sparse.hessian(scalar)(x).to_dense(), dense)


@pytest.mark.parametrize("find", [hessian_pattern, jacobian_pattern])
def test_missing_derivative_raises(find):
    def f(x):
        return torch.add(x, x, out=torch.empty(4, dtype=D)).sum()

    with pytest.raises(hodiff.RouteError, match=r"_pattern: torch does not implement .* functions with out=\.\.\."):
        find(f, point(4))


def test_failing_backward_counts_as_dense():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sign()

        @staticmethod
        def backward(ctx, cotangent):
            raise ValueError("on purpose")

    with pytest.warns(HodiffWarning, match="no rule for the dependencies of Broken"):
        assert jacobian_pattern(Broken.apply, point(3)).nnz == 9
    assert Broken.forward(None, point(3)).sum() == 3
    assert "followed" not in Broken.forward.__qualname__


MATRIX = torch.zeros(5, 9, dtype=D)
MATRIX[torch.arange(5), torch.arange(5)] = 1.0
MATRIX[:, 8] = -2.0


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:Sparse C")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
def test_constant_sparse_matrices_match(layout):
    A = {"coo": MATRIX.to_sparse_coo, "csr": MATRIX.to_sparse_csr, "csc": MATRIX.to_sparse_csc}[layout]()
    x = point(9)
    pairs = {
        lambda x: ((A @ x) ** 3).sum(): lambda x: ((MATRIX @ x) ** 3).sum(),
        lambda x: (A @ x[:, None]).sin().sum(): lambda x: (MATRIX @ x).sin().sum(),
        lambda x: torch.sparse.mm(A, x[:, None]).sin().sum(): lambda x: (MATRIX @ x).sin().sum(),
        lambda x: (x[None] @ A.t()).sin().sum(): lambda x: (MATRIX @ x).sin().sum(),
        lambda x: torch.addmm(x[:5, None], A, x[:, None]).sin().sum(): lambda x: (x[:5] + MATRIX @ x).sin().sum(),
    }
    for f, dense in pairs.items():
        expected = torch.func.hessian(dense)(x)
        np.testing.assert_array_equal(hessian_pattern(f, x).toarray(), expected.numpy() != 0)
        torch.testing.assert_close(hodiff.sparse.hessian(f)(x).to_dense(), expected)


def test_masks_and_integers_hide_entries():
    mask = torch.arange(6) % 2 == 0
    for factor, count in ((mask, 3), (mask.long(), 3), (mask.to(D), 6)):
        for f in (lambda x, m=factor: (m * x) ** 2, lambda x, m=factor: (x * 1).mul_(m) ** 2):
            assert jacobian_pattern(f, point(6)).nnz == count
            assert hessian_pattern(lambda x, f=f: f(x).sum(), point(6)).nnz == count
    moving = lambda x: (x > 0.5) * x  # noqa: E731
    assert jacobian_pattern(moving, point(6)).nnz == 6
    assert jacobian_pattern(moving, point(6), at_point=True).nnz == (point(6) > 0.5).sum()


def test_torch_cond_is_rejected_unless_at_a_point():
    def f(x):
        return torch.cond(x.sum() > 0, lambda x: (x[0] * x[1]) ** 2, lambda x: (x[1] * x[2]) ** 2, (x,))

    with pytest.raises(InputError, match="course that does not depend on the values of x"):
        hessian_pattern(f, point(3))
    assert hessian_pattern(f, point(3), at_point=True).nnz == 4
    with pytest.raises(InputError, match="check=True uses the pattern at this x"):
        hodiff.sparse.hessian(f, check=False)(point(3))


def test_tensors_made_of_python_numbers_are_rejected():
    with pytest.raises(InputError, match=r"got torch\.tensor of numbers"):
        jacobian_pattern(lambda x: torch.tensor([x[0], x[1]]) * x[0], point(3))


def test_numpy_inside_a_custom_function_is_allowed():
    class ByNumpy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            numbers = np.sin(x.detach().numpy())
            return torch.from_numpy(numbers) if numbers.sum() > 0 else torch.from_numpy(numbers.copy())

        @staticmethod
        def backward(ctx, cotangent):
            return cotangent * ctx.saved_tensors[0].cos()

    f = lambda x: (ByNumpy.apply(x) ** 2).sum()  # noqa: E731
    assert hessian_pattern(f, point(4)).nnz == 4
    torch.testing.assert_close(hodiff.sparse.hessian(f)(point(4)).to_dense(), torch.diag(2 * (2 * point(4)).cos()))


def test_validation_and_searchsorted_have_no_derivative():
    edges = torch.linspace(0, 1, 4, dtype=D)
    assert jacobian_pattern(lambda x: edges[torch.searchsorted(edges, x).clamp(max=3)] * x, point(4)).nnz == 4
    normal = torch.distributions.Normal
    assert hessian_pattern(lambda x: normal(x, x.exp()).log_prob(x.roll(1)).sum(), point(5)).nnz == 15
    inside = lambda x: torch.func.vmap(torch.func.hessian(lambda y: y.sin() * y))(x).sum()  # noqa: E731
    assert hessian_pattern(inside, point(3)).nnz == 3


MOVING_INDICES = {
    "gather": lambda x: x.gather(1, x.argsort(1)[:2, :3]) ** 3,
    "take_along_dim": lambda x: torch.take_along_dim(x, x.argsort(0), 0) ** 3,
    "index_select": lambda x: x.index_select(1, x[0].argsort()) ** 3,
    "scatter": lambda x: x.scatter(1, x.argsort(1)[:3, :2], (x**2)[:3, :2]) ** 2,
    "scatter a number": lambda x: x.scatter(1, x.argsort(1)[:, :2], 3.0) ** 2,
    "scatter_add": lambda x: torch.zeros(5, 6, dtype=D).scatter_add(1, x.argsort(1)[:3, :2], (x**2)[:3, :2]) ** 2,
    "scatter_reduce": lambda x: x.scatter_reduce(1, x.argsort(1), x**2, "prod"),
    "index_add": lambda x: x.index_add(1, x[0].argsort(), x**2) ** 2,
    "softmax of large numbers": lambda x: torch.softmax(9 * x, 1),
}


@pytest.mark.parametrize("name", MOVING_INDICES)
def test_indices_that_depend_on_x_may_be_anywhere_along_their_dimension(name):
    f, weights = MOVING_INDICES[name], torch.linspace(0.5, 1.5, 30, dtype=D)

    def loss(x):
        y = f(x)
        return (weights[: y.numel()] * y.reshape(-1)).sum()

    generator = torch.Generator().manual_seed(0)
    start, *others = (torch.randn(4, 4, generator=generator, dtype=D) for _ in range(4))
    pattern = hessian_pattern(loss, start).toarray()
    for x in (start, *others):
        assert not ((torch.autograd.functional.hessian(loss, x).reshape(16, 16).numpy() != 0) & ~pattern).any()
    # Rows, or columns, do not mix.
    assert pattern.mean() <= 0.25


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # as torch converts other tensors to fake tensors
def test_fake_tensors_give_the_pattern_of_their_shape():
    kernel, index = torch.ones(1, 1, 2, dtype=D), torch.tensor([0, 2, 1])

    def gathered(x):
        return (x[index] ** 3 * x[:3]).sum()

    def convolved(x):
        return (nn.functional.conv1d(x[None, None], kernel) ** 3).sum()

    for f in (gathered, convolved):
        expected, expected_rows = hessian_pattern(f, point(6)), jacobian_pattern(f, point(6))
        fake = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(point(6))
        assert (hessian_pattern(f, fake) != expected).nnz == 0
        assert (jacobian_pattern(f, fake) != expected_rows).nnz == 0
    # Constants may be fake, and f may make fake tensors.
    factor = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(point(3))

    def fakes_inside(x):
        with FakeTensorMode(allow_non_fake_inputs=True):
            return (x**3).sum()

    for f in (lambda x: (x**3 * factor).sum(), fakes_inside):
        assert hessian_pattern(f, point(3)).nnz == 3
    # If a rule needs values, the pattern may be larger, with a warning.
    with FakeTensorMode() as mode, pytest.warns(HodiffWarning, match="no rule"):
        found = hessian_pattern(lambda x: (x.flip(0) * x**2).sum(), mode.from_tensor(point(4)))
    needed = hessian_pattern(lambda x: (x.flip(0) * x**2).sum(), point(4))
    assert (needed.multiply(found) != needed).nnz == 0


def test_symbolic_sizes_are_rejected():

    def f(x):
        return (x**3).sum()

    for scaled in (lambda x: x * hessian_pattern(f, x).nnz, lambda x: x * jacobian_pattern(f, x).nnz):
        with pytest.raises(InputError, match="fixed sizes"):
            make_fx(scaled, tracing_mode="symbolic")(point(3))
