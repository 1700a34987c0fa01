"""What operators are for: traces, diagonals, eigenvalues, spectra, determinants and linear systems from products."""

from hodiff.errors import ConvergenceError as ConvergenceError
from hodiff.estimators.condition_number import ConditionNumber as ConditionNumber
from hodiff.estimators.condition_number import condition_number as condition_number
from hodiff.estimators.diagonal import diagonal as diagonal
from hodiff.estimators.effective_dimension import effective_dimension as effective_dimension
from hodiff.estimators.eigsh import Eigenpairs as Eigenpairs
from hodiff.estimators.eigsh import eigsh as eigsh
from hodiff.estimators.frobenius_norm import frobenius_norm as frobenius_norm
from hodiff.estimators.logdet import logdet as logdet
from hodiff.estimators.preconditioners import NystromPreconditioner as NystromPreconditioner
from hodiff.estimators.preconditioners import jacobi_preconditioner as jacobi_preconditioner
from hodiff.estimators.preconditioners import nystrom_preconditioner as nystrom_preconditioner
from hodiff.estimators.results import DiagonalEstimate as DiagonalEstimate
from hodiff.estimators.results import Estimate as Estimate
from hodiff.estimators.sharpness import Sharpness as Sharpness
from hodiff.estimators.sharpness import sharpness as sharpness
from hodiff.estimators.solve import Solution as Solution
from hodiff.estimators.solve import solve as solve
from hodiff.estimators.spectral_density import SpectralDensity as SpectralDensity
from hodiff.estimators.spectral_density import spectral_density as spectral_density
from hodiff.estimators.trace import trace as trace
