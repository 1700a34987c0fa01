"""Tests of recovering entries from products: exactly for integers, and with bounded rounding errors for floats."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hodiff.errors import InputError
from hodiff.sparse.coloring import Gather, Substitution, color
from hodiff.sparse.coloring.coloring import SIDES
from hodiff.sparse.coloring.vertex_orders import ORDERS
from tests.sparse.coloring import graphs

SYMMETRIC_METHODS = ("star", "acyclic")
SETTINGS = [(method, order) for method in SIDES for order in (None, *ORDERS)]


def integers(pattern, symmetric, seed=0):
    matrix = np.where(pattern, np.random.default_rng(seed).integers(1, 1000, pattern.shape), 0)
    return np.tril(matrix) + np.tril(matrix, -1).T if symmetric else matrix


def products_of(coloring, matrix):
    made = [
        (matrix if side == "columns" else matrix.T) @ coloring.seeds(matrix.dtype, side=side) for side in coloring.sides
    ]
    return made[0] if len(made) == 1 else tuple(made)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("method", "order"), SETTINGS)
def test_integer_matrices_are_recovered_exactly(method, order):
    symmetric = method in SYMMETRIC_METHODS
    for pattern in (graphs.SYMMETRIC if symmetric else graphs.ANY).values():
        matrix = integers(pattern, symmetric)
        coloring = color(pattern, method, order)
        found = coloring.decompress(products_of(coloring, matrix))
        np.testing.assert_array_equal(found, matrix[np.nonzero(pattern)])


@given(
    st.sampled_from(SETTINGS),
    st.integers(0, 30),
    st.integers(0, 30),
    st.floats(0, 1),
    st.sampled_from(["all", "none", "some"]),
    st.integers(0, 2**31),
)
def test_random_integer_matrices_are_recovered_exactly(setting, m, n, density, diagonal, seed):
    method, order = setting
    symmetric = method in SYMMETRIC_METHODS
    if symmetric:
        pattern = graphs.random_symmetric(n, density**2, diagonal == "all", seed)
        if diagonal == "some":
            pattern |= np.diag(np.random.default_rng(seed).random(n) < 0.5)
    else:
        pattern = graphs.random_matrix(m, n, density**2, seed)
    matrix = integers(pattern, symmetric, seed)
    coloring = color(pattern, method, order)
    found = coloring.decompress(products_of(coloring, matrix))
    np.testing.assert_array_equal(found, matrix[np.nonzero(pattern)])
    if isinstance(coloring.plan, Substitution):
        plan = coloring.plan
        read = products_of(coloring, matrix)[plan.rows, plan.colors]
        np.testing.assert_array_equal(plan.by_doubling(read), plan.by_cumulative_sum(read))


@pytest.mark.parametrize("method", SIDES)
def test_plan_arrays_alone_recover_the_entries(method):
    """Gathers, and sums over consecutive unknowns, give the entries from the plan's arrays alone."""
    pattern = graphs.grid(6, 7)
    matrix = integers(pattern, symmetric=True)
    coloring = color(pattern, method)
    blocks = products_of(coloring, matrix)
    blocks = dict(zip(coloring.sides, blocks if len(coloring.sides) == 2 else (blocks,), strict=True))
    values = np.zeros(coloring.nnz, int)
    if isinstance(coloring.plan, Substitution):
        plan, block = coloring.plan, blocks["columns"]
        edges = [
            sum(int(plan.signs[i]) * int(plan.signs[j]) * block[plan.rows[j], plan.colors[j]] for j in range(i, end))
            for i, end in enumerate(plan.ends)
        ]
        values = np.array(edges)[plan.unknowns]
        for i, parent in enumerate(plan.parents):
            assert parent == len(plan.rows) or parent < i < plan.ends[i] <= plan.ends[parent]
    else:
        seen = np.zeros(coloring.nnz, int)
        for gather in coloring.plan:
            assert isinstance(gather, Gather)
            values[gather.entries] = blocks[gather.side][gather.rows, gather.colors]
            seen[gather.entries] += 1
        assert (seen == 1).all()
    np.testing.assert_array_equal(values, matrix[np.nonzero(pattern)])


@pytest.mark.parametrize("n", [5, 40, 1000])
def test_trees_are_rooted_at_their_centers(n):
    """The number of doublings for a path of n - 1 edges is the logarithm of half its length."""
    plan = color(graphs.band(n, 1), "acyclic", "natural").plan
    height = n // 2
    assert plan.doublings == (height - 1).bit_length()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rounding_along_a_path_stays_small(dtype):
    """Both methods stay within some units of the largest product, compared with exact products."""
    n = 20_001
    generator = np.random.default_rng(0)
    import scipy.sparse

    # Sums of multiples of 2^-20 are exact in float64, and the products are then rounded to float32.
    diagonal, above = (generator.integers(-(2**20), 2**20, k) / 2**20 for k in (n, n - 1))
    A = scipy.sparse.diags_array([above, diagonal, above], offsets=[-1, 0, 1]).tocsr()
    coloring = color(A, "acyclic")
    assert coloring.num_colors == 2
    exact = A @ coloring.seeds()
    noisy = (exact * (1 + generator.uniform(-1, 1, exact.shape) * np.finfo(dtype).eps)).astype(dtype)
    plan = coloring.plan
    read = noisy[plan.rows, plan.colors]
    # Compute the effect of noise in the products alone, in higher precision.
    alone = plan.by_doubling(read.astype(np.longdouble))
    unit = np.finfo(dtype).eps * np.abs(exact).max()
    for way in (plan.by_doubling, plan.by_cumulative_sum):
        assert np.abs(way(read) - alone).max() <= 60 * unit
    # Noise adds up like a random walk along the path, from both ends to its centre.
    assert np.abs(alone[plan.unknowns] - A.data).max() <= 2 * np.sqrt(n) * unit


@pytest.mark.parametrize("pattern", [graphs.random_symmetric(600, 0.01), graphs.grid(40, 40)])
def test_rounding_does_not_grow_with_the_number_of_trees(pattern):
    """A cumulative sum over all trees would make later trees less accurate."""
    n = len(pattern)
    matrix = np.where(pattern, np.random.default_rng(0).random((n, n)) + 0.5, 0)
    matrix = np.tril(matrix) + np.tril(matrix, -1).T
    coloring = color(pattern, "acyclic")
    plan, products = coloring.plan, matrix @ coloring.seeds()
    read = products[plan.rows, plan.colors]
    exact = plan.by_doubling(read.astype(np.longdouble))
    for way in (plan.by_doubling, plan.by_cumulative_sum):
        assert np.abs(way(read) - exact).max() <= 40 * np.finfo(float).eps * np.abs(read).max()


def test_nan_stays_in_its_tree():
    """A NaN in one of two long paths does not affect the other."""
    path = graphs.band(60, 1)
    pattern = np.block([[path, np.zeros_like(path)], [np.zeros_like(path), path]])
    matrix = integers(pattern, symmetric=True).astype(float)
    coloring = color(pattern, "acyclic", "natural")
    assert coloring.plan.doublings > 4
    products = matrix @ coloring.seeds()
    products[3] = np.nan
    found = np.zeros_like(matrix)
    found[np.nonzero(pattern)] = coloring.decompress(products)
    assert np.isnan(found).any()
    np.testing.assert_array_equal(found[60:], matrix[60:])


@pytest.mark.parametrize("dtype", [np.float32, np.complex128, np.int64])
@pytest.mark.parametrize("method", SIDES)
def test_dtype_is_kept(method, dtype):
    pattern = graphs.grid(5, 5)
    matrix = integers(pattern, symmetric=True).astype(dtype)
    coloring = color(pattern, method)
    found = coloring.decompress(products_of(coloring, matrix))
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, matrix[np.nonzero(pattern)])


@pytest.mark.parametrize("method", ["star", "rows"])
def test_seeds_may_be_requested_in_parts(method):
    coloring = color(graphs.grid(6, 6), method)
    whole = coloring.seeds()
    assert whole.shape == (36, coloring.num_colors)
    np.testing.assert_array_equal(whole.sum(1), 1)
    parts = [coloring.seeds(np.float32, colors=slice(i, i + 2)) for i in range(0, coloring.num_colors, 2)]
    assert parts[0].dtype == np.float32
    np.testing.assert_array_equal(np.concatenate(parts, 1), whole)


def test_rejects_bad_products_and_seeds():
    coloring = color(graphs.arrow(6), "bidirectional")
    with pytest.raises(InputError, match=r"^Coloring.seeds: expected one side"):
        coloring.seeds()
    with pytest.raises(InputError, match=r"^Coloring.colors: expected one side"):
        _ = coloring.colors
    with pytest.raises(InputError, match=r"^Coloring.seeds: side: expected one of 'columns', 'rows', got 'both'"):
        coloring.seeds(side="both")
    with pytest.raises(InputError, match=r"^Coloring.seeds: colors: expected a slice or None, got 3"):
        coloring.seeds(side="rows", colors=3)
    with pytest.raises(InputError, match=r"^Coloring.decompress: products: expected the pair"):
        coloring.decompress(np.zeros((6, 3)))
    star = color(graphs.arrow(6))
    with pytest.raises(InputError, match=r"^Coloring.decompress: products: expected \(6, 2\) .* got \(6, 3\)"):
        star.decompress(np.zeros((6, 3)))
    with pytest.raises(InputError, match=r"expected one of 'columns', got 'rows'"):
        star.seeds(side="rows")
