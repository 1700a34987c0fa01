"""Losses as modules."""

from __future__ import annotations

from torch import Tensor, nn

from hodiff.functions.losses.losses import cross_entropy, hinge, huber


class CrossEntropyLoss(nn.Module):
    """Cross-entropy between logits and classes; see `hodiff.functions.cross_entropy`, whose arguments it takes.

    Args:
        weight: Weight of each class (C,), stored as a buffer.
        ignore_index: Samples of this class do not count.
        reduction: "mean", "sum" or "none".
        label_smoothing: Share of the uniform distribution in the target.
        chunk_size: Number of samples whose probabilities exist at once.

    Example:
        >>> import torch
        >>> loss = CrossEntropyLoss(label_smoothing=0.1)
        >>> loss(torch.zeros(2, 4), torch.tensor([0, 3]))
        tensor(1.3863)

    Source: as `hodiff.functions.cross_entropy`.
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        chunk_size: int | str | None = "auto",
    ):
        super().__init__()
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.chunk_size = chunk_size

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Compute the loss.

        Args:
            input: Logits (N, C), (C,) or (N, C, d1, ...).
            target: Class indices or probabilities.

        Returns:
            The loss.
        """
        return cross_entropy(
            input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            chunk_size=self.chunk_size,
        )

    def extra_repr(self) -> str:
        """Return the settings."""
        return (
            f"ignore_index={self.ignore_index}, reduction={self.reduction!r}, "
            f"label_smoothing={self.label_smoothing}, chunk_size={self.chunk_size!r}"
        )


class HuberLoss(nn.Module):
    """Huber's loss; see `hodiff.functions.huber`.

    Args:
        delta: Residual at which the loss becomes linear.
        reduction: "mean", "sum" or "none".

    Example:
        >>> import torch
        >>> HuberLoss(delta=2.0)(torch.tensor([1.0]), torch.tensor([4.0]))
        tensor(4.)

    Source: as `hodiff.functions.huber`.
    """

    def __init__(self, delta: float = 1.0, reduction: str = "mean"):
        super().__init__()
        self.delta = delta
        self.reduction = reduction

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Compute the loss.

        Args:
            input: Predictions.
            target: Tensor of the same shape.

        Returns:
            The loss.
        """
        return huber(input, target, self.delta, self.reduction)

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"delta={self.delta}, reduction={self.reduction!r}"


class HingeLoss(nn.Module):
    """Hinge loss; see `hodiff.functions.hinge`.

    Args:
        margin: The margin.
        reduction: "mean", "sum" or "none".

    Example:
        >>> import torch
        >>> HingeLoss()(torch.tensor([0.5, -3.0]), torch.tensor([1, -1]))
        tensor(0.2500)

    Source: as `hodiff.functions.hinge`.
    """

    def __init__(self, margin: float = 1.0, reduction: str = "mean"):
        super().__init__()
        self.margin = margin
        self.reduction = reduction

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Compute the loss.

        Args:
            input: Scores.
            target: Labels -1 and 1.

        Returns:
            The loss.
        """
        return hinge(input, target, self.margin, self.reduction)

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"margin={self.margin}, reduction={self.reduction!r}"
