"""Inputs written as text evaluate as in Python, and no other code is run."""

import pytest
import torch

from hodiff import InputError
from hodiff.checks.command.expressions import Reader, dtype_named

# Expressions, and their values in Python
EXPRESSIONS = [
    ("ones(2, 3)", lambda: torch.ones(2, 3, dtype=torch.float64)),
    ("zeros((2,), dtype=float32)", lambda: torch.zeros(2, dtype=torch.float32)),
    ("eye(2, requires_grad=False)", lambda: torch.eye(2, dtype=torch.float64)),
    ("linspace(-1, 1, 5)", lambda: torch.linspace(-1, 1, 5, dtype=torch.float64)),
    ("tensor([0.1, -inf, nan])", lambda: torch.tensor([0.1, -torch.inf, torch.nan], dtype=torch.float64)),
    ("tensor([1, 2])", lambda: torch.tensor([1, 2])),
    ("tensor([True, False])", lambda: torch.tensor([True, False])),
    ("tensor([1j, 0.1])", lambda: torch.tensor([1j, 0.1], dtype=torch.complex128)),
    ("tensor(0.1, dtype=float32)", lambda: torch.tensor(0.1, dtype=torch.float32)),
    ("full((2,), 0.1)", lambda: torch.full((2,), 0.1, dtype=torch.float64)),
    ("full((2,), 7)", lambda: torch.full((2,), 7)),
    ("arange(3)", lambda: torch.arange(3)),
    ("arange(0, 1, 0.25)", lambda: torch.arange(0, 1, 0.25, dtype=torch.float64)),
    ("logspace(0, 2, 3)", lambda: torch.logspace(0, 2, 3, dtype=torch.float64)),
    ("-ones(2), [1, (2.5,)], {'a': None, 'b': 'x'}", None),
]


@pytest.mark.parametrize(("text", "expected"), EXPRESSIONS[:-1])
def test_expression_evaluates_as_in_python(text, expected):
    torch.testing.assert_close(Reader().read(text), expected(), rtol=0, atol=0, equal_nan=True)


def test_containers_evaluate_as_in_python():
    minus, numbers, named = Reader().read(EXPRESSIONS[-1][0])
    assert torch.equal(minus, -torch.ones(2, dtype=torch.float64))
    assert (numbers, named) == ([1, (2.5,)], {"a": None, "b": "x"})


def test_random_tensors_are_seeded_and_differ():
    before = torch.get_rng_state()
    a, b = Reader(seed=3).read("randn(4), randn(4)")
    c, _, whole, order = Reader(seed=3).read("randn(4), rand(2, 2), randint(0, 3, (5,)), randperm(4)")
    assert torch.equal(a, c)
    assert not torch.equal(a, b)
    assert not torch.equal(a, Reader(seed=4).read("randn(4)"))
    assert (a.dtype, whole.dtype, order.sort().values.tolist()) == (torch.float64, torch.int64, [0, 1, 2, 3])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["float32", "torch.float32", "bfloat16"])
def test_dtype_applies_to_floating_point_tensors_only(name):
    dtype = dtype_named(name)
    a, b, c, d = Reader(dtype).read("randn(2), tensor(0.5), full((1,), 0.5), arange(2)")
    assert (a.dtype, b.dtype, c.dtype, d.dtype) == (dtype, dtype, dtype, torch.int64)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "randn(2).numpy()",
        "torch.randn(2)",
        "randn(*[2])",
        "randn(**{'size': 2})",
        "[x for x in (1, 2)]",
        "lambda: 1",
        "1 + 1",
        "2 ** 100000000",
        "+randn(2)",
        "not 1",
        "-'x'",
        "f'{1}'",
        "(x := 1)",
        "randn(2)[0]",
        "open",
        "load('x')",
        "from_file('x')",
        "{**{}}",
        "{[]: 1}",
        "",
        "a = 1",
        "ones(2); ones(3)",
        "\0",
    ],
)
def test_rejects_expressions_that_are_not_allowed(text):
    with pytest.raises(InputError, match=r"(?s)check: --inputs: .*Allowed are calls of rand, randn"):
        Reader().read(text)


@pytest.mark.parametrize("text", ["randn('a')", "ones(-1)", "tensor()", "randn(2, colour=1)", "tensor([[1], [1, 2]])"])
def test_rejects_arguments_that_torch_rejects(text):
    with pytest.raises(InputError, match="torch refuses"):
        Reader().read(text)
