"""`preflight` remarks nothing false about hodiff's functions, nor about the `forward` of a Function."""

import pytest
import torch
from custom_functions import custom
from functions.catalogue import CASES

import hodiff


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_hodiffs_functions_have_no_remarks(case):
    inputs = case.inputs(torch.float64, torch.Generator().manual_seed(0))
    found = hodiff.preflight(lambda *given: case.function(*given), *inputs)
    assert found.ok
    assert not found.cuts
    assert all("draws random numbers" in each for each in found.remarks)


Doubled = custom("Doubled", lambda x: 2 * x.detach().sin(), lambda ctx, g: 2 * g * ctx.saved_tensors[0].cos())


def test_forward_of_a_function_cuts_nothing():
    x = torch.randn(3, generator=torch.Generator().manual_seed(0))
    assert not hodiff.preflight(lambda x: Doubled.apply(x) * x, x).cuts
    assert hodiff.preflight(lambda x: Doubled.apply(x) * x.detach(), x).cuts == 1
