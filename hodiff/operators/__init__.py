"""Linear operators at a point: Hessian, Gauss-Newton, Fisher and Jacobian, and their algebra."""

from hodiff.operators.algebra import IdentityOperator as IdentityOperator
from hodiff.operators.algebra import InverseOperator as InverseOperator
from hodiff.operators.base import LinearOperator as LinearOperator
from hodiff.operators.fisher import EmpiricalFisherOperator as EmpiricalFisherOperator
from hodiff.operators.fisher import FisherOperator as FisherOperator
from hodiff.operators.gauss_newton import GaussNewtonOperator as GaussNewtonOperator
from hodiff.operators.hessian import HessianOperator as HessianOperator
from hodiff.operators.jacobian import JacobianOperator as JacobianOperator
from hodiff.operators.kfac import EKFACOperator as EKFACOperator
from hodiff.operators.kfac import KFACOperator as KFACOperator
from hodiff.operators.likelihoods import Likelihood as Likelihood
from hodiff.operators.matrices import DiagonalOperator as DiagonalOperator
from hodiff.operators.matrices import MatrixOperator as MatrixOperator
from hodiff.operators.spaces import Space as Space
