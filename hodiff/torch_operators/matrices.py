"""Functions of whole matrices, which may be batched."""

from hodiff.torch_operators.operator import Kind, operators

MATRICES = operators(
    Kind.MATRIX,
    """
    linalg.det=det linalg.slogdet=slogdet linalg.inv=inverse linalg.inv_ex linalg.pinv
    linalg.solve_ex linalg.solve_triangular triangular_solve
    cholesky linalg.cholesky_ex cholesky_inverse cholesky_solve
    linalg.lu linalg.lu_factor_ex linalg.lu_solve lu_unpack linalg.ldl_factor_ex linalg.qr geqrf
    linalg.eig linalg.eigvals linalg.eigh linalg.svd linalg.matrix_exp=matrix_exp linalg.matrix_power=matrix_power
    """,
)
