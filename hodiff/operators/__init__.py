"""Linear operators at a point: Hessian, Gauss-Newton, Fisher and Jacobian, and their algebra."""

from hodiff.operators.block_diagonal import BlockDiagonalOperator as BlockDiagonalOperator
from hodiff.operators.gauss_newton.fisher import EmpiricalFisherOperator as EmpiricalFisherOperator
from hodiff.operators.gauss_newton.fisher import FisherOperator as FisherOperator
from hodiff.operators.gauss_newton.gauss_newton import GaussNewtonOperator as GaussNewtonOperator
from hodiff.operators.gauss_newton.gram import GramOperator as GramOperator
from hodiff.operators.kfac import EKFACOperator as EKFACOperator
from hodiff.operators.kfac import KFACOperator as KFACOperator
from hodiff.operators.kfac import KFOCOperator as KFOCOperator
from hodiff.operators.kfac import ShampooOperator as ShampooOperator
from hodiff.operators.linear.algebra import IdentityOperator as IdentityOperator
from hodiff.operators.linear.inverse import InverseOperator as InverseOperator
from hodiff.operators.linear.linear_operator import LinearOperator as LinearOperator
from hodiff.operators.linear.matrices import DiagonalOperator as DiagonalOperator
from hodiff.operators.linear.matrices import MatrixOperator as MatrixOperator
from hodiff.operators.linear.spaces import Space as Space
from hodiff.operators.linearized.hessian import HessianOperator as HessianOperator
from hodiff.operators.linearized.jacobian import JacobianOperator as JacobianOperator
from hodiff.operators.linearized.likelihoods import Likelihood as Likelihood
from hodiff.operators.low_rank import LowRankPlusDiagonalOperator as LowRankPlusDiagonalOperator
from hodiff.operators.low_rank import low_rank_approximation as low_rank_approximation
