"""The table of operators agrees with torch: with its names, tags and views, and with values and derivatives."""

import itertools
from collections import Counter
from functools import cache

import pytest
import torch
from torch.func import jvp
from torch.utils._pytree import tree_leaves

from hodiff.audit.samples import database, samples
from hodiff.torch_internals.operators import operator_named
from hodiff.torch_operators.operator import Kind, Pieces
from hodiff.torch_operators.table import OPERATORS, forms_of, functions_named, short_names

# Rules for methods with double underscores, whose plain names torch does not have, and a name that torch 2.13 removed.
NOT_IN_TORCH = {"getitem", "setitem", "pos", "rdiv", "rpow", "rmatmul", "has_names"}
# Operators that torch tags otherwise: `max(a, b)` is an overload of a reduction.
OTHERWISE_TAGGED = {"max", "min"}
# Views of torch's that are copies for some arguments.
MAY_COPY = {
    *("pos", "contiguous", "to", "cpu", "resolve_conj", "resolve_neg"),
    *("reshape", "reshape_as", "flatten", "ravel", "getitem", "nn.unfold"),
}
# Samples that are random, uninitialized, of integers or complex, or that `jvp` cannot take; torch's __rpow__ is wrong.
NOT_PROBED = {
    *("dropout", "nn.dropout", "native_dropout", "bernoulli", "rand_like", "randn_like", "randint_like"),
    *("empty_like", "new_empty", "new_empty_strided", "nn.one_hot", "bincount", "imag", "view_as_real"),
    *("tensor_split", "rpow"),
}


def overloads(name):
    packet = operator_named(name)
    return [] if packet is None else [getattr(packet, each) for each in packet.overloads()]


def test_names_exist_in_torch_and_belong_to_one_operator():
    uses = Counter(name for each in OPERATORS for name in (each.name, *each.aliases))
    assert {name for name, count in uses.items() if count > 1} == set()
    operators = {name for name in uses if name.startswith("aten.") and overloads(name.removeprefix("aten."))}
    functions = {
        name for name in set(uses) - operators if any(functions_named(name)) or any(functions_named(f"{name}_"))
    }
    assert set(uses) - operators - functions <= NOT_IN_TORCH


def test_aliases_compute_the_same():
    x = torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 2 + 0.2
    compared = 0
    for operator in OPERATORS:
        values = []
        for function in forms_of(operator.name) if operator.aliases else ():
            try:
                values.append(function(x))
            except (TypeError, RuntimeError):  # it takes more arguments
                break
        compared += len(values) > 1
        for value in values[1:]:
            torch.testing.assert_close(value, values[0], rtol=0, atol=0, equal_nan=True)
    assert compared > 25


def test_kinds_agree_with_torchs_tags():
    for kind in Kind:
        for name in short_names(kind) - OTHERWISE_TAGGED:
            tags = {tag for each in overloads(name) for tag in each.tags}
            assert torch.Tag.pointwise not in tags or kind in (Kind.POINTWISE, Kind.STEP), name
            assert getattr(torch.Tag, "reduction", None) not in tags or kind in (Kind.REDUCES, Kind.STEP), name


def test_views_are_those_of_torch():
    for operator in OPERATORS:
        if operator.kind is not Kind.STEP and operator.name not in MAY_COPY and "unsafe" not in operator.name:
            views = {each.is_view for name in operator.short_names for each in overloads(name)}
            assert not views or operator.view == (True in views), operator.name


@cache
def entries():
    return database()


def probes(kind):
    """Yield operators of a kind with samples of torch's database: a function, and where it is called."""
    for operator in OPERATORS:
        names = [each.replace("nn.", "nn.functional.") for each in (operator.name, *operator.aliases)]
        if operator.kind is kind and operator.name not in NOT_PROBED:
            for name, entry in entries().items():
                if any(name == each or name.startswith(f"{each}.") for each in names):
                    for sample in samples(name, entry, 3):
                        yield operator, sample.function(correct=False), sample.point


def changes(like, seed):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.rand(x.shape, dtype=x.dtype, generator=generator) / 8 for x in like)


def moved(point, steps):
    return tuple(x + step for x, step in zip(point, steps, strict=True))


def differences(f, point, steps):
    return [after - before for before, after in zip(f(*point), f(*moved(point, steps)), strict=True)]


def floating(outputs):
    return [y for y in outputs if y.is_floating_point() or y.is_complex()]


def close(found, expected):
    for a, b in zip(floating(found), floating(expected), strict=True):
        eps = torch.finfo(a.dtype).eps
        torch.testing.assert_close(a, b.to(a.dtype), rtol=8 * eps**0.9, atol=8 * eps**0.9, equal_nan=True)


def tangents_of(f, point, steps):
    """Return the derivatives along the steps, zeros where torch has none."""
    try:
        return jvp(f, point, tuple(steps))[1]
    except (NotImplementedError, RuntimeError) as error:
        if "forward AD" not in str(error) and "non-empty output" not in str(error):
            raise
        return [torch.zeros_like(y) for y in f(*point)]


def is_linear(operator, f, point):
    """Differences do not depend on where they start, and are torch's derivatives."""
    count = 1 if operator.linear_in == {"input"} else len(point)

    def g(*args):
        return f(*args, *point[count:])

    start, steps = point[:count], changes(point[:count], 0)
    found = differences(g, start, steps)
    close(found, differences(g, moved(start, changes(start, 1)), steps))
    close(found, jvp(g, start, steps)[1])


def is_pointwise(operator, f, point):
    """One element of an argument changes results, and has derivatives, at its own place alone."""
    for i, place in itertools.product(range(len(point)), (0, -1)):
        if point[i].numel():
            steps = [torch.zeros_like(each) for each in point]
            steps[i].view(-1)[place] = 1e-3
            before, after, tangents = f(*point), f(*moved(point, steps)), tangents_of(f, point, steps)
            for a, b, tangent in zip(before, after, tangents, strict=True):
                elsewhere = (steps[i] == 0).expand(a.shape)
                torch.testing.assert_close(a[elsewhere], b[elsewhere], rtol=0, atol=0, equal_nan=True)
                assert not tangent[elsewhere].any()


def moves(operator, f, point):
    """An element of a result is an element of an argument, with derivative 1, or a constant."""
    outputs, tangents = jvp(f, point, tuple(map(torch.ones_like, point)))
    elements = torch.cat([x.reshape(-1) for x in point])
    for y, tangent, step in zip(outputs, tangents, differences(f, point, changes(point, 0)), strict=True):
        assert set(tangent.unique().tolist()) <= {0, 1}
        assert torch.isin(y[tangent == 1], elements).all()
        assert not step[tangent == 0].any()


def is_of_matrices(operator, f, point):
    """A matrix of a batch does not change the results of another, nor their derivatives."""
    steps = [torch.zeros_like(x) for x in point]
    if point[0].dim() > 2 and len(point[0]) > 1:
        steps[0][0] = 1e-3 * torch.eye(*point[0].shape[-2:])
        before, after, tangents = f(*point), f(*moved(point, steps)), tangents_of(f, point, steps)
        close([y[1:] for y in before], [y[1:] for y in after])
        assert not any(y[1:].any() for y in tangents)


def is_a_step(operator, f, point):
    """Small changes do not change results, and derivatives are 0."""
    close(f(*point), f(*moved(point, [1e-12 * step for step in changes(point, 0)])))
    assert not any(each.any() for each in tangents_of(f, point, changes(point, 0)))


@pytest.mark.parametrize("pieces", [Pieces.LINES, Pieces.CURVES])
def test_pieces_of_one_tensor_are_lines_or_have_a_curve(pieces):
    x = torch.linspace(-8, 8, 2001, dtype=torch.float64)
    arguments = {"clamp_min": (0.5,), "clamp_max": (0.5,), "threshold": (0.5, 1.0), "nn.threshold": (0.5, 1.0)}
    found = [each for each in OPERATORS if each.pieces is pieces]
    for operator in found:
        f = forms_of(operator.name)[0]
        given = (-0.5, 0.5) if operator.name == "clamp" else arguments.get(operator.name, ())
        bends = f(x, *given).diff(n=2).abs() > 1e-9
        # Two second differences contain each of the two bounds that a function may have.
        assert (1 <= bends.sum() <= 4) if pieces is Pieces.LINES else bends.sum() > 100, operator.name
    assert len(found) >= 5


def test_selections_return_elements():
    x = torch.tensor([2.0, 5.0, 1.0, 4.0, 3.0], dtype=torch.float64)
    arguments = {
        "kthvalue": (2,),
        "topk": (2,),
        "quantile": (0.5,),
        "nanquantile": (0.5,),
        "cummax": (0,),
        "cummin": (0,),
    }
    found = [each for each in OPERATORS if each.pieces is Pieces.ELEMENTS]
    for operator in found:
        f, given, size = forms_of(operator.name)[0], arguments.get(operator.name, ()), (5,)
        if "pool" in operator.name:
            given, size = (2,), (*[2] * int(operator.name[-2]), 5)
        for result in tree_leaves(f(x.expand(size), *given)):
            assert not result.is_floating_point() or torch.isin(result, x).all(), operator.name
    assert len(found) >= 15


PROPERTIES = {
    Kind.POINTWISE: (is_pointwise, 100),
    Kind.MOVES: (moves, 80),
    Kind.LINEAR: (is_linear, 35),
    Kind.MATRIX: (is_of_matrices, 20),
    Kind.STEP: (is_a_step, 20),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", PROPERTIES, ids=lambda each: each.name)
def test_kinds_agree_with_values_and_derivatives(kind):
    check, least = PROPERTIES[kind]
    seen = set()
    for operator, f, point in probes(kind):
        check(operator, f, point)
        if operator.linear_in:
            is_linear(operator, f, point)
        seen.add(operator.name)
    assert len(seen) >= least
