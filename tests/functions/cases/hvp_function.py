"""The Hessian-vector product as a Function."""

import torch
from functions.case import FunctionCase, drawn

import hodiff
from hodiff import hvp_function
from hodiff.recompute.programs import Checkpoint


def energy(x):
    return torch.sin(x.prod()) * x.exp().sum()


CASES = [
    FunctionCase(
        name="hvp_function",
        function=hvp_function(energy),
        Function=Checkpoint,
        inputs=drawn((2,), (2,)),
        formula=r"\nabla^2 f(x)\,v",
        reference=lambda x, v: hodiff.hvp(energy, x, v),
        saved="inputs",
        order=2,  # this needs the fourth derivative of f; the tests of hvp_function cover higher orders
        compile=False,  # compiled, the function is hodiff.hvp itself
    ),
]
