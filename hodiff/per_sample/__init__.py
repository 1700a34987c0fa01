"""Gradients of the examples of a batch or data set: the gradients, their norms, moments, and the noise scale."""

from hodiff.per_sample.statistics import GradientMoments as GradientMoments
from hodiff.per_sample.statistics import NoiseScale as NoiseScale
from hodiff.per_sample.statistics import gradients as gradients
from hodiff.per_sample.statistics import moments as moments
from hodiff.per_sample.statistics import noise_scale as noise_scale
from hodiff.per_sample.statistics import norms as norms
