"""A bias and an activation."""

from functools import partial

import torch
from functions.case import FunctionCase, drawn

from hodiff.functions.activations.bias_act import BiasAct, bias_act

REFERENCES = {
    "identity": lambda z: z,
    "relu": lambda z: 0.5 * (z + z.abs()),
    "sigmoid": lambda z: 1 / (1 + torch.exp(-z)),
    "tanh": lambda z: (torch.exp(2 * z) - 1) / (torch.exp(2 * z) + 1),
    "gelu": lambda z: 0.5 * z * (1 + torch.erf(z / 2**0.5)),
    "silu": lambda z: z / (1 + torch.exp(-z)),
}
SAVED = {"identity": "nothing", "gelu": "inputs", "silu": "inputs"}


def case(act):
    def saved_bytes(x, b):
        return {"nothing": 0, "inputs": x.nbytes + b.nbytes, "output": x.nbytes}[SAVED.get(act, "output")]

    return FunctionCase(
        name=f"bias_act-{act}",
        function=partial(bias_act, act=act),
        Function=BiasAct,
        direct=lambda x, b: BiasAct.call(x, b, act),
        inputs=drawn((2, 3, 2), (3, 1)),
        formula=r"a(x + b)",
        reference=lambda x, b: REFERENCES[act](x + b),
        saved_bytes=saved_bytes,
        saved=SAVED.get(act, "output"),
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype), torch.ones(3, dtype=dtype)),
        # torch cannot compile reverse over forward of a linear function, such as x + b.
        compile=act != "identity",
    )


CASES = [case(act) for act in REFERENCES]
