"""Jagged nested tensors inside functions of ordinary tensors: right, or one error that names them."""

import pytest
import torch
import torch.nn.functional as F
from drawing import draw

import hodiff
from hodiff.errors import HodiffError

PARTS = [draw(3, 4), draw(5, 4, seed=1)]
W = draw(4, 4, seed=2) / 2


def jagged():
    return torch.nested.nested_tensor(PARTS, layout=torch.jagged)


def linear(w):
    return F.linear(jagged(), w).tanh().values().sum()


def linear_of_a_list(w):
    return sum(F.linear(part, w).tanh().sum() for part in PARTS)


FUNCTIONS = {
    "matmul": lambda w: (jagged() @ w).tanh().values().sum(),
    "linear": linear,
    "padded": lambda w: F.linear(jagged(), w).tanh().to_padded_tensor(0.0).sum(),
    "unbind": lambda w: sum((part**3).sum() for part in F.linear(jagged(), w).tanh().unbind()),
}
CALLS = {
    "hvp": lambda f: hodiff.hvp(f, W, W),
    **{route: lambda f, route=route: hodiff.hvp(f, W, W, route=route) for route in hodiff.ROUTES},
    "value_grad_hvp": lambda f: hodiff.value_grad_hvp(f, W, W),
    "hessian": lambda f: hodiff.hessian(f)(W),
    "hessian_diagonal": lambda f: hodiff.hessian_diagonal(f)(W),
    "HessianOperator": lambda f: hodiff.HessianOperator(f, W) @ W,
    "jacobian": lambda f: hodiff.jacobian(f, mode="forward")(W),
    "first order": lambda f: hodiff.directional_derivatives(f, W, W, order=1),
    "second order": lambda f: hodiff.directional_derivatives(f, W, W, order=2),
    "laplacian": lambda f: hodiff.laplacian(f)(W),
    "bilaplacian": lambda f: hodiff.bilaplacian(f)(W),
    "jet": lambda f: hodiff.taylor.jet(f, (W,), ([W, W],)),
    "sparse.hessian": lambda f: hodiff.sparse.hessian(f)(W),
    "sparse.jacobian": lambda f: hodiff.sparse.jacobian(lambda w: f(w)[None])(W),
}
RIGHT = {"hvp", "reverse-over-reverse", "value_grad_hvp", "HessianOperator"}
if torch.__version__ < "2.14":  # newer versions do not batch the second derivative of linear layers
    RIGHT |= {"hessian", "hessian_diagonal"}


# sparse.hessian chooses its route before it looks for the pattern.
@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:sparse.hessian. took forward-over-forward")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_jagged_tensors_inside_are_right_or_rejected(name, call):
    if name == "linear" and call in RIGHT:
        torch.testing.assert_close(CALLS[call](linear), CALLS[call](linear_of_a_list))
        return
    with pytest.raises(HodiffError, match=r"nested|aten::matmul_backward") as caught:
        CALLS[call](FUNCTIONS[name])
    if call in ("laplacian", "bilaplacian", "jet"):
        assert "list of tensors" in str(caught.value)


def test_attribute_error_of_the_user_is_raised_unchanged():
    """A missing attribute of a nested tensor is the user's mistake, not a missing derivative."""
    with pytest.raises(AttributeError, match="no attribute 'no_such_thing'"):
        hodiff.hvp(lambda w: F.linear(jagged(), w).no_such_thing, W, W)
