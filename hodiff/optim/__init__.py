"""Minimisers, least squares and optimizers for training loops, with exact derivatives of any order."""

from hodiff.optim.least_squares import least_squares as least_squares
from hodiff.optim.minimize import minimize as minimize
from hodiff.optim.stochastic import EKFAC as EKFAC
from hodiff.optim.stochastic import KFAC as KFAC
from hodiff.optim.stochastic import LBFGS as LBFGS
from hodiff.optim.stochastic import SAM as SAM
from hodiff.optim.stochastic import SOAP as SOAP
from hodiff.optim.stochastic import AdaHessian as AdaHessian
from hodiff.optim.stochastic import HessianFree as HessianFree
from hodiff.optim.stochastic import LayerwiseGaussNewton as LayerwiseGaussNewton
from hodiff.optim.stochastic import NewtonCG as NewtonCG
from hodiff.optim.stochastic import Shampoo as Shampoo
from hodiff.optim.stochastic import SophiaG as SophiaG
from hodiff.optim.stochastic import SophiaH as SophiaH
