"""Upstream reports of wrong or missing derivatives, and the torch functions that they concern."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Thread:
    """An issue or pull request.

    Attributes:
        number: Its number in `repository`.
        functions: Names of the torch functions, as the table of corrections has them.
        repository: The repository on GitHub.
    """

    number: int
    functions: tuple[str, ...]
    repository: str = "pytorch/pytorch"

    @property
    def link(self) -> str:
        """Markdown link to the thread."""
        name = "" if self.repository == "pytorch/pytorch" else self.repository.partition("/")[2]
        return f"[{name}#{self.number}](https://github.com/{self.repository}/issues/{self.number})"


def _threads(table: str) -> tuple[Thread, ...]:
    rows = [line.split() for line in table.strip().splitlines()]
    return tuple(Thread(int(number), tuple(f"torch.{each}" for each in functions)) for number, *functions in rows)


# The thread that collects reports of wrong forward and higher derivatives.
COLLECTION = 198017

THREADS = (
    *_threads("""
    2691 lstm gru rnn_tanh
    5261 lstm gru rnn_tanh
    9229 lstm
    20449 lstm
    25315 lstm gru rnn_tanh
    26660 lstm gru
    34704 grid_sampler_2d
    53989 sinc
    67763 special.gammainc
    70108 nn.functional.ctc_loss
    76522 clamp
    80025 special.gammainc special.gammaincc
    80206 nn.functional.soft_margin_loss
    80204 nn.functional.max_unpool1d
    80803 nn.functional.hardshrink
    80804 renorm
    80827 nn.functional.max_unpool1d
    83510 functional.cdist
    106789 prod
    115785 atan2
    116350 nn.functional.scaled_dot_product_attention
    117582 grid_sampler_2d
    128971 nn.functional.scaled_dot_product_attention
    130782 special.gammainc special.gammaincc
    134901 lstm gru rnn_tanh
    144810 nn.attention.flex_attention.flex_attention
    146299 Tensor.index_put_ Tensor.put_ scatter
    154226 nn.functional.scaled_dot_product_attention
    162346 nn.functional.affine_grid
    169224 nn.attention.flex_attention.flex_attention
    169646 nn.attention.flex_attention.flex_attention
    174355 gru
    174376 gru
    175754 nn.functional.layer_norm
    176218 nn.functional.layer_norm
    176234 nn.functional.layer_norm
    177487 grid_sampler_2d
    178664 special.gammainc special.gammaincc
    184572 clamp
    184574 clamp
    185831 clamp
    185927 clamp
    186256 nn.functional.batch_norm
    186556 ldexp
    187460 ldexp
    188843 scatter_add scatter_reduce
    188901 functional.cdist
    189872 special.bessel_j0 special.modified_bessel_i0
    191142 clamp
    191787 norm_except_dim
    192406 expm1
    192521 linalg.det
    192540 linalg.det linalg.slogdet linalg.solve
    192723 nn.functional.mse_loss nn.functional.smooth_l1_loss
    193012 prod
    193040 atan2
    195280 grid_sampler_2d
    195527 sigmoid tanh
    195529 nn.functional.binary_cross_entropy_with_logits
    195530 nn.functional.logsigmoid
    195679 nn.functional.logsigmoid
    195680 log_softmax
    195681 sigmoid
    195685 tanh
    196680 ldexp
    196682 cholesky_inverse
    196694 cholesky_solve
    196695 linalg.solve
    196696 linalg.det
    196697 linalg.slogdet
    196698 linalg.householder_product
    196699 nn.functional.batch_norm
    196700 nn.functional.layer_norm
    196701 cumprod
    196702 scatter_reduce
    196703 sinc
    196704 logaddexp
    196705 logcumsumexp
    196707 triangular_solve
    196964 nn.attention.flex_attention.flex_attention
    197010 cholesky_inverse
    197867 autograd.Function.apply
    """),
    Thread(1097, ("torch.linalg.vector_norm",), "pytorch/functorch"),
)
