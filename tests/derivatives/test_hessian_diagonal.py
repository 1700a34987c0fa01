"""hodiff.hessian_diagonal is exact: the diagonal of the reference Hessian, in the structure of x."""

from typing import Any

import pytest
import torch
from cases import CASES, Case, cast, ravel
from cases import case as named
from derivatives.oracles import assert_same_structure, reference, route_table
from torch import Tensor

from hodiff import ROUTES, RouteError, hessian_diagonal

EVERY_ROUTE = ("auto", *ROUTES)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("case", "route"), route_table(EVERY_ROUTE))
def test_diagonal_matches_reference(case: Case, route: str) -> None:
    x, args = case.inputs()
    diagonal = hessian_diagonal(case.function, route=route)(x, *args)
    assert_same_structure(diagonal, x)
    known = reference(case.name)
    known.check(ravel(diagonal), known.hessian.diagonal())


@pytest.mark.parametrize("case", CASES, ids=lambda each: each.name)
def test_float32_matches_float64(case: Case) -> None:
    x, args = case.inputs(torch.float32)
    diagonal = hessian_diagonal(case.function)(x, *args)
    assert_same_structure(diagonal, x)
    exact = ravel(hessian_diagonal(case.function)(*cast((x, *args), torch.float64)))
    error = (ravel(diagonal).to(torch.float64) - exact).abs().max()
    assert error <= 100 * torch.finfo(torch.float32).eps * max(1.0, exact.abs().max())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("chunk_size", ["auto", None, 1, 3, 1000])
@pytest.mark.parametrize("route", EVERY_ROUTE)
@pytest.mark.parametrize("name", ["tied", "nested", "zero_size_leaf"])
def test_every_chunk_size_matches_reference(name: str, route: str, chunk_size: Any) -> None:
    case = named(name)
    x, args = case.inputs()
    diagonal = hessian_diagonal(case.function, route=route, chunk_size=chunk_size)(x, *args)
    known = reference(name)
    known.check(ravel(diagonal), known.hessian.diagonal())


@pytest.mark.parametrize("argnums", [0, 1, -1, (0,), (1, 0)])
def test_argnums_match_closed_form(argnums: int | tuple[int, ...]) -> None:
    a = torch.tensor([1.0, 2.0], dtype=torch.float64)
    b = {"b": torch.tensor([[3.0]], dtype=torch.float64)}

    def f(a: Tensor, b: dict[str, Tensor]) -> Tensor:
        return (a**3).sum() * b["b"].pow(2).sum()

    of_argument = (6 * a * 9, {"b": torch.full((1, 1), 2 * 9.0, dtype=torch.float64)})
    expected = tuple(of_argument[i] for i in argnums) if isinstance(argnums, tuple) else of_argument[argnums]
    torch.testing.assert_close(hessian_diagonal(f, argnums)(a, b), expected)


@pytest.mark.parametrize("route", EVERY_ROUTE)
def test_has_aux_returns_aux(route: str) -> None:
    x = torch.tensor([1.0, -2.0], dtype=torch.float64)
    diagonal, aux = hessian_diagonal(lambda y: ((y**3).sum(), {"y": 2 * y}), has_aux=True, route=route)(x)
    torch.testing.assert_close(diagonal, 6 * x)
    torch.testing.assert_close(aux, {"y": 2 * x})


@pytest.mark.parametrize("case", [each for each in CASES if each.missing_in_torch], ids=lambda each: each.name)
def test_route_missing_in_torch_raises(case: Case) -> None:
    x, args = case.inputs()
    for route in case.missing_in_torch:
        with pytest.raises(RouteError, match=route):
            hessian_diagonal(case.function, route=route, correct=False)(x, *args)
