"""Inputs and losses written as text evaluate as in Python, seeded and in float64 by default."""

import re

import pytest
import torch

from hodiff import InputError
from hodiff.checks.command.expressions import dtype_named, read_inputs, read_loss


def read(text, dtype=torch.float64, seed=0):
    return read_inputs(text, dtype, torch.Generator().manual_seed(seed))


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
    ("1 + randint(1, 2, (2, 1)).T[0] * ones(2)", lambda: 2 * torch.ones(2, dtype=torch.float64)),
    ("softmax(torch.zeros(2), dim=0)", lambda: torch.full((2,), 0.5, dtype=torch.float64)),
    ("logspace(0, 2, 3)", lambda: torch.logspace(0, 2, 3, dtype=torch.float64)),
    ("-ones(2), [1, (2.5,)], {'a': None, 'b': 'x'}", None),
]


@pytest.mark.parametrize(("text", "expected"), EXPRESSIONS[:-1])
def test_expression_evaluates_as_in_python(text, expected):
    torch.testing.assert_close(read(text), expected(), rtol=0, atol=0, equal_nan=True)


def test_containers_evaluate_as_in_python():
    minus, numbers, named = read(EXPRESSIONS[-1][0])
    assert torch.equal(minus, -torch.ones(2, dtype=torch.float64))
    assert (numbers, named) == ([1, (2.5,)], {"a": None, "b": "x"})


def test_random_tensors_are_seeded_and_differ():
    before = torch.get_rng_state()
    a, b = read("randn(4), randn(4)", seed=3)
    c, _, whole, order = read("randn(4), rand(2, 2), randint(0, 3, (5,)), randperm(4)", seed=3)
    assert torch.equal(a, c)
    assert not torch.equal(a, b)
    assert not torch.equal(a, read("randn(4)", seed=4))
    generator = torch.Generator().manual_seed(3)
    assert torch.equal(a, torch.randn(4, dtype=torch.float64, generator=generator))
    assert (a.dtype, whole.dtype, order.sort().values.tolist()) == (torch.float64, torch.int64, [0, 1, 2, 3])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("name", ["float32", "torch.float32", "bfloat16"])
def test_dtype_applies_to_floating_point_tensors_only(name):
    dtype = dtype_named(name)
    a, b, c, d = read("randn(2), tensor(0.5), full((1,), 0.5), arange(2)", dtype)
    assert (a.dtype, b.dtype, c.dtype, d.dtype) == (dtype, dtype, dtype, torch.int64)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "points_of_a_file.py"
    path.write_text(
        "import torch\npoint = torch.ones(2), 3\ndef points():\n    return torch.randn(2), 3\n"
        "def loss(output):\n    return output.sum()\nclass Holder:\n    point = torch.zeros(2)\n"
        "def fails(size):\n    return size\n"
    )
    return path


def test_inputs_are_read_from_a_file(file):
    """Tensors are taken as they are; functions are called with the seed and the default dtype."""
    point, number = read(f"{file}:point")
    assert (point.dtype, number) == (torch.float32, 3)
    assert torch.equal(read(f"{file}:Holder.point"), torch.zeros(2))
    drawn, _ = read(f"{file}:points", seed=3)
    assert torch.equal(drawn, read("randn(2)", seed=3))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("randn('a')", "TypeError"),
        ("ones(-1)", "RuntimeError"),
        ("randn(2, colour=1)", "TypeError"),
        ("no_such_name(2)", "NameError"),
        ("{[]: 1}", "TypeError"),
        ("randn(2", "SyntaxError"),
        ("a = 1", "SyntaxError"),
        ("", "SyntaxError"),
        ("\0", "SyntaxError|ValueError"),
    ],
)
def test_errors_name_the_option_the_expression_and_the_exception(text, error):
    with pytest.raises(InputError, match=r"check: --inputs: .* raises .*Expected a Python expression") as caught:
        read(text)
    assert repr(text) in str(caught.value)
    assert re.search(f"raises ({error})", str(caught.value))
    wrong = f"{text or 'a'} + output"
    with pytest.raises(InputError, match=f"check: --loss: .* raises ({error}|NameError).*Expected a Python expression"):
        read_loss(wrong, torch.Generator())(torch.ones(2))


def test_errors_of_a_file_name_the_missing_object(file):
    with pytest.raises(InputError, match=r"check: --inputs: .*:fails' raises TypeError: fails"):
        read(f"{file}:fails")
    with pytest.raises(InputError, match=r"check: --inputs: .* has no 'nothing'. It has Holder, fails, loss, points"):
        read(f"{file}:nothing")


@pytest.mark.parametrize(
    ("text", "output", "expected"),
    [
        ("mse_loss(output, ones(2))", torch.zeros(2), 1.0),
        ("output['a'][0] + output['b'] % 2", {"a": torch.ones(2), "b": 3}, 2.0),
        ("sum(torch.stack([each**2 for each in output]))", [torch.ones(()), torch.ones(())], 2.0),
    ],
)
def test_loss_expressions_evaluate_with_the_output(text, output, expected):
    assert read_loss(text, torch.Generator())(output) == expected


def test_random_tensors_of_a_loss_are_drawn_once_after_the_inputs():
    generator = torch.Generator().manual_seed(0)
    inputs = read_inputs("randn(2)", torch.float64, generator)
    loss = read_loss("(output - randn(2)).sum()", generator)
    again = torch.Generator().manual_seed(0)
    first, second = (torch.randn(2, generator=again, dtype=torch.float64) for _ in range(2))
    assert torch.equal(inputs, first)
    assert loss(torch.zeros(2)) == loss(torch.zeros(2)) == -second.sum()


def test_errors_of_a_loss_describe_the_output():
    loss = read_loss("output['logit'].sum()", torch.Generator())
    with pytest.raises(InputError, match=r"raises KeyError: 'logit'\. The output is a dict with the keys 'logits'"):
        loss({"logits": torch.ones(2)})
