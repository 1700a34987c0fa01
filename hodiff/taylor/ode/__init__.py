"""Ordinary differential equations by Taylor series: the series of a solution, and integration by it."""

from hodiff.taylor.ode.integration import ode_coefficients as ode_coefficients
from hodiff.taylor.ode.integration import odeint_taylor as odeint_taylor
from hodiff.taylor.ode.solution import OdeSolution as OdeSolution
