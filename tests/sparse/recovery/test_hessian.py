"""Tests of sparse Hessians against dense ones, with all options."""

import inspect
import threading

import numpy as np
import pytest
import scipy.sparse
import torch
from cases import rosenbrock
from custom_functions import cubed_slope, old_style
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff import InputError
from hodiff.derivatives import compiled_calls
from hodiff.sparse import Coloring, color, hessian, hessian_pattern, lagrangian_hessian, value_and_hessian
from hodiff.sparse.recovery import coloring_choice as kept
from tests.sparse.problems import PROBLEMS, D, cutoff_energy, pairs_within, point

METHODS = ("star", "acyclic")


def _refuse(graph, inputs):
    raise RuntimeError("compiled")


@pytest.mark.parametrize("f", [hessian, hodiff.sparse.jacobian])
def test_inside_a_checkpoint_matches(f):
    """The passes inside the call do not start the checkpoint's recomputation."""
    w = point(3).requires_grad_()
    terms = lambda x: w * x**3  # noqa: E731
    found = f((lambda x: terms(x).sum()) if f is hessian else terms, format="values")
    values = checkpoint(lambda w: found(torch.ones(3, dtype=D)), w, use_reentrant=False)
    factor = 6 if f is hessian else 3
    torch.testing.assert_close(values, factor * w)
    torch.testing.assert_close(torch.autograd.grad(values.sum(), w)[0], torch.full((3,), float(factor), dtype=D))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_matches_dense_hessian(name, method):
    f, n = PROBLEMS[name]
    x = point(n)
    dense = hodiff.hessian_matrix(f, x)
    value, found = value_and_hessian(f, method=method)(x)
    torch.testing.assert_close(value, f(x))
    torch.testing.assert_close(found.to_dense(), dense, rtol=1e-12, atol=1e-11 * dense.abs().max().item())


@pytest.mark.parametrize("method", METHODS)
def test_cutoff_potential_matches(method):
    grid = torch.stack(torch.meshgrid(*[torch.arange(3.0, dtype=D)] * 3, indexing="ij"), -1).view(-1, 3)
    positions = 1.1 * grid + 0.05 * torch.rand(grid.shape, generator=torch.Generator().manual_seed(0), dtype=D)
    i, j = pairs_within(positions, 1.6)
    x = positions.view(-1)
    dense = hodiff.hessian_matrix(cutoff_energy, x, i, j)
    found = hessian(cutoff_energy, method=method)(x, i, j).to_dense()
    assert (dense != 0).float().mean() < 0.7
    torch.testing.assert_close(found, dense, rtol=1e-11, atol=1e-10 * dense.abs().max().item())


@pytest.mark.slow
@given(st.integers(0, 2**31), st.sampled_from(METHODS))
def test_random_symmetric_matrices_are_recovered(seed, method):
    """The Hessian of a quadratic form is its matrix, exactly for integers."""
    random = np.random.default_rng(seed)
    n = int(random.integers(1, 25))
    half = scipy.sparse.random_array((n, n), density=random.uniform(0, 0.3), rng=random).tocoo()
    rows, columns = (torch.as_tensor(each).long() for each in half.coords)
    weights = torch.as_tensor(random.integers(-9, 10, len(half.data))).to(D)

    def f(x):
        return (weights * x[rows] * x[columns]).sum() + x.sum()

    dense = torch.zeros(n, n, dtype=D).index_put_((rows, columns), weights, accumulate=True)
    found = hessian(f, method=method, format="scipy")(torch.ones(n, dtype=D)).toarray()
    assert (found == (dense + dense.T).numpy()).all()


def test_formats_agree():
    x = point(8)
    dense = hodiff.hessian_matrix(rosenbrock, x)
    csr, coo, array, values = (hessian(rosenbrock, format=each)(x) for each in ("csr", "coo", "scipy", "values"))
    assert (csr.layout, coo.layout) == (torch.sparse_csr, torch.sparse_coo)
    assert coo.is_coalesced()
    assert isinstance(array, scipy.sparse.csr_array)
    pattern = hessian_pattern(rosenbrock, x)
    assert (array.indices == pattern.indices).all()
    for each in (csr.to_dense(), coo.to_dense(), torch.as_tensor(array.toarray())):
        assert torch.equal(each, dense)
    assert torch.equal(values, dense[pattern.nonzero()])


def test_pytrees_argnums_and_dtypes_match():
    def f(scale, p):
        return scale * (p["a"][0] * p["b"].sum(1).sin() + p["b"][:, 0] ** 3).sum()

    p = {"a": point(2, dtype=torch.float32), "b": point(6).view(3, 2)}
    found = hessian(f, argnums=1)(2.0, p)
    dense = hodiff.hessian_matrix(lambda p: f(2.0, p), p)
    assert found.dtype == dense.dtype
    torch.testing.assert_close(found.to_dense(), dense)
    x = point(9, dtype=torch.float32)
    assert hessian(rosenbrock)(x).dtype == torch.float32
    torch.testing.assert_close(hessian(rosenbrock)(x).to_dense(), hodiff.hessian_matrix(rosenbrock, x))


@pytest.mark.parametrize("method", METHODS)
def test_entries_are_differentiable(method):
    """Derivatives of the entries by x and closed-over tensors match entries of the dense Hessian."""
    w = torch.tensor(1.3, dtype=D, requires_grad=True)
    x = point(6).requires_grad_()

    def f(x):
        return (w * torch.sin(x[1:] * x[:-1] ** 2)).sum()

    coloring = color(hessian_pattern(f, x), method)
    entries = hessian(f, coloring=coloring, format="values")(x)
    rows, columns = hessian_pattern(f, x).nonzero()
    weights = torch.linspace(-1, 2, len(rows), dtype=D)
    found = torch.autograd.grad((weights * entries).sum(), (x, w))
    dense = torch.autograd.functional.hessian(f, x, create_graph=True)[rows, columns]
    expected = torch.autograd.grad((weights * dense).sum(), (x, w))
    torch.testing.assert_close(found, expected)
    with pytest.raises(InputError, match=r"format: .* got 'scipy'"):
        hessian(f, coloring=coloring, format="scipy")(x)


def test_vmap_and_transforms_of_entries_match():
    points = torch.stack([point(6, seed) for seed in range(3)])
    coloring = color(hessian_pattern(rosenbrock, points[0]))
    entries = hessian(rosenbrock, coloring=coloring, format="values")
    found = torch.func.vmap(entries)(points)
    for each, x in zip(found, points, strict=True):
        torch.testing.assert_close(each, entries(x))
    slopes = torch.func.jacrev(entries)(points[0])
    third = torch.func.jacrev(torch.func.hessian(rosenbrock))(points[0])
    torch.testing.assert_close(slopes, third[hessian_pattern(rosenbrock, points[0]).nonzero()])
    found = hessian(rosenbrock, format="values")
    found(points[0])
    # The cached pattern may belong to other constants, and no check under vmap would detect it.
    with pytest.raises(InputError, match="coloring: expected one inside of transforms"):
        torch.func.vmap(found)(points)


@pytest.mark.parametrize("method", METHODS)
def test_vmap_with_a_new_size_matches(method):
    """The check, which uses random numbers, is skipped inside transforms."""
    points = torch.stack([point(43, seed) for seed in range(2)])
    entries = hessian(rosenbrock, coloring=color(hessian_pattern(rosenbrock, points[0]), method), format="values")
    found = torch.func.vmap(entries)(points)
    torch.testing.assert_close(found, torch.stack([entries(x) for x in points]))


def test_scalar_leaves_match():
    def f(p):
        return p["scale"] * (p["x"] ** 3).sum() + p["scale"] ** 2

    p = {"scale": torch.tensor(0.7, dtype=D), "x": point(4)}
    torch.testing.assert_close(hessian(f)(p).to_dense(), hodiff.hessian_matrix(f, p))
    assert hessian(lambda x: x**3, format="values")(torch.tensor(2.0, dtype=D)).tolist() == [12.0]


def test_keywords_mixed_precision_and_empty_tensors_are_accepted():
    """Keywords, mixed-precision leaves, a function that rounds to float32, empty tensors and 16 bits are accepted."""
    assert hessian(lambda x, a=1: (a * x**3).sum(), format="values")(torch.ones(2), a=2).tolist() == [12.0, 12.0]
    mixed = {"a": point(3, dtype=torch.float32), "b": point(3)}
    f = lambda p: (p["a"].double() * p["b"].sin()).sum() ** 2  # noqa: E731
    torch.testing.assert_close(hessian(f)(mixed).to_dense(), hodiff.hessian_matrix(f, mixed))
    rounded = lambda x: rosenbrock(x.float()).double()  # noqa: E731
    torch.testing.assert_close(hessian(rounded)(point(9)).to_dense(), hodiff.hessian_matrix(rounded, point(9)))
    assert hessian(lambda x: (x**2).sum() + 1)(torch.zeros(0)).shape == (0, 0)
    with pytest.warns(hodiff.HodiffWarning, match="mse_loss_backward"):  # torch's decomposition divides by zero
        empty = hessian(lambda w: torch.nn.functional.mse_loss(torch.zeros(0, 2) @ w, torch.zeros(0)))(torch.ones(2))
    assert empty.shape == (2, 2)
    half = hessian(lambda x: (x**3).sum(), format="scipy")(torch.ones(3, dtype=torch.bfloat16))
    assert half.dtype == np.float32
    assert half.toarray().tolist() == (6 * np.eye(3)).tolist()


def test_pattern_search_draws_nothing_and_leaves_buffers_unchanged():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)).double()
    inputs = point(15).view(5, 3)

    def f(p):
        return torch.func.functional_call(model, p, (inputs,)).tanh().square().sum()

    p = {name: each.detach() for name, each in model.named_parameters()}
    before = model[1].running_mean.clone(), torch.get_rng_state()
    hessian_pattern(f, p)
    assert torch.equal(model[1].running_mean, before[0])
    assert int(model[1].num_batches_tracked) == 0
    assert torch.equal(torch.get_rng_state(), before[1])
    torch.manual_seed(0)
    expected = hodiff.hessian_matrix(f, p)
    torch.manual_seed(0)
    torch.testing.assert_close(hessian(f)(p).to_dense(), expected)


def test_chunks_and_routes_match():
    x = point(10)
    whole = hessian(rosenbrock, format="values")(x)
    for options in ({"chunk_size": 1}, {"chunk_size": 2}, {"chunk_size": None}, {"route": "forward-over-reverse"}):
        torch.testing.assert_close(hessian(rosenbrock, format="values", **options)(x), whole)


def test_pattern_is_found_once_unless_a_closure_changes(monkeypatch):
    calls = []
    names = inspect.unwrap(hodiff.sparse.hessian).__globals__
    true = names["pattern_of_hessian"]
    monkeypatch.setitem(names, "pattern_of_hessian", lambda f: calls.append(f) or true(f))
    far = torch.tensor([1, 2, 3])

    def f(x):
        return (x[:3] * x[far] ** 2).sum()

    entries = hessian(f)
    for seed in range(3):
        assert torch.equal(entries(point(6, seed)).to_dense(), hodiff.hessian_matrix(f, point(6, seed)))
    assert len(calls) == 1
    far = torch.tensor([5, 3, 4])
    assert torch.equal(entries(point(6)).to_dense(), hodiff.hessian_matrix(f, point(6)))
    assert len(calls) == 2
    assert torch.equal(entries(point(7)).to_dense(), hodiff.hessian_matrix(f, point(7)))
    assert len(calls) == 3


def test_incomplete_pattern_is_rejected():
    x = point(6)
    diagonal = np.eye(6, dtype=bool)
    with pytest.raises(InputError, match=r"sparse.hessian: pattern: .* in 6 row\(s\), such as 0, 1, 2"):
        hessian(rosenbrock, pattern=diagonal)(x)
    assert hessian(rosenbrock, pattern=diagonal, check=False)(x) is not None
    with pytest.raises(InputError, match="check_pattern: pattern"):
        hodiff.sparse.check_pattern(rosenbrock, x, diagonal)
    hodiff.sparse.check_pattern(rosenbrock, x, hessian_pattern(rosenbrock, x), probes=3)
    larger = np.ones((6, 6), dtype=bool)
    assert torch.equal(hessian(rosenbrock, pattern=larger)(x).to_dense(), hodiff.hessian_matrix(rosenbrock, x))


def test_one_missing_entry_is_detected():
    x, pattern = point(40), hessian_pattern(rosenbrock, point(40)).tolil()
    pattern[7, 8] = pattern[8, 7] = False
    pattern = pattern.tocsr()
    pattern.eliminate_zeros()
    with pytest.raises(InputError, match=r"such as 7, 8"):
        hodiff.sparse.check_pattern(rosenbrock, x, pattern)


def test_non_finite_entries_stay_in_their_rows():
    x = point(6)
    f = lambda x: (x.log() * x.roll(1)).sum()  # noqa: E731
    at = torch.cat([torch.tensor([0.0], dtype=D), x[1:]])
    with pytest.warns(hodiff.HodiffWarning, match="sparse.hessian: x: products are not finite in"):
        found = hessian(f)(at).to_dense()
    with pytest.warns(hodiff.HodiffWarning, match="not finite"):
        dense = hodiff.hessian_matrix(f, at)
    finite = dense.isfinite()
    torch.testing.assert_close(found[finite], dense[finite])
    assert not found[0, 0].isfinite()


def test_lagrangian_hessian_matches():
    def constraints(x):
        return {"a": x[1:] * x[:-1], "b": x[:2].exp()}

    x, m = point(5), {"a": point(4, 1), "b": point(2, 2)}

    def lagrangian(x):
        c = constraints(x)
        return rosenbrock(x) + (m["a"] * c["a"]).sum() + (m["b"] * c["b"]).sum()

    found = lagrangian_hessian(rosenbrock, constraints)
    torch.testing.assert_close(found(x, m).to_dense(), hodiff.hessian_matrix(lagrangian, x))
    with pytest.raises(InputError, match=r"multipliers: expected \['a'\] \(4,\)"):
        found(x, m["a"])
    with pytest.raises(TypeError, match="argnums"):
        lagrangian_hessian(rosenbrock, constraints, argnums=1)


def test_rejects_bad_arguments():
    x = point(4)
    for options, words in (
        ({"method": "columns"}, "method"),
        ({"format": "csc"}, "format"),
        ({"check": 1}, "check"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"route": "sideways"}, "route"),
        ({"coloring": "star"}, "coloring: expected a Coloring"),
        ({"coloring": color(np.eye(4, dtype=bool), "rows")}, "coloring: expected one by 'star' or 'acyclic'"),
        ({"coloring": color(np.eye(4, dtype=bool)), "pattern": np.eye(4, dtype=bool)}, "got both"),
        ({"pattern": np.triu(np.ones((4, 4), dtype=bool))}, "symmetric"),
    ):
        with pytest.raises(InputError, match=words):
            hessian(rosenbrock, **options)
    with pytest.raises(InputError, match=r"pattern of shape \(4, 4\), got \(5, 5\)"):
        hessian(rosenbrock, pattern=np.eye(5, dtype=bool))(x)
    with pytest.raises(InputError, match="expected a function that returns one real number"):
        hessian(torch.sin)(x)


_Once = old_style("_Once", lambda x: (x**3, x), once_differentiable(cubed_slope))


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.filterwarnings("ignore:sparse.hessian. took forward-over-forward")
def test_missing_derivative_raises(compile):
    with pytest.raises(hodiff.RouteError, match=r"sparse.hessian: torch does not implement this"):
        hessian(lambda x: _Once.apply(x).sum(), compile=compile)(point(4))


@pytest.mark.parametrize("compile", [False, True])
def test_several_arguments_match(compile, monkeypatch):
    monkeypatch.setattr(compiled_calls, "compile_graph", lambda graph, inputs, **_: graph)

    def f(scale, x):
        return (scale * x[1:] * x[:-1]).sum()

    a, x = torch.tensor(1.5, dtype=D), point(5)
    dense = hodiff.hessian_matrix(lambda both: f(*both), (a, x))
    assert torch.equal(hessian(f, argnums=(0, 1), compile=compile)(a, x).to_dense(), dense)
    backwards = hodiff.hessian_matrix(lambda both: f(both[1], both[0]), (x, a))
    assert torch.equal(hessian(f, argnums=(1, 0), compile=compile)(a, x).to_dense(), backwards)


@pytest.mark.slow
def test_threads_may_share_a_function():
    entries = hessian(rosenbrock, format="values")
    points = [point(30, seed) for seed in range(8)]
    expected = [hessian(rosenbrock, format="values")(x) for x in points]
    found = [None] * 8

    def work(i):
        found[i] = entries(points[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [each.start() for each in threads]
    [each.join() for each in threads]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_threads_restore_global_settings():
    """Detection temporarily disables oneDNN, compiled code and fused attention."""
    before = torch.backends.mkldnn.enabled, torch.backends.cuda.flash_sdp_enabled()
    threads = [threading.Thread(target=lambda: hessian_pattern(rosenbrock, point(3000))) for _ in range(8)]
    [each.start() for each in threads]
    [each.join() for each in threads]
    assert (torch.backends.mkldnn.enabled, torch.backends.cuda.flash_sdp_enabled()) == before
    compiled = torch.compile(lambda x: x.sin().item(), backend=_refuse, fullgraph=True)
    with pytest.raises(Exception, match=r"data-dependent|graph break|Unsupported|compiled"):
        compiled(point(2))


def test_colorings_are_pytree_leaves():
    coloring = color(np.eye(3, dtype=bool))
    leaves, spec = torch.utils._pytree.tree_flatten({"c": coloring, "x": 1})
    assert leaves == [1]
    assert torch.utils._pytree.tree_unflatten([2], spec)["c"] is coloring
    assert isinstance(coloring, Coloring)
    assert kept.Colorings("here", None, coloring, color, ("star",))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_operators_accept_colorings(compile):
    x = point(9)
    A = hodiff.HessianOperator(rosenbrock, x, compile=compile)
    for method in (*METHODS, "columns", "rows", "bidirectional"):
        coloring = color(hessian_pattern(rosenbrock, x), method)
        torch.testing.assert_close(A.to_sparse(coloring).to_dense(), A.to_dense())
        assert A.to_sparse(coloring, "scipy").nnz == coloring.nnz
    J = hodiff.JacobianOperator(lambda x: x[1:] * x[:-1], x)
    coloring = color(hodiff.sparse.jacobian_pattern(lambda x: x[1:] * x[:-1], x), "rows")
    torch.testing.assert_close(J.to_sparse(coloring).to_dense(), J.to_dense())
    with pytest.raises(InputError, match=r"to_sparse: coloring: expected one of shape \(9, 9\)"):
        A.to_sparse(coloring)
    with pytest.raises(InputError, match="expected a Coloring"):
        A.to_sparse("star")
    with pytest.raises(InputError, match="format"):
        J.to_sparse(coloring, "csc")


def test_nan_stays_in_its_tree_and_long_trees_round_little():
    """Two separate bands share color pairs, but have one long tree each."""
    n = 4000

    def f(x):
        return rosenbrock(x[:n]) + (x[n:].log() * x[n:].roll(1)).sum()

    x = point(2 * n, 3)
    x[n + 5] = 0
    coloring = color(hessian_pattern(f, x), "acyclic")
    found = hessian(f, coloring=coloring, format="values", check=False)(x)
    with pytest.warns(hodiff.HodiffWarning, match=r"sparse.hessian: x: .* in \d row"):
        expected = hessian(f, format="values")(x)
    own = (coloring.pattern.rows < n).nonzero()[0]
    torch.testing.assert_close(found[own], expected[own], rtol=1e-11, atol=1e-9)
    assert not found.isfinite().all()


def test_lagrangian_multipliers_may_be_a_dict():
    H = lagrangian_hessian(lambda x: (x**2).sum(), lambda x: {"a": x[1:] * x[:-1], "b": x.prod()})
    x, a, b = point(4), torch.arange(3.0, dtype=D), torch.tensor(2.0, dtype=D)
    expected = hodiff.hessian(lambda x: (x**2).sum() + (a * x[1:] * x[:-1]).sum() + b * x.prod())(x)
    torch.testing.assert_close(H(x, {"b": b, "a": a}).to_dense(), expected)
    with pytest.raises(InputError, match=r"expected \['a'\] \(3,\) float64, \['b'\] \(\) float64, .* got .*\['c'\] \("):
        H(x, {"a": a, "c": b})
    with pytest.raises(InputError, match=r"got \['a'\] \(3,\) float64, \['b'\] float 2\.0\."):
        H(x, {"a": a, "b": 2.0})


@pytest.mark.parametrize("route", ["auto", "reverse-over-reverse"])
def test_compiled_functions_match(route):
    cubes = torch.compile(lambda x: (x**3).sum(), backend="aot_eager")
    torch.testing.assert_close(hessian(cubes, route=route)(point(4)).to_dense(), torch.diag(6 * point(4)))


@pytest.mark.parametrize("colored", [False, True])
def test_sparse_hessian_inside_another_matches(colored):
    def inner(y):
        return (y**4).sum() + (y[1:] * y[:-1]).sum()

    coloring = color(hessian_pattern(inner, point(4))) if colored else None

    def outer(x):
        return hessian(inner, coloring=coloring, format="values")(x).sum()

    torch.testing.assert_close(hessian(outer)(point(4)).to_dense(), 24 * torch.eye(4, dtype=D))


@pytest.mark.parametrize("compile", [False, True])
def test_numbers_that_leave_torch_are_rejected(compile):
    with pytest.raises(InputError, match=r"sparse\.hessian: f: expected torch's operators .* got Tensor\.numpy"):
        hessian(lambda x: torch.as_tensor(np.sin(x.numpy())).sum(), compile=compile)(point(3))
    with pytest.raises(InputError, match=r"sparse\.hessian: f: expected a callable"):
        hessian(point(3), compile=compile)


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_make_fx_traces_record_the_products(mode):
    x, other = point(5), point(5).flip(0) + 0.5
    dense = torch.func.hessian(rosenbrock)(other)
    pattern = hessian_pattern(rosenbrock, x)
    for method in ("star", "acyclic"):
        coloring = color(pattern, method)
        of = hessian(rosenbrock, coloring=coloring, format="values")
        graph = make_fx(of, tracing_mode=mode)(x)
        rows, columns = coloring.pattern.rows, coloring.pattern.columns
        torch.testing.assert_close(graph(other), dense[rows, columns])
        torch.testing.assert_close(of(other), dense[rows, columns])  # the coloring can be used again
    graph = make_fx(hessian(lambda x: (x**4).sum(), format="values"), tracing_mode=mode)(x)
    torch.testing.assert_close(graph(other), 12 * other**2)
    jacobian = hodiff.sparse.jacobian(lambda x: x[1:] * x[:-1], format="values")
    torch.testing.assert_close(make_fx(jacobian, tracing_mode=mode)(x)(other), jacobian(other))


def test_meta_and_fake_tensors_give_shapes_or_raise():

    def f(x):
        return (x**3).sum()

    matrix = hessian(f)(torch.empty(3, device="meta"))
    assert matrix.shape == (3, 3)
    assert matrix.is_meta
    for x in (torch.empty(3, device="meta"), FakeTensorMode().from_tensor(torch.ones(3))):
        with pytest.raises(InputError, match="expected a tensor with numbers"):
            hodiff.sparse.check_pattern(f, x, np.eye(3, dtype=bool))
    with pytest.raises(InputError, match="fixed sizes"):
        make_fx(hessian(f, format="values"), tracing_mode="symbolic")(torch.ones(3))
    with pytest.raises(InputError, match="fixed sizes"):
        make_fx(hessian(f, format="values", coloring=color(np.eye(3, dtype=bool))), tracing_mode="symbolic")(
            torch.ones(3)
        )


@pytest.mark.parametrize("format", ["csr", "coo", "scipy", "values"])
def test_works_under_another_default_device(format):
    x = point(5)

    def rows(x):
        return torch.cat([x[1:] * x[:-1], x**2])

    expected = torch.func.hessian(rosenbrock)(x), torch.func.jacrev(rows)(x)
    with torch.device("meta"):
        found = hessian(rosenbrock, format=format)(x), hodiff.sparse.jacobian(rows, format=format)(x)
        hodiff.sparse.check_pattern(rosenbrock, x, hessian_pattern(rosenbrock, x))
    for got, matrix in zip(found, expected, strict=True):
        if format == "values":
            torch.testing.assert_close(got, matrix[matrix != 0])
        else:
            dense = torch.from_numpy(got.toarray()) if format == "scipy" else got.to_dense()
            torch.testing.assert_close(dense, matrix)


def test_neighbours_of_this_x_are_found_again_where_they_change(recwarn):
    """A list of neighbours inside of f: one warning, and the right matrix at each x."""

    def energy(x):
        one, other = ((x[:, None] - x).abs() < 1.5).triu(1).nonzero(as_tuple=True)
        return ((x[one] - x[other]) ** 4).sum()

    x = torch.arange(30, dtype=D) + 0.1 * point(30)
    sparse = hessian(energy)
    for at in (x, 1.01 * x, x.flip(0), x.roll(1), 0.6 * x):
        found = sparse(at)
        torch.testing.assert_close(found.to_dense(), hodiff.hessian_matrix(energy, at), rtol=1e-12, atol=1e-12)
    assert found.values().numel() > 1.5 * 88
    (warning,) = recwarn.list
    assert "got nonzero of a tensor that does (test_hessian.py" in str(warning.message)
    assert "pass neighbour lists and other indices as further arguments" in str(warning.message)
    with pytest.raises(InputError, match="check=True uses the pattern at this x"):
        hessian(energy, check=False)(x)
    with pytest.warns(hodiff.HodiffWarning, match="is used, checked by a product"):
        jacobian = hodiff.sparse.jacobian(lambda x: x[x > 0] ** 2)(x - 5)
    assert jacobian.values().numel() == len(jacobian) == int((x > 5).sum())
