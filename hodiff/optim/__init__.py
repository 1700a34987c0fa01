"""Optimizers for training loops, with exact second derivatives, in the manner of `torch.optim`."""

from hodiff.optim.adahessian import AdaHessian as AdaHessian
from hodiff.optim.kfac.kfac import EKFAC as EKFAC
from hodiff.optim.kfac.kfac import KFAC as KFAC
from hodiff.optim.kronecker.kl_shampoo import KLSOAP as KLSOAP
from hodiff.optim.kronecker.kl_shampoo import KLShampoo as KLShampoo
from hodiff.optim.kronecker.shampoo import Shampoo as Shampoo
from hodiff.optim.kronecker.soap import SOAP as SOAP
from hodiff.optim.lbfgs import LBFGS as LBFGS
from hodiff.optim.muon import Muon as Muon
from hodiff.optim.sam import SAM as SAM
from hodiff.optim.solvers.engd import ENGD as ENGD
from hodiff.optim.solvers.hessian_free import HessianFree as HessianFree
from hodiff.optim.solvers.hessian_free import NewtonCG as NewtonCG
from hodiff.optim.solvers.layerwise_gauss_newton import LayerwiseGaussNewton as LayerwiseGaussNewton
from hodiff.optim.solvers.pinn_kfac import PINNKFAC as PINNKFAC
from hodiff.optim.solvers.spring import SPRING as SPRING
from hodiff.optim.sophia import SophiaG as SophiaG
from hodiff.optim.sophia import SophiaH as SophiaH
from hodiff.optim.ssbroyden import SSBroyden as SSBroyden
from hodiff.optimize import least_squares as least_squares
from hodiff.optimize import minimize as minimize
