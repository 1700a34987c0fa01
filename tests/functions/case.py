"""The description of a Function for the shared contract tests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Inputs = tuple[Any, ...]


@dataclass(frozen=True)
class Extremes:
    """Behaviour of a Function of numbers at extreme arguments, with mpmath as oracle.

    Attributes:
        exact: The function in mpmath, with the same positional arguments; it must be accurate for any argument at the
            current working precision.
        argnum: The argument that varies, by which the function is differentiated.
        others: The other arguments, by position.
        domain: The intervals where the function is smooth, as pairs of bounds, ends excluded.
        limits: Value and first three derivatives where mpmath cannot evaluate (infinities, kinks), as far as they are
            specified; NaN means that NaN is correct.
        scale: The distance over which the function changes around zero; 0 for functions like log, which have none.
        ulps: Largest allowed error, by order 0 to 3, in units of `eps * max(|f^(k)|, max(|x|, scale) |f^(k+1)|)`: the
            error from rounding the result or the argument, whichever changes the result more.
    """

    exact: Callable[..., Any]
    argnum: int = 0
    others: Mapping[int, float] = field(default_factory=dict)
    domain: Sequence[tuple[float, float]] = ((-float("inf"), float("inf")),)
    limits: Mapping[float, Sequence[float]] = field(default_factory=dict)
    scale: float = 1.0
    ulps: Sequence[float] = (4, 8, 16, 32)


@dataclass(frozen=True)
class FunctionCase:
    """One row of the catalogue.

    Attributes:
        name: The name in tests: the function's name, followed by the setting if there are several.
        function: The plain function; keyword options are bound, all positional arguments are in `inputs`.
        Function: The `torch.autograd.Function` behind it, or None.
        direct: Calls the Function with the same arguments, if the plain function does not in plain reverse mode.
        inputs: Draws positional arguments at a smooth point, with at most about 24 differentiated elements.
        formula: The formula, in LaTeX without dollars, for the table of the documentation.
        reference: The function by torch primitives or a correct torch built-in, with the same positional arguments.
        surrogate: For approximate Functions: the function whose derivatives of every order this one has (`reference`
            then gives the values). The derivatives intentionally differ from the derivatives of the values.
        saved_bytes: Bytes that a forward pass keeps for backward, given the inputs.
        saved: The saved tensors, in words for the table, like "input", "output", "1 byte an element".
        extremes: Behaviour at extreme arguments, for Functions of numbers.
        nan_propagates: Whether NaN in any input element gives NaN in the output.
        empty: Inputs without elements, if the function accepts them.
        order: Highest order checked.
        vmap: Whether the function supports vmap (NumPy code may).
        compile: Whether torch.compile(fullgraph=True) supports the function.
        float32_tolerance: Largest error in float32 of value, gradient and product, relative to the largest element.
        check_options: Further arguments of `hodiff.check`.
    """

    name: str
    function: Callable[..., Any]
    Function: type[torch.autograd.Function] | None
    inputs: Callable[[torch.dtype, torch.Generator], Inputs]
    direct: Callable[..., Any] | None = None
    formula: str = ""
    reference: Callable[..., Any] | None = None
    surrogate: Callable[..., Any] | None = None
    saved_bytes: Callable[..., int] | None = None
    saved: str = ""
    extremes: Sequence[Extremes] = ()
    nan_propagates: bool = True
    empty: Callable[[torch.dtype], Inputs] | None = None
    order: int = 3
    vmap: bool = True
    compile: bool = True
    float32_tolerance: float = 1e-5
    check_options: Mapping[str, Any] = field(default_factory=dict)

    def draw(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> Inputs:
        """Return inputs that depend on the seed alone (rounded to `dtype`)."""
        return self.inputs(dtype, torch.Generator().manual_seed(seed))

    def differentiated(self, inputs: Inputs) -> list[int]:
        """Return the positions of the arguments that take a gradient."""
        return [i for i, each in enumerate(inputs) if isinstance(each, Tensor) and each.is_floating_point()]


def normal(shape: Any, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draw normal numbers in float64, then cast, so that every dtype gets the same numbers."""
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def uniform(low: float, high: float, shape: Any, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Draw uniform numbers in float64, then cast, so that every dtype gets the same numbers."""
    return (low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)).to(dtype)


def drawn(*shapes: Any) -> Callable[[torch.dtype, torch.Generator], Inputs]:
    """Return a function that draws normal numbers of these shapes."""
    return lambda dtype, generator: tuple(normal(shape, dtype, generator) for shape in shapes)


def total_bytes(*tensors: Tensor) -> int:
    return sum(each.nbytes for each in tensors)


NUMBERS = drawn((2, 3))


def elementwise(**fields: Any) -> FunctionCase:
    """Return a case of a function of numbers, which draws six, saves its input and accepts no numbers at all."""
    usual = {
        "inputs": NUMBERS,
        "saved_bytes": total_bytes,
        "saved": "input",
        "empty": lambda dtype: (torch.ones(0, 3, dtype=dtype),),
    }
    return FunctionCase(**usual | fields)


def of_one_number(
    name: str,
    Function: Any,
    formula: str,
    reference: Callable[..., Any],
    exact: Callable[..., Any] | None = None,
    inputs: Callable[[torch.dtype, torch.Generator], Inputs] = NUMBERS,
    **extremes: Any,
) -> FunctionCase:
    """Return a case of a Function that is called alone; `extremes` are the attributes of `Extremes`."""
    return elementwise(
        name=name,
        function=Function.call,
        Function=Function,
        inputs=inputs,
        formula=formula,
        reference=reference,
        extremes=[Extremes(exact, **extremes)] if exact else [],
    )
