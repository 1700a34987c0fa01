"""Roots, fixed points, minimisers and linear solutions as differentiable functions, with any solver."""

from hodiff.errors import ConvergenceError as ConvergenceError
from hodiff.implicit.box_plane import project_box_plane as project_box_plane
from hodiff.implicit.constrained import equality_argmin as equality_argmin
from hodiff.implicit.constrained import projected_argmin as projected_argmin
from hodiff.implicit.constrained import proximal_argmin as proximal_argmin
from hodiff.implicit.implicit_solutions import argmin as argmin
from hodiff.implicit.implicit_solutions import fixed_point as fixed_point
from hodiff.implicit.implicit_solutions import root as root
from hodiff.implicit.implicit_solutions import stationary as stationary
from hodiff.implicit.iteration import anderson as anderson
from hodiff.implicit.iteration import newton as newton
from hodiff.implicit.iteration import picard as picard
from hodiff.implicit.linear_solve import linear_solve as linear_solve
from hodiff.implicit.ode_solution import odeint as odeint
from hodiff.implicit.scipy_solvers import scipy_minimize as scipy_minimize
from hodiff.implicit.scipy_solvers import scipy_root as scipy_root
from hodiff.implicit.scipy_solvers import torch_optimizer as torch_optimizer
