"""Differential operators in Taylor mode: sums of derivatives of one order, or single ones; exact or randomised."""

from hodiff.taylor.differential.bilaplacian import bilaplacian as bilaplacian
from hodiff.taylor.differential.divergence import divergence as divergence
from hodiff.taylor.differential.laplacian import laplacian as laplacian
from hodiff.taylor.differential.laplacian import value_grad_laplacian as value_grad_laplacian
from hodiff.taylor.differential.partials import partial as partial
from hodiff.taylor.differential.partials import pure_second_derivatives as pure_second_derivatives
from hodiff.taylor.differential.random_directions import RandomisedEstimate as RandomisedEstimate
from hodiff.taylor.differential.symmetric_tensors import derivative_tensor as derivative_tensor
