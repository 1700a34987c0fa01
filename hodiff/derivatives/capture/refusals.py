"""Errors for functions that cannot be captured as a graph, and their explanations."""

from __future__ import annotations

from torch import Tensor, nn

from hodiff.derivatives.capture.users_lines import line_of
from hodiff.torch_internals.wording import Wording, says


class CaptureError(Exception):
    """A graph of the function would be wrong; the message says why and what to do."""


class HiddenTensorError(CaptureError):
    """A graph reads a tensor that is not one of its inputs.

    Args:
        tensor: The tensor.
        where: The line that reads it, if known.
    """

    def __init__(self, tensor: Tensor, where: str = ""):
        self.tensor = tensor
        numbers = ", ".join(f"{each:g}" for each in tensor.flatten()[:3].tolist()) if _has_numbers(tensor) else ""
        more = ", ..." if tensor.numel() > 3 else ""
        super().__init__(
            f"it reads a tensor of shape {tuple(tensor.shape)} and dtype {str(tensor.dtype).removeprefix('torch.')}"
            f"{f', numbers {numbers}{more},' * bool(numbers)}{f' at {where},' * bool(where)} that is neither an "
            "argument nor found in what it closes over, so that a change would go unseen; pass it as an argument"
        )


def _has_numbers(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.is_floating_point() and not tensor.is_meta


class RandomNumbersError(CaptureError):
    """A function draws random numbers, and a graph would draw different ones."""

    def __init__(self, operator: str):
        super().__init__(
            f"it draws random numbers ({operator}), which a graph would not draw from the same generator; draw them "
            "before and pass them as an argument, or call model.eval()"
        )


class VectorReadError(CaptureError):
    """A product branches on the vector, so that it is not linear in it."""

    def __init__(self, where: str):
        super().__init__(f"{where} reads numbers of what depends on the vector, which is another one in each product")


# Conditions on torch's error for a failed trace, with its meaning and remedy.
_MEANINGS = (
    (
        lambda error: type(error).__name__ == "FakeTensorDeviceMismatchError" and "meta" in str(error),
        "torch cannot trace forward mode inside of what is differentiated once more, as by torch.func.hessian, jacfwd "
        "and jvp; use torch.func.grad and jacrev there, which are traced",
    ),
    (
        lambda error: type(error).__name__ in ("DataDependentOutputException", "DynamicOutputShapeException"),
        "the size or the number that {said} returns is known with the numbers of a tensor alone; use an operator whose "
        "result has one shape, such as torch.where or a product with a mask",
    ),
    (
        lambda error: says(error, Wording.NO_NUMBERS),
        "it takes numbers out of torch, as NumPy does, so that what becomes of them is in no graph; compute it with "
        "torch, or pass it as an argument",
    ),
)


def explained(error: Exception) -> str:
    """Explain why a capture failed, at which line of the user's code, and what to do."""
    said = (str(error).strip().splitlines() or [""])[0][:200]
    if isinstance(error, CaptureError):
        cause = str(error)
    else:
        meanings = (words.format(said=said) for fits, words in _MEANINGS if fits(error))
        cause = next(meanings, f"torch cannot trace or compile it ({type(error).__name__}: {said})")
    where = line_of(error)
    return f"{cause} (at {where})" if where else cause
