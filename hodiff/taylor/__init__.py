"""Taylor mode: truncated power series through a function, of any order, in one pass."""

from hodiff.taylor.differential import RandomisedEstimate as RandomisedEstimate
from hodiff.taylor.differential import bilaplacian as bilaplacian
from hodiff.taylor.differential import derivative_tensor as derivative_tensor
from hodiff.taylor.differential import divergence as divergence
from hodiff.taylor.differential import laplacian as laplacian
from hodiff.taylor.differential import partial as partial
from hodiff.taylor.differential import pure_second_derivatives as pure_second_derivatives
from hodiff.taylor.differential import value_grad_laplacian as value_grad_laplacian
from hodiff.taylor.directional import directional_derivatives as directional_derivatives
from hodiff.taylor.jet import Explanation as Explanation
from hodiff.taylor.jet import explain as explain
from hodiff.taylor.jet import jet as jet
from hodiff.taylor.ode import OdeSolution as OdeSolution
from hodiff.taylor.ode import ode_coefficients as ode_coefficients
from hodiff.taylor.ode import odeint_taylor as odeint_taylor
from hodiff.taylor.registry import RULES as RULES
from hodiff.taylor.registry import register as register
