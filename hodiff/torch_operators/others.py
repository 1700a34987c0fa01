"""Operators that reduce dimensions, functions of matrices, and others with several names."""

from hodiff.torch_operators.operator import Kind, operators

_REDUCTIONS = """
    nansum nanmean prod var std var_mean std_mean norm linalg.vector_norm logsumexp=special.logsumexp
    max min amax amin aminmax median nanmedian mode kthvalue
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
    *operators(Kind.MATRIX, _MATRICES),
    *operators(Kind.OTHER, _OTHERS),
)
