"""Decorators that give a function your own derivative rule; every other derivative follows from it."""

from hodiff.authoring.custom_jvp import custom_jvp as custom_jvp
from hodiff.authoring.custom_vjp import custom_vjp as custom_vjp
from hodiff.authoring.elementwise import elementwise as elementwise
from hodiff.authoring.from_custom_op import from_custom_op as from_custom_op
from hodiff.functions.gradients.straight_through import straight_through as straight_through
