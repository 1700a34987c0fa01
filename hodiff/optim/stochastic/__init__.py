"""Optimizers for training loops, in the form of `torch.optim`, with curvature computed by hodiff."""

from hodiff.optim.stochastic.adahessian import AdaHessian as AdaHessian
from hodiff.optim.stochastic.kfac.kfac import EKFAC as EKFAC
from hodiff.optim.stochastic.kfac.kfac import KFAC as KFAC
from hodiff.optim.stochastic.kronecker.shampoo import Shampoo as Shampoo
from hodiff.optim.stochastic.kronecker.soap import SOAP as SOAP
from hodiff.optim.stochastic.lbfgs import LBFGS as LBFGS
from hodiff.optim.stochastic.sam import SAM as SAM
from hodiff.optim.stochastic.solvers.hessian_free import HessianFree as HessianFree
from hodiff.optim.stochastic.solvers.hessian_free import NewtonCG as NewtonCG
from hodiff.optim.stochastic.solvers.layerwise_gauss_newton import LayerwiseGaussNewton as LayerwiseGaussNewton
from hodiff.optim.stochastic.sophia import SophiaG as SophiaG
from hodiff.optim.stochastic.sophia import SophiaH as SophiaH
