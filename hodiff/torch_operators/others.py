"""Other operators with several names."""

from hodiff.torch_operators.operator import Kind, operators

OTHERS = operators(
    Kind.OTHER,
    """
    setitem=__setitem__ matmul=__matmul__=linalg.matmul rmatmul=__rmatmul__ outer=ger trapezoid=trapz
    softmax=special.softmax log_softmax=special.log_softmax linalg.householder_product=orgqr
    igamma=special.gammainc igammac=special.gammaincc mvlgamma=special.multigammaln
    """,
)
