"""Results that are changed in place: in forward mode, their tangents share no memory with the input's tangent."""

import pytest
import torch
import torch.nn.functional as F

import hodiff
from hodiff import functions

D = torch.float64
X = torch.tensor([0.5, -0.7], dtype=D)
PLACES = torch.ones(2, dtype=D)


COPIES = {
    "alias_copy": torch.alias_copy,
    "as_strided_copy": lambda y: torch.as_strided_copy(y, (2,), (1,)),
    "diagonal_copy": lambda y: torch.diagonal_copy(y.expand(2, 2)),
    "expand_copy": lambda y: torch.expand_copy(y, (2,)),
    # Older versions of torch do not differentiate it.
    **({"narrow_copy": lambda y: y.narrow_copy(0, 0, 2)} if torch.__version__ >= "2.13" else {}),
    "permute_copy": lambda y: torch.permute_copy(y, (0,)),
    "select_copy": lambda y: torch.select_copy(y[None], 0, 0),
    "slice_copy": torch.slice_copy,
    "split_copy": lambda y: torch.split_copy(y, 2)[0],
    "split_with_sizes_copy": lambda y: torch.split_with_sizes_copy(y, [2])[0],
    "squeeze_copy": lambda y: torch.squeeze_copy(y[None]),
    "squeeze_copy of a dimension": lambda y: torch.squeeze_copy(y[None], dim=0),
    "t_copy": torch.t_copy,
    "transpose_copy": lambda y: torch.transpose_copy(y, 0, 0),
    "unbind_copy": lambda y: torch.unbind_copy(y[None])[0],
    "unfold_copy": lambda y: torch.unfold_copy(y, 0, 1, 1)[:, 0],
    "unsqueeze_copy": lambda y: torch.unsqueeze_copy(y, 0),
    "view_copy": lambda y: torch.view_copy(y, (2,)),
    "view_copy by name": lambda y: torch.view_copy(input=y, size=(2,)),
    "aten.view_copy": lambda y: torch.ops.aten.view_copy.default(y, (2,)),
    "view_as_real_copy": lambda y: torch.view_as_real_copy(torch.view_as_complex(y[None])),
    "frac": torch.frac,
    "Tensor.frac": lambda y: y.frac(),
    "fmod": lambda y: y.fmod(9),
    "fmod of tensors": lambda y: torch.fmod(y, 9 * PLACES),
    "remainder": lambda y: y.remainder(9),
    "remainder by an operator": lambda y: y % 9,
    "layer_norm of a constant": lambda y: F.layer_norm(PLACES, (2,), bias=y),
    "bias_act": lambda y: functions.bias_act(y, 0 * PLACES, act="identity"),
    "log_gradient": lambda y: functions.log_gradient(y, lambda gradient: None),
    "floor_ste": functions.floor_ste,
    "round_ste": functions.round_ste,
    "sign_ste": functions.sign_ste,
}


@pytest.mark.parametrize("name", COPIES)
def test_change_in_place_leaves_the_input(name):
    def changed(x):
        y = x * 1
        COPIES[name](y).mul_(x[0])
        return (y**3).sum()

    torch.testing.assert_close(hodiff.jacobian(changed, mode="forward")(X), 3 * X**2)
    for route in hodiff.ROUTES:
        torch.testing.assert_close(hodiff.hessian(changed, route=route)(X), (6 * X).diag())


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_view_copy_takes_tensors_that_have_no_such_view(route):
    x = torch.arange(6.0, dtype=D).reshape(3, 2)

    def f(x):
        return (torch.view_copy((x * x).mT, (6,)) ** 2).sum()

    torch.testing.assert_close(hodiff.hvp(f, x, x, route=route), 12 * x**3)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", COPIES)
def test_change_of_the_input_leaves_the_copy(name):
    def copied(x, change):
        y = x * 1
        z = COPIES[name](y)
        if change:
            y.mul_(x[0])
        return (z**3 * x[1]).sum()

    for route in hodiff.ROUTES:
        changed, plain = (hodiff.hessian(lambda x, c=c: copied(x, c), route=route)(X) for c in (True, False))
        torch.testing.assert_close(changed, plain)
