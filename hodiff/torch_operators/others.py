"""Operators that reduce dimensions, functions of matrices, and others with several names."""

from hodiff.torch_operators.operator import Kind, Pieces, operators

_REDUCTIONS = """
    nansum nanmean prod var std var_mean std_mean norm linalg.vector_norm logsumexp=special.logsumexp
    aminmax mode
"""
_SELECTIONS = "max min amax amin median nanmedian kthvalue"
_SELECTIONS_OF_SEVERAL = """
    sort msort topk cummax cummin quantile nanquantile
    max_pool1d max_pool2d max_pool3d nn.adaptive_max_pool1d nn.adaptive_max_pool2d nn.adaptive_max_pool3d
"""
_MATRICES = """
    linalg.det=det linalg.slogdet=slogdet linalg.inv=inverse linalg.inv_ex linalg.pinv
    linalg.solve_ex linalg.solve_triangular triangular_solve
    cholesky linalg.cholesky_ex cholesky_inverse cholesky_solve
    linalg.lu linalg.lu_factor_ex linalg.lu_solve lu_unpack linalg.ldl_factor_ex linalg.qr geqrf
    linalg.eig linalg.eigvals linalg.eigh linalg.svd linalg.matrix_exp=matrix_exp linalg.matrix_power=matrix_power
"""
_OTHERS = """
    setitem=__setitem__ matmul=__matmul__=linalg.matmul rmatmul=__rmatmul__ outer=ger trapezoid=trapz
    softmax=special.softmax log_softmax=special.log_softmax linalg.householder_product=orgqr
"""

OTHERS = (
    *operators(Kind.REDUCES, "sum mean", linear=True),
    *operators(Kind.REDUCES, _REDUCTIONS),
    *operators(Kind.REDUCES, _SELECTIONS, pieces=Pieces.ELEMENTS),
    *operators(Kind.OTHER, _SELECTIONS_OF_SEVERAL, pieces=Pieces.ELEMENTS),
    *operators(Kind.OTHER, "prelu nn.prelu", pieces=Pieces.ARGUMENTS),
    *operators(Kind.MATRIX, _MATRICES),
    *operators(Kind.OTHER, _OTHERS),
)
