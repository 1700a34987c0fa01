"""The mode that puts corrections in the place of torch's functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from hodiff.corrections import activations, convolution, losses, pooling  # noqa: F401  (each enters its rules)
from hodiff.corrections.registry import CORRECTIONS
from hodiff.errors import InputError

# Subclasses of Tensor bring rules of their own, which must be asked.
_PLAIN = {Tensor, Parameter}


class Corrections(TorchFunctionMode):
    """While active, in this thread, torch functions with an entry in the table run hodiff's rule.

    It reaches calls inside modules and third-party code. A rule returns torch's value to rounding.

    Args:
        many: Whether many directions will go through the derivatives at once, as in a dense Hessian.

    Example:
        >>> import torch
        >>> from hodiff.corrections import Corrections
        >>> x = torch.tensor([-1.0, 2.0], requires_grad=True)
        >>> with Corrections():
        ...     y = torch.relu(x)
        >>> y.grad_fn.name()
        'ThresholdBackwardBackward0'
    """

    def __init__(self, *, many: bool = False):
        super().__init__()
        self.many = many

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the rule where it covers the arguments, and torch's own function elsewhere."""
        kwargs = kwargs or {}
        # A compiler fuses what these rules spare, and traces torch's own functions best.
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        correction = CORRECTIONS.get(func)
        if correction is None or not (_PLAIN.issuperset(types) and correction.applies(*args, **kwargs)):
            return func(*args, **kwargs)
        # All functions with a least size call their first argument so.
        first = args[0] if args else kwargs["input"]
        if self.many or first.numel() >= correction.least_elements:
            try:
                return correction.rule(*args, **kwargs)
            except InputError:
                return func(*args, **kwargs)
            except (RuntimeError, IndexError, TypeError, ValueError):
                func(*args, **kwargs)  # wrong arguments get torch's own error
                raise
        return func(*args, **kwargs)
