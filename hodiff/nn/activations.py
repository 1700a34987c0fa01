"""Activations as modules, with derivatives of every order."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hodiff.common.options import require_bool, require_choice, require_number
from hodiff.functions.activations.gated import gelu, mish, silu, swish
from hodiff.functions.activations.rectifiers import clipped_relu, relu, softplus
from hodiff.functions.logarithms import log_sigmoid
from hodiff.functions.logistic import scaled_sigmoid
from hodiff.rules.arguments import require_number_or_floating


class Swish(nn.Module):
    r"""$x\,\sigma(\beta x)$ with a learned β.

    Args:
        beta: Initial value of β; a tensor gives one β per feature, broadcast with the input.

    Raises:
        InputError: If `beta` is neither a number nor a floating-point tensor.

    Example:
        >>> import torch
        >>> Swish()(torch.tensor([-1.0, 1.0]))
        tensor([-0.2689,  0.7311], grad_fn=<SwishBackward>)
        >>> Swish(torch.ones(64))
        Swish(beta=(64,))

    Source: P. Ramachandran, B. Zoph & Q. V. Le, "Searching for activation functions", 2017, section 3.
    """

    def __init__(self, beta: Tensor | float = 1.0):
        super().__init__()
        require_number_or_floating("Swish", beta=beta)
        self.beta = _parameter(beta)

    def forward(self, x: Tensor) -> Tensor:
        """Apply `hodiff.functions.swish`."""
        return swish(x, self.beta)

    def extra_repr(self) -> str:
        """Return the value of β, or its shape."""
        return f"beta={_described(self.beta)}"


class ScaledSigmoid(nn.Module):
    r"""$s\,\sigma(x)$ with a constant or learned scale.

    Args:
        scale: The scale, or its initial value; a tensor is broadcast with the input.
        learned: Whether the scale is a parameter. If not, it is a constant, and a tensor becomes a buffer.

    Raises:
        InputError: If `scale` is neither a number nor a floating-point tensor.

    Example:
        >>> import torch
        >>> ScaledSigmoid(2.0)(torch.tensor([0.0, 1.0]))
        tensor([1.0000, 1.4621])

    Source: Y. LeCun, L. Bottou, G. Orr & K.-R. Müller, "Efficient BackProp", 1998, section 4.4.
    """

    scale: Tensor | float

    def __init__(self, scale: Tensor | float = 1.0, learned: bool = False):
        super().__init__()
        require_number_or_floating("ScaledSigmoid", scale=scale)
        require_bool("ScaledSigmoid", "learned", learned)
        self.learned = learned
        if learned:
            self.scale = _parameter(scale)
        elif isinstance(scale, Tensor):
            self.register_buffer("scale", scale.detach().clone())
        else:
            self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Apply `hodiff.functions.scaled_sigmoid`."""
        return scaled_sigmoid(x, self.scale)

    def extra_repr(self) -> str:
        """Return the value of the scale, or its shape."""
        return f"scale={_described(self.scale)}, learned={self.learned}"


class ClippedReLU(nn.Module):
    r"""$\min(\max(x, 0), c)$; derivative 1 inside $(0, c)$, and 0 elsewhere.

    Args:
        max: The ceiling c, a positive number; 6 by default, as in torch's `ReLU6`.

    Raises:
        InputError: If `max` is not a positive number.

    Example:
        >>> import torch
        >>> ClippedReLU()(torch.tensor([-1.0, 3.0, 8.0]))
        tensor([0., 3., 6.])

    Source: A. Hannun et al., "Deep Speech: scaling up end-to-end speech recognition", 2014, section 2.
    """

    def __init__(self, max: float = 6.0):
        super().__init__()
        require_number("ClippedReLU", "max", max, positive=True)
        self.max = max

    def forward(self, x: Tensor) -> Tensor:
        """Apply `hodiff.functions.clipped_relu`."""
        return clipped_relu(x, self.max)

    def extra_repr(self) -> str:
        """Return the ceiling."""
        return f"max={self.max}"


class ReLU(nn.Module):
    r"""$\max(x, 0)$, whose second derivative costs nothing.

    Example:
        >>> import torch
        >>> ReLU()(torch.tensor([-1.0, 3.0]))
        tensor([0., 3.])

    Source: V. Nair & G. Hinton, "Rectified linear units improve restricted Boltzmann machines", 2010.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply `hodiff.functions.relu`."""
        return relu(x)


class SiLU(nn.Module):
    r"""$x\,\sigma(x)$.

    Example:
        >>> import torch
        >>> SiLU()(torch.tensor([-1.0, 1.0]))
        tensor([-0.2689,  0.7311])

    Source: D. Hendrycks & K. Gimpel, "Gaussian error linear units", 2016, section 4.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply `hodiff.functions.silu`."""
        return silu(x)


class GELU(nn.Module):
    r"""$x\,\Phi(x)$, or its approximation by tanh.

    Args:
        approximate: `"none"` or `"tanh"`.

    Raises:
        InputError: If `approximate` is neither.

    Example:
        >>> import torch
        >>> GELU()(torch.tensor([-1.0, 1.0]))
        tensor([-0.1587,  0.8413])

    Source: D. Hendrycks & K. Gimpel, "Gaussian error linear units", 2016, section 2.
    """

    def __init__(self, approximate: str = "none"):
        super().__init__()
        require_choice("GELU", "approximate", approximate, ("none", "tanh"))
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """Apply `hodiff.functions.gelu`."""
        return gelu(x, self.approximate)

    def extra_repr(self) -> str:
        """Return the approximation."""
        return f"approximate={self.approximate!r}"


class Mish(nn.Module):
    r"""$x \tanh(\log(1 + e^x))$.

    Example:
        >>> import torch
        >>> Mish()(torch.tensor([-1.0, 1.0]))
        tensor([-0.3034,  0.8651])

    Source: D. Misra, "Mish: a self regularized non-monotonic activation function", 2019, equation 1.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply `hodiff.functions.mish`."""
        return mish(x)


class Softplus(nn.Module):
    r"""$\frac{1}{\beta} \log(1 + e^{\beta x})$ with a constant or learned β.

    Args:
        beta: The sharpness β, or its initial value; a tensor is broadcast with the input.
        threshold: Bound on βx above which the function is x; None for no bound.
        learned: Whether β is a parameter. If not, it is a constant, and a tensor becomes a buffer.

    Raises:
        InputError: If `beta` is neither a number nor a floating-point tensor.

    Example:
        >>> import torch
        >>> Softplus()(torch.tensor([-1.0, 1.0]))
        tensor([0.3133, 1.3133])

    Source: C. Dugas et al., "Incorporating second-order functional knowledge for better option pricing", 2001.
    """

    beta: Tensor | float

    def __init__(self, beta: Tensor | float = 1.0, threshold: float | None = None, learned: bool = False):
        super().__init__()
        require_number_or_floating("Softplus", beta=beta)
        require_bool("Softplus", "learned", learned)
        self.threshold = threshold
        self.learned = learned
        if learned:
            self.beta = _parameter(beta)
        elif isinstance(beta, Tensor):
            self.register_buffer("beta", beta.detach().clone())
        else:
            self.beta = beta

    def forward(self, x: Tensor) -> Tensor:
        """Apply `hodiff.functions.softplus`."""
        return softplus(x, self.beta, self.threshold)

    def extra_repr(self) -> str:
        """Return the value of β, or its shape, and the threshold."""
        return f"beta={_described(self.beta)}, threshold={self.threshold}, learned={self.learned}"


class LogSigmoid(nn.Module):
    r"""$\log \sigma(x)$.

    Example:
        >>> import torch
        >>> LogSigmoid()(torch.tensor([-1.0, 1.0]))
        tensor([-1.3133, -0.3133])

    Source: M. Mächler, "Accurately computing log(1 - exp(-|a|))", 2012, equation 10.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply `hodiff.functions.log_sigmoid`."""
        return log_sigmoid(x)


def _parameter(value: Tensor | float) -> nn.Parameter:
    if isinstance(value, Tensor):
        return nn.Parameter(value.detach().clone())
    return nn.Parameter(torch.tensor(float(value), dtype=torch.get_default_dtype()))


def _described(value: Tensor | float) -> str:
    if isinstance(value, Tensor):
        return str(tuple(value.shape)) if value.dim() else f"{value.item():.4g}"
    return str(value)
