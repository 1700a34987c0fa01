"""The Hessian-vector product as a Function."""

import torch
from functions.case import FunctionCase, normal

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
        inputs=lambda dtype, g: (normal((2,), dtype, g), normal((2,), dtype, g)),
        formula=r"\nabla^2 f(x)\,v",
        reference=lambda x, v: hodiff.hvp(energy, x, v),
        saved="inputs",
        order=2,  # the fourth derivative of f; the tests of the family go on
        compile=False,  # compiled, it is hodiff.hvp itself
    ),
]
