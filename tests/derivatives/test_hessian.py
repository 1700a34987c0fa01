"""hodiff.hessian and hodiff.hessian_matrix against the references and, for structure, torch.func.hessian."""

from functools import partial
from typing import Any

import pytest
import torch
from cases import CASES, OVER_BATCHED_REVERSE, Case, cast, ravel
from cases import case as named
from derivatives.oracles import assert_same_structure, reference, route_table
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from hodiff import ROUTES, RouteError, hessian, hessian_matrix

EVERY_ROUTE = ("auto", *ROUTES)
CHUNK_SIZES = ("auto", None, 1, 2, 7, 1000)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("case", "route"), route_table(EVERY_ROUTE))
def test_matrix_matches_reference_and_is_symmetric(case: Case, route: str) -> None:
    x, args = case.inputs()
    matrix = hessian_matrix(case.function, x, *args, route=route)
    known = reference(case.name)
    known.check(matrix, known.hessian)
    assert matrix.equal(matrix.T)


# The routes compute the rows of blocks and of matrices; only the places of the rows differ.
@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES, ids=lambda each: each.name)
def test_blocks_match_reference(case: Case) -> None:
    x, args = case.inputs()
    blocks = hessian(case.function)(x, *args)
    known = reference(case.name)
    known.check(assemble(blocks, x), known.hessian)


def assemble(blocks: Any, x: Any) -> Tensor:
    """Assemble the (n, n) matrix of nested blocks, whose outer structure comes before the inner."""
    sizes = [leaf.numel() for leaf in tree_leaves(x)]
    rows = iter(tree_leaves(blocks))
    return torch.cat([torch.cat([next(rows).reshape(m, n) for n in sizes], dim=1) for m in sizes])


@pytest.mark.parametrize("case", CASES, ids=lambda each: each.name)
def test_float32_matches_float64(case: Case) -> None:
    x, args = case.inputs(torch.float32)
    matrix = hessian_matrix(case.function, x, *args)
    exact = hessian_matrix(case.function, *cast((x, *args), torch.float64))
    assert matrix.dtype == torch.float32
    assert matrix.equal(matrix.T)
    error = (matrix.to(torch.float64) - exact).abs().max()
    assert error <= 100 * torch.finfo(torch.float32).eps * max(1.0, exact.abs().max())


COMPARABLE = [each for each in CASES if each.available(OVER_BATCHED_REVERSE)]


@pytest.mark.parametrize("case", COMPARABLE, ids=lambda each: each.name)
def test_structure_matches_torch_func_hessian(case: Case) -> None:
    x, args = case.inputs()
    actual = hessian(case.function)(x, *args)
    # torch's forward mode refuses expanded tensors.
    expected = torch.func.hessian(case.function)(tree_map(Tensor.contiguous, x), *args)
    assert_same_structure(actual, expected)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


def energy(a: Tensor, tree: dict[str, Tensor], c: Tensor, *, power: int = 2) -> Tensor:
    return (a.sin() @ tree["m"]).pow(power).sum() * tree["s"] + c * a.sum()


def energy_inputs(generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return draw(2), {"m": draw(2, 3), "s": draw()}, draw()


@pytest.mark.parametrize("argnums", [0, 1, 2, (0,), (0, 1), (2, 0), (0, 1, 2)])
def test_argnums_match_torch_func_hessian(argnums: int | tuple[int, ...], generator: torch.Generator) -> None:
    inputs = energy_inputs(generator)
    actual = hessian(energy, argnums)(*inputs)
    expected = torch.func.hessian(energy, argnums)(*inputs)
    assert_same_structure(actual, expected)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(("negative", "positive"), [(-1, 2), (-2, 1), (-3, 0), ((-1,), (2,)), ((-2, 0), (1, 0))])
def test_negative_argnums_match_positive_ones(negative: Any, positive: Any, generator: torch.Generator) -> None:
    """Results are compared with hodiff's own, because torch.func.hessian silently returns zeros for -3."""
    inputs = energy_inputs(generator)
    actual, expected = hessian(energy, negative)(*inputs), hessian(energy, positive)(*inputs)
    assert_same_structure(actual, expected)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_keyword_arguments_are_constants(generator: torch.Generator) -> None:
    inputs = energy_inputs(generator)
    actual = hessian(energy, argnums=(0, 1))(*inputs, power=3)
    torch.testing.assert_close(actual, torch.func.hessian(partial(energy, power=3), argnums=(0, 1))(*inputs))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
@pytest.mark.parametrize("route", EVERY_ROUTE)
@pytest.mark.parametrize("name", ["mlp", "nested", "zero_size_leaf", "scalar"])
def test_every_chunk_size_matches_reference(name: str, route: str, chunk_size: Any) -> None:
    case = named(name)
    x, args = case.inputs()
    matrix = hessian_matrix(case.function, x, *args, route=route, chunk_size=chunk_size)
    known = reference(name)
    known.check(matrix, known.hessian)
    blocks = hessian(case.function, route=route, chunk_size=chunk_size)(x, *args)
    known.check(assemble(blocks, x), known.hessian)


@pytest.mark.parametrize("route", EVERY_ROUTE)
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_has_aux_returns_aux(route: str, chunk_size: int | None) -> None:
    def f(x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y = x**3
        return y.sum(), (y, y.argmax())

    x = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    block, aux = hessian(f, has_aux=True, route=route, chunk_size=chunk_size)(x)
    matrix, matrix_aux = hessian_matrix(f, x, has_aux=True, route=route, chunk_size=chunk_size)
    torch.testing.assert_close(block, torch.diag(6 * x))
    torch.testing.assert_close(matrix, torch.diag(6 * x))
    for cubes, largest in (aux, matrix_aux):
        assert cubes.equal(x**3)
        assert not cubes.requires_grad
        assert largest.equal(torch.tensor(2))


@pytest.mark.parametrize("case", [each for each in CASES if each.missing_in_torch], ids=lambda each: each.name)
def test_route_missing_in_torch_raises(case: Case) -> None:
    x, args = case.inputs()
    for route in case.missing_in_torch:
        with pytest.raises(RouteError, match=route):
            hessian_matrix(case.function, x, *args, route=route, correct=False)
        with pytest.raises(RouteError, match=route):
            hessian(case.function, route=route, correct=False)(x, *args)


def test_inputs_are_left_unchanged() -> None:
    case = named("mlp")
    x, args = case.inputs()
    tree_map(lambda leaf: leaf.requires_grad_(), x)
    before = ravel(x).detach().clone()
    hessian_matrix(case.function, x, *args)
    assert ravel(x).equal(before)
    assert all(leaf.grad is None and leaf.requires_grad and leaf.is_leaf for leaf in tree_leaves(x))


def test_empty_leaves_have_empty_hessians() -> None:
    """A function that uses an argument without elements has empty Hessians, and no error."""
    x = torch.ones(0, 2, dtype=torch.float64)
    assert hessian_matrix(lambda y: (y**2).sum(), x).shape == (0, 0)
    assert hessian(lambda y: (y**2).sum())(x).shape == (0, 2, 0, 2)


@pytest.mark.parametrize("chunk_size", [None, 1])
def test_progress_writes_to_stderr_only(capsys: pytest.CaptureFixture[str], chunk_size: int | None) -> None:
    case = named("mlp")
    x, args = case.inputs()
    quiet = hessian_matrix(case.function, x, *args, chunk_size=chunk_size)
    assert capsys.readouterr() == ("", "")
    loud = hessian_matrix(case.function, x, *args, chunk_size=chunk_size, progress=True)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "20/20" in printed.err
    assert loud.equal(quiet)


def test_bfloat16_matches_closed_form() -> None:
    x = torch.tensor([0.5, -1.0, 2.0], dtype=torch.bfloat16)
    matrix = hessian_matrix(lambda y: (y**3).sum(), x)
    torch.testing.assert_close(matrix, torch.diag(6 * x), rtol=2**-7, atol=0)
