"""Tests of functions that run eagerly inside compiled code, since dynamo does not trace them."""

import gc
import weakref

import pytest
import torch

from hodiff.rules.any_order import outside_graphs


def eager_product_with(factor):
    return outside_graphs(lambda x: factor * x)


@pytest.mark.slow
@pytest.mark.parametrize("called_before", [(), (0, 2), (1,)])
def test_each_wrapper_breaks_the_graph_with_its_own_function(called_before):
    """Wrappers share their code, so dynamo may reuse the frame compiled for another wrapper."""
    functions = [eager_product_with(factor) for factor in (2.0, 3.0, 5.0)]
    x = torch.ones(2)
    for i in called_before:
        functions[i](x)
    for function, factor in zip(functions, (2.0, 3.0, 5.0), strict=True):
        found = torch.compile(lambda x, function=function: 7 * function(x + 1), backend="eager")(x)
        assert found.tolist() == [14 * factor] * 2


@pytest.mark.slow
def test_wrapper_keeps_nothing_alive():
    torch.compile(eager_product_with(2.0), backend="eager")(torch.ones(2))
    factor = torch.ones(3)
    seen = weakref.ref(factor)
    eager_product_with(factor)(factor)
    del factor
    gc.collect()
    assert seen() is None
