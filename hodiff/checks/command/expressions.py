"""Reader of inputs written as text, `randn(3, 4), tensor([0.0, 1.0])`, without evaluating it as Python."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from hodiff.errors import InputError

_DTYPES = (
    *("float64", "float32", "bfloat16", "float16", "complex128", "complex64"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)

CONSTANTS: dict[str, Any] = {
    **{name: getattr(torch, name) for name in _DTYPES},
    "inf": math.inf,
    "nan": math.nan,
    "pi": math.pi,
}

# Random functions, which need the generator.
_RANDOM = ("rand", "randn", "randint", "randperm")
_ALWAYS_FLOATING = ("rand", "randn", "zeros", "ones", "eye", "linspace", "logspace")
# Functions whose dtype depends on their arguments.
_BY_VALUE = ("tensor", "full", "arange")
_OF_INTEGERS = ("randint", "randperm")

CALLS = (*_ALWAYS_FLOATING, *_BY_VALUE, *_OF_INTEGERS)

_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}


class Reader:
    """Reader of expressions, which share a random generator; `what` and `hint` are for messages."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        *,
        generator: torch.Generator | None = None,
        what: str = "--inputs",
        hint: str = "",
    ) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed) if generator is None else generator
        self.what = what
        self.hint = hint or _ALLOWED

    def read(self, text: str) -> Any:
        """Read one expression; top-level commas make a tuple."""
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError) as error:
            raise InputError(self._refusal(text, f"is no expression ({error.args[0]})")) from error
        return self.value(tree.body, text)

    def value(self, node: ast.expr, text: str) -> Any:
        """Return the value of a node of the expression."""
        reader = self._READERS.get(type(node))
        if reader is None:
            raise InputError(self._refusal(text, f"holds {ast.unparse(node)!r}"))
        return reader(self, node, text)

    def _sequence(self, node: Any, text: str) -> Any:
        values = (self.value(each, text) for each in node.elts)
        return tuple(values) if isinstance(node, ast.Tuple) else list(values)

    def _dict(self, node: Any, text: str) -> dict[Any, Any]:
        if None in node.keys:
            raise InputError(self._refusal(text, f"holds {ast.unparse(node)!r}"))
        keys = [self.value(key, text) for key in node.keys]
        try:
            return dict(zip(keys, (self.value(value, text) for value in node.values), strict=True))
        except TypeError as error:
            raise InputError(
                self._refusal(text, f"holds {ast.unparse(node)!r}, where a key is not hashable")
            ) from error

    def _constant(self, node: Any, text: str) -> Any:
        return node.value

    def _name(self, node: Any, text: str) -> Any:
        if node.id not in CONSTANTS:
            raise InputError(self._refusal(text, f"holds the name {node.id!r}"))
        return CONSTANTS[node.id]

    def _sign(self, node: Any, text: str) -> Any:
        value = self.value(node.operand, text)
        if not isinstance(node.op, ast.USub) or not isinstance(value, int | float | complex | Tensor):
            raise InputError(self._refusal(text, f"holds {ast.unparse(node)!r}"))
        return -value

    def _call(self, node: Any, text: str) -> Any:
        name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
        starred = any(isinstance(each, ast.Starred) for each in node.args) or any(not k.arg for k in node.keywords)
        if name not in CALLS or starred:
            raise InputError(self._refusal(text, f"calls {ast.unparse(node)!r}"))
        args = [self.value(each, text) for each in node.args]
        kwargs = {each.arg: self.value(each.value, text) for each in node.keywords}
        try:
            return self._construct(name, args, kwargs)
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            raise InputError(
                f"check: {self.what}: torch refuses {ast.unparse(node)}: {str(error).strip().splitlines()[0]}. "
                f"See torch.{name} for its arguments."
            ) from error

    def _construct(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        make: Callable[..., Tensor] = getattr(torch, name)
        if name in _RANDOM:
            kwargs = {"generator": self.generator, **kwargs}
        if name in _ALWAYS_FLOATING:
            kwargs = {"dtype": self.dtype, **kwargs}
        if name in _BY_VALUE and "dtype" not in kwargs:
            made = make(*args, **kwargs)
            wanted = _COMPLEX.get(self.dtype, made.dtype) if made.is_complex() else self.dtype
            # Construct the tensor again: a conversion would keep the rounding of the default dtype.
            return make(*args, dtype=wanted, **kwargs) if made.is_floating_point() or made.is_complex() else made
        return make(*args, **kwargs)

    def _refusal(self, text: str, what: str) -> str:
        return f"check: {self.what}: {text!r} {what}. {self.hint}"

    _READERS: ClassVar[dict[type[ast.expr], Callable[..., Any]]] = {
        ast.Tuple: _sequence,
        ast.List: _sequence,
        ast.Dict: _dict,
        ast.Constant: _constant,
        ast.Name: _name,
        ast.UnaryOp: _sign,
        ast.Call: _call,
    }


def dtype_named(name: str, option: str = "--dtype") -> torch.dtype:
    """Return the floating-point dtype of this name."""
    found = CONSTANTS.get(name.removeprefix("torch."))
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        floating = ", ".join(each for each in _DTYPES if CONSTANTS[each].is_floating_point)
        raise InputError(f"check: {option}: expected one of {floating}, got {name!r}.")
    return found


_ALLOWED = (
    f"Allowed are calls of {', '.join(CALLS)}; numbers, strings, True, False, None and the names "
    f"{', '.join(CONSTANTS)}; a minus before them; tuples, lists and dicts. "
    'For example: "randn(3, 4), tensor([0.5, 2.0]), 3". Anything else: call hodiff.check in Python.'
)
