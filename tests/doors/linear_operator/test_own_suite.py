"""linear_operator's own tests of a subclass, run on operators of hodiff."""

import unittest

import pytest
import torch
from linear_operator.test.linear_operator_test_case import LinearOperatorTestCase

import hodiff
from hodiff.doors.linear_operator import to_linear_operator

REFUSED = ("test_double", "test_float", "test_half", "test_to_double")


def form(x, M):
    return x @ (M @ x) / 2


class Form:
    """A Hessian (M + M^T) / 2, whose matrix M requires a gradient."""

    seed = 0
    should_test_sample = True

    def matrix(self):
        M = torch.randn(5, 5, generator=torch.Generator().manual_seed(1))
        return M @ M.T + torch.eye(5)

    def create_linear_op(self):
        return to_linear_operator(hodiff.HessianOperator(form, torch.zeros(5), self.matrix().requires_grad_()))

    def evaluate_linear_op(self, operator):
        (M,) = operator.representation()
        return (M + M.mT) / 2

    def test_bilinear_derivative(self):
        """The suite's oracle differentiates products, which are constants here; test_gradients has another one."""


# Conversions of an operator with a gradient are refused by name.
for name in REFUSED:

    def refused(self):
        with pytest.raises(hodiff.InputError, match="to: expected a constant"):
            self.create_linear_op().double()

    setattr(Form, name, refused)


class TestForm(Form, LinearOperatorTestCase, unittest.TestCase):
    pass


class TestBatch(Form, LinearOperatorTestCase, unittest.TestCase):
    def create_linear_op(self):
        return super().create_linear_op().expand(3, 5, 5)

    def evaluate_linear_op(self, operator):
        return super().evaluate_linear_op(operator).expand(3, 5, 5)
