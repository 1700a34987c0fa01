"""Matrix-free estimators: traces, diagonals, eigenvalues, spectra, determinants and linear systems from products."""

from hodiff.errors import ConvergenceError as ConvergenceError
from hodiff.estimators.checkpoints import Checkpoint as Checkpoint
from hodiff.estimators.results import DiagonalEstimate as DiagonalEstimate
from hodiff.estimators.results import Estimate as Estimate
from hodiff.estimators.spectra.condition_number import ConditionNumber as ConditionNumber
from hodiff.estimators.spectra.condition_number import condition_number as condition_number
from hodiff.estimators.spectra.eigsh import Eigenpairs as Eigenpairs
from hodiff.estimators.spectra.eigsh import eigsh as eigsh
from hodiff.estimators.spectra.logdet import effective_dimension as effective_dimension
from hodiff.estimators.spectra.logdet import logdet as logdet
from hodiff.estimators.spectra.schatten_norm import schatten_norm as schatten_norm
from hodiff.estimators.spectra.sharpness import Sharpness as Sharpness
from hodiff.estimators.spectra.sharpness import sharpness as sharpness
from hodiff.estimators.spectra.spectral_density import SpectralDensity as SpectralDensity
from hodiff.estimators.spectra.spectral_density import spectral_density as spectral_density
from hodiff.estimators.spectra.trace_of import trace_of as trace_of
from hodiff.estimators.systems.preconditioners import NystromPreconditioner as NystromPreconditioner
from hodiff.estimators.systems.preconditioners import jacobi_preconditioner as jacobi_preconditioner
from hodiff.estimators.systems.preconditioners import nystrom_preconditioner as nystrom_preconditioner
from hodiff.estimators.systems.solve import Solution as Solution
from hodiff.estimators.systems.solve import solve as solve
from hodiff.estimators.traces.diagonal import diagonal as diagonal
from hodiff.estimators.traces.hutchinson import frobenius_norm as frobenius_norm
from hodiff.estimators.traces.trace import trace as trace
