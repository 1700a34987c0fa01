"""Kronecker-factored approximations of the Fisher and Gauss-Newton matrices, as operators in closed form."""

from hodiff.operators.kfac.ekfac import EKFACOperator as EKFACOperator
from hodiff.operators.kfac.kfac import KFACOperator as KFACOperator
from hodiff.operators.kfac.kfoc import KFOCOperator as KFOCOperator
from hodiff.operators.kfac.shampoo import ShampooOperator as ShampooOperator
