"""Operators that reduce dimensions."""

from hodiff.torch_operators.operator import Kind, operators

REDUCTIONS = (
    *operators(Kind.REDUCES, "sum mean", linear=True),
    *operators(
        Kind.REDUCES,
        """
        nansum nanmean prod var std var_mean std_mean norm linalg.vector_norm logsumexp=special.logsumexp
        max min amax amin aminmax median nanmedian mode kthvalue
        """,
    ),
)
