"""Plots of derivatives and their graphs, spectra, Hessians, sparsity and loss landscapes."""

from hodiff.plot.derivatives import derivatives as derivatives
from hodiff.plot.derivatives_by_route import routes as routes
from hodiff.plot.gradient_flow import gradient_flow as gradient_flow
from hodiff.plot.graph import COLOURS as COLOURS
from hodiff.plot.graph import RAISES as RAISES
from hodiff.plot.graph import graph as graph
from hodiff.plot.hessian_plot import hessian as hessian
from hodiff.plot.landscape import loss_landscape as loss_landscape
from hodiff.plot.sparsity import sparsity as sparsity
from hodiff.plot.spectra import eigenvalues as eigenvalues
from hodiff.plot.spectra import spectral_density as spectral_density
from hodiff.plot.straight_through import straight_through as straight_through
from hodiff.plot.typed_rules import typed_function as typed_function
