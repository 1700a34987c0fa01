"""Gradients of the examples of a batch or data set: the gradients, their norms, moments, and the noise scale."""

from hodiff.per_sample.gradients import gradients as gradients
from hodiff.per_sample.gradients import norms as norms
from hodiff.per_sample.moments import GradientMoments as GradientMoments
from hodiff.per_sample.moments import NoiseScale as NoiseScale
from hodiff.per_sample.moments import moments as moments
from hodiff.per_sample.moments import noise_scale as noise_scale
