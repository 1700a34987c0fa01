"""Functions of elements: the result depends, element by element, on what its arguments depend on."""

from __future__ import annotations

from typing import Any

from hodiff.taylor.rules.elementary import ELEMENTARY
from hodiff.taylor.sparsity.slots import Call, together

POINTWISE = frozenset({
    *ELEMENTARY,
    *[
        "add",
        "sub",
        "rsub",
        "mul",
        "div",
        "rdiv",
        "pow",
        "rpow",
        "float_power",
        "logit",
        "copysign",
        "clamp",
        "clamp_min",
        "clamp_max",
        "hypot",
        "atan2",
    ],
    *[
        "maximum",
        "minimum",
        "fmax",
        "fmin",
        "where",
        "lerp",
        "addcmul",
        "addcdiv",
        "ldexp",
        "xlogy",
        "special.xlog1py",
        "polygamma",
    ],
    *["logaddexp", "logaddexp2", "remainder", "fmod", "masked_fill", "neg", "pos", "clone", "contiguous"],
    *[
        "to",
        "float",
        "double",
        "half",
        "bfloat16",
        "type",
        "type_as",
        "dropout",
        "nn.dropout",
        "selu",
        "celu",
        "threshold",
        "hardshrink",
    ],
    *[
        "nn.gelu",
        "nn.silu",
        "nn.mish",
        "nn.softplus",
        "nn.softsign",
        "nn.tanhshrink",
        "nn.logsigmoid",
        "nn.elu",
        "nn.selu",
        "nn.celu",
    ],
    *["nn.hardtanh", "nn.relu6", "nn.relu", "nn.leaky_relu", "nn.threshold", "nn.hardshrink", "nn.softshrink"],
    *["nn.hardsigmoid", "nn.hardswish"],
})


def pointwise(call: Call) -> Any:
    """The rule on common slots."""
    found = together(call) if call.sparse else None
    return NotImplemented if found is None else call.run(*found)
