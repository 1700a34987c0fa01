"""Python's operators for objects that handle torch functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class PythonOperators:
    """Base class whose operators pass the torch functions that implement them to `__torch_function__`."""


# Python operators and the torch functions that implement them; reflected operators swap the arguments.
_OPERATORS: dict[str, Callable[..., Any]] = {
    **{"add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.div, "pow": torch.pow},
    **{"matmul": torch.matmul, "floordiv": torch.floor_divide, "mod": torch.remainder},
    **{"neg": torch.neg, "pos": torch.positive, "abs": torch.abs, "invert": torch.bitwise_not},
    **{"eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge},
    **{"getitem": Tensor.__getitem__, "setitem": Tensor.__setitem__},
    **{"float": Tensor.__float__, "int": Tensor.__int__, "complex": Tensor.__complex__, "index": Tensor.__index__},
    **{"array": Tensor.__array__, "reduce_ex": Tensor.__reduce_ex__},
}
_REFLECTED = ("add", "sub", "mul", "truediv", "pow", "matmul", "floordiv", "mod")
_IN_PLACE = {
    "iadd": Tensor.add_,
    "isub": Tensor.sub_,
    "imul": Tensor.mul_,
    "itruediv": Tensor.div_,
    "ipow": Tensor.pow_,
}


def _operator(function: Any) -> Callable[..., Any]:
    def call(self: Any, *args: Any) -> Any:
        return self.__torch_function__(function, (), (self, *args))

    return call


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, other: Any) -> Any:
        return self.__torch_function__(function, (), (other, self))

    return call


for _name, _function in (*_OPERATORS.items(), *_IN_PLACE.items()):
    setattr(PythonOperators, f"__{_name}__", _operator(_function))
for _name in _REFLECTED:
    setattr(PythonOperators, f"__r{_name}__", _reflected(_OPERATORS[_name]))
