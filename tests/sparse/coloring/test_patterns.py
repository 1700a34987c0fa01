"""Tests of the arguments of `color`: every kind of sparse matrix, and the messages of refused arguments."""

import numpy as np
import pytest
import scipy.sparse
import torch

from hodiff.errors import InputError
from hodiff.sparse.coloring import color
from tests.sparse.coloring import graphs

PATTERN = graphs.random_symmetric(12, 0.2)


SCIPY = ("csr", "csc", "coo", "dok", "lil", "bsr")
FORMS = {
    **{each: lambda each=each: scipy.sparse.csr_array(PATTERN).asformat(each) for each in SCIPY},
    "matrix": lambda: scipy.sparse.csr_matrix(PATTERN.astype(complex)),
    "array": lambda: PATTERN,
    "tensor": lambda: torch.from_numpy(PATTERN),
    "sparse coo": lambda: torch.from_numpy(PATTERN).float().to_sparse(),
    "sparse csr": lambda: torch.from_numpy(PATTERN).float().to_sparse_csr(),
    "sparse csc": lambda: torch.from_numpy(PATTERN).float().to_sparse_csc(),
    "sparse bsr": lambda: torch.from_numpy(PATTERN).float().to_sparse_bsr((1, 1)),
}


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_matrix_form_gives_the_same_coloring(form):
    found, expected = color(form()), color(scipy.sparse.coo_array(PATTERN))
    np.testing.assert_array_equal(found.colors, expected.colors)
    np.testing.assert_array_equal(found.pattern.starts, expected.pattern.starts)
    np.testing.assert_array_equal(found.pattern.columns, expected.pattern.columns)
    assert found.nnz == PATTERN.sum()


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "dia", "bsr"])
def test_stored_zeros_count_as_entries(form):
    matrix = scipy.sparse.csr_array(graphs.band(8, 1).astype(float)).asformat(form)
    matrix.data[:] = 0
    assert color(matrix).nnz == 22


def test_zeros_of_a_sparse_tensor_count_as_entries():
    indices = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]])
    given = torch.sparse_coo_tensor(indices, torch.zeros(4), (2, 2), check_invariants=True)
    assert color(given, "columns").nnz == 3


def test_unsorted_and_repeated_entries_are_accepted():
    given = scipy.sparse.csr_array((np.ones(5), np.array([2, 0, 0, 1, 2]), np.array([0, 3, 4, 5])), shape=(3, 3))
    coloring = color(given, "columns")
    assert coloring.pattern.columns.tolist() == [0, 2, 1, 2]
    assert given.indices.tolist() == [2, 0, 0, 1, 2]


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (
            [[1, 0], [0, 1]],
            {},
            "color: pattern: expected a sparse matrix of SciPy or torch or a boolean array, got list",
        ),
        (np.eye(3), {}, "color: pattern: expected booleans in a dense matrix, got (3, 3) float64; `pattern != 0`"),
        (torch.eye(3), {}, "color: pattern: expected booleans in a dense matrix, got (3, 3) float32; `pattern !="),
        (np.ones(3, bool), {}, "color: pattern: expected a matrix with rows and columns, got the shape (3,)"),
        (torch.ones(2, 2, 2).to_sparse(1), {"method": "columns"}, "color: pattern: expected a matrix with rows and"),
        (
            torch.ones(2, 2).to_sparse(1),
            {"method": "columns"},
            "color: pattern: expected a sparse tensor whose entries",
        ),
        (np.ones((2, 3), bool), {}, "color: pattern: expected a square matrix for method='star', got the shape (2, 3)"),
        (
            np.triu(np.ones((3, 3), bool)),
            {"method": "acyclic"},
            "color: pattern: expected a symmetric one for method='acyclic', got (0, 1) without (1, 0); "
            '`pattern + pattern.T` is symmetric, and color(pattern, "columns") colors a Jacobian.',
        ),
        (
            PATTERN,
            {"method": "stars"},
            "color: method: expected one of 'star', 'acyclic', 'columns', 'rows', 'bid",
        ),
        (
            PATTERN,
            {"order": "best"},
            "color: order: expected one of 'natural', 'largest-first', 'smallest-last', 'in",
        ),
        (PATTERN, {"order": ("natural", 3)}, "color: order: expected one of 'natural', 'largest-first'"),
        (PATTERN, {"order": ()}, "color: order: expected at least one order, got none"),
    ],
)
def test_rejects_bad_arguments(given, options, message):
    with pytest.raises(InputError) as caught:
        color(given, **options)
    assert str(caught.value).startswith(message)
