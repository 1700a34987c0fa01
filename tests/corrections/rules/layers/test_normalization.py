"""Normalizations inside `corrected()`: torch's values, dtypes, running statistics and errors, by all public names."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hodiff

D, S, H, B = torch.float64, torch.float32, torch.float16, torch.bfloat16


def randn(*shape, dtype=D):
    return torch.randn(shape, dtype=dtype)


def statistics(channels=3, dtype=D):
    return [torch.zeros(channels, dtype=dtype), torch.ones(channels, dtype=dtype)]


def with_statistics(function, running, *args, parameters_first=False, **options):
    """Results of the function, and its running statistics after the call."""
    x, *rest = args
    if parameters_first:
        found = function(x, *rest[:2], *running, *rest[2:], **options)
    else:
        found = function(x, *running, *rest, **options)
    found = found if isinstance(found, tuple) else (found,)
    return *found, *(each for each in running if each is not None)


def batch(*args, running=None, **options):
    running = statistics() if running is None else running
    return with_statistics(F.batch_norm, running, *args, **options)


def builtin(function, x, training, *rest, running=None, parameters=True):
    running = statistics() if running is None else running
    weights = (randn(3), randn(3)) if parameters else (None, None)
    return with_statistics(function, running, x, *weights, training, 0.3, 1e-3, *rest, parameters_first=True)


NONE = [None, None]
CALLS = {
    "layer": lambda: F.layer_norm(randn(2, 3), (3,), randn(3), randn(3)),
    "layer, two dimensions": lambda: F.layer_norm(randn(2, 3), [2, 3]),
    "layer, by keyword": lambda: F.layer_norm(input=randn(2, 3), normalized_shape=(3,), eps=0.1),
    "layer, 16 bits": lambda: F.layer_norm(randn(2, 3, dtype=B), (3,), randn(3, dtype=B)),
    "layer, half": lambda: F.layer_norm(randn(2, 3, dtype=H), (3,), randn(3, dtype=H)),
    "layer, 16 bits, wide weight": lambda: F.layer_norm(
        randn(2, 3, dtype=B), (3,), randn(3, dtype=S), randn(3, dtype=S)
    ),
    "layer, empty": lambda: F.layer_norm(randn(0, 3), (3,)),
    "layer, a number": lambda: F.layer_norm(randn(2, 3), 3),
    "layer, another shape": lambda: F.layer_norm(randn(2, 3), (4,)),
    "layer, weight of another shape": lambda: F.layer_norm(randn(2, 3), (3,), randn(4)),
    "layer, weight of another dtype": lambda: F.layer_norm(randn(2, 3), (3,), randn(3, dtype=S)),
    "layer, no shape": lambda: F.layer_norm(randn(2, 3), ()),
    "layer, complex": lambda: F.layer_norm(randn(2, 3).to(torch.complex64), (3,)),
    "layer, integers": lambda: F.layer_norm(torch.ones(2, 3, dtype=torch.long), (3,)),
    "builtin layer": lambda: torch.layer_norm(randn(2, 3), (3,), randn(3), randn(3), 1e-3, False),
    "native layer": lambda: torch.native_layer_norm(randn(2, 3), (3,), randn(3), randn(3), 1e-3),
    "native layer, 16 bits": lambda: torch.native_layer_norm(randn(2, 3, dtype=B), (3,), None, None, 1e-3),
    "native layer, wide weight": lambda: torch.native_layer_norm(
        randn(2, 3, dtype=B), (3,), randn(3, dtype=S), None, 1e-3
    ),
    "batch": lambda: batch(randn(4, 3), randn(3), randn(3), True),
    "batch, images": lambda: batch(randn(2, 3, 4, 4), randn(3), randn(3), True),
    "batch, channels last": lambda: batch(
        randn(2, 3, 4, 4).to(memory_format=torch.channels_last), randn(3), randn(3), True
    ),
    "batch, no statistics": lambda: batch(randn(4, 3, 2), training=True, running=NONE),
    "batch, weight alone": lambda: batch(randn(4, 3), randn(3), None, True),
    "batch, bias alone": lambda: batch(randn(4, 3), None, randn(3), True),
    "batch, momentum 0": lambda: batch(randn(4, 3), training=True, momentum=0.0),
    "batch, momentum 1": lambda: batch(randn(4, 3), training=True, momentum=1.0),
    "batch, one value with space": lambda: batch(randn(1, 3, 2), training=True),
    "batch, evaluation": lambda: batch(randn(4, 3), randn(3), randn(3)),
    "batch, 16 bits": lambda: batch(randn(4, 3, dtype=B), randn(3, dtype=B), None, True, running=statistics(dtype=B)),
    "batch, wide weight": lambda: batch(
        randn(4, 3, dtype=B), randn(3, dtype=S), None, True, running=statistics(dtype=S)
    ),
    "batch, wide statistics": lambda: batch(randn(4, 3, dtype=B), training=True, running=statistics(dtype=S)),
    "batch, half": lambda: batch(randn(4, 3, dtype=H), training=True, running=statistics(dtype=H)),
    "batch, evaluation of 16 bits": lambda: batch(randn(4, 3, dtype=B), randn(3, dtype=S), running=statistics(dtype=S)),
    "batch, empty": lambda: batch(randn(0, 3), training=True),
    "batch, empty in space": lambda: batch(randn(2, 3, 0), training=True),
    "batch, one value": lambda: batch(randn(1, 3), training=True),
    "batch, one dimension": lambda: batch(randn(3), training=True),
    "batch, evaluation without statistics": lambda: batch(randn(4, 3), running=NONE),
    "batch, one statistic": lambda: batch(randn(4, 3), training=True, running=[None, torch.ones(3, dtype=D)]),
    "batch, statistics of another dtype": lambda: batch(randn(4, 3), training=True, running=statistics(dtype=S)),
    "batch, evaluation by another dtype": lambda: batch(randn(4, 3), running=statistics(dtype=S)),
    "batch, statistics of another size": lambda: batch(randn(4, 3), training=True, running=statistics(4)),
    "batch, weight of another size": lambda: batch(randn(4, 3), randn(4), None, True),
    "batch, momentum of None": lambda: batch(randn(4, 3), training=True, momentum=None),
    "builtin batch": lambda: builtin(torch.batch_norm, randn(4, 3), True, False),
    "builtin batch, evaluation": lambda: builtin(torch.batch_norm, randn(4, 3), False, False),
    "builtin batch, one value": lambda: builtin(torch.batch_norm, randn(1, 3), True, False, parameters=False),
    "builtin batch, empty": lambda: builtin(torch.batch_norm, randn(0, 3), True, False),
    "native batch": lambda: builtin(torch.native_batch_norm, randn(4, 3), True),
    "native batch, evaluation": lambda: builtin(torch.native_batch_norm, randn(4, 3), False),
    "native batch, 16 bits": lambda: builtin(
        torch.native_batch_norm, randn(4, 3, dtype=B), True, running=NONE, parameters=False
    ),
    "legit batch": lambda: builtin(torch._native_batch_norm_legit, randn(4, 3), True),
    "legit batch, no statistics": lambda: torch._native_batch_norm_legit(
        randn(4, 3), randn(3), randn(3), True, 0.3, 1e-3
    ),
    "legit batch, by keyword": lambda: torch._native_batch_norm_legit(
        randn(4, 3), None, randn(3), True, momentum=0.3, eps=1e-3
    ),
    "instance": lambda: F.instance_norm(randn(4, 3, 5), weight=randn(3), bias=randn(3)),
    "instance, statistics": lambda: with_statistics(F.instance_norm, statistics(), randn(4, 3, 5), momentum=0.3),
    "instance, by statistics": lambda: with_statistics(
        F.instance_norm, statistics(), randn(4, 3, 5), use_input_stats=False
    ),
    "instance, 16 bits": lambda: F.instance_norm(
        randn(4, 3, 5, dtype=B), weight=randn(3, dtype=S), bias=randn(3, dtype=S)
    ),
    "instance, empty": lambda: F.instance_norm(randn(0, 3, 5)),
    "instance, one value": lambda: F.instance_norm(randn(4, 3, 1)),
    "instance, two dimensions": lambda: F.instance_norm(randn(4, 3)),
    "instance, no statistics": lambda: F.instance_norm(randn(4, 3, 5), use_input_stats=False),
    "instance, momentum of None": lambda: F.instance_norm(randn(4, 3, 5), momentum=None),
    "builtin instance": lambda: builtin(torch.instance_norm, randn(4, 3, 5), True, False),
    "builtin instance, by statistics": lambda: builtin(torch.instance_norm, randn(4, 3, 5), False, False),
    "builtin instance, one value": lambda: builtin(torch.instance_norm, randn(4, 3, 1), True, False, running=NONE),
    "builtin instance, by keyword": lambda: torch.instance_norm(
        randn(4, 3, 5),
        weight=None,
        bias=randn(3),
        running_mean=None,
        running_var=None,
        use_input_stats=True,
        momentum=0.1,
        eps=1e-5,
        cudnn_enabled=True,
    ),
}
AUTOCAST = {
    "layer": lambda: F.layer_norm(randn(2, 3, dtype=S), (3,), randn(3, dtype=S)),
    "layer, 16 bits": lambda: F.layer_norm(randn(2, 3, dtype=B), (3,), randn(3, dtype=B)),
    "layer, wide weight": lambda: F.layer_norm(randn(2, 3, dtype=B), (3,), randn(3, dtype=S)),
    "batch": lambda: batch(randn(4, 3, dtype=S), randn(3, dtype=S), None, True, running=statistics(dtype=S)),
    "batch, 16 bits": lambda: batch(randn(4, 3, dtype=B), randn(3, dtype=S), None, True, running=statistics(dtype=S)),
    "instance": lambda: F.instance_norm(randn(4, 3, 5, dtype=B), weight=randn(3, dtype=S)),
}
TOLERANCES = {D: 1e-12, S: 1e-5, H: 2e-3, B: 1e-2, torch.complex64: 1e-5}


def outcome(call, mode):
    torch.manual_seed(0)
    with mode:
        try:
            found = call()
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            return type(error), str(error)
    return found if isinstance(found, tuple) else (found,)


def assert_same(call):
    expected, got = (outcome(call, mode) for mode in (nullcontext(), hodiff.corrected()))
    if isinstance(expected[0], type):
        assert got == expected
        return
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
        tolerance = TOLERANCES[ours.dtype]
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("name", CALLS)
def test_values_dtypes_statistics_and_errors_match_torch(name):
    assert_same(CALLS[name])


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_outcomes_match_torch(name):
    with torch.autocast("cpu", B):
        assert_same(AUTOCAST[name])


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_batch_norm_counts_a_batch_once_by_every_route(route, momentum):
    x, v = randn(4, 3), randn(4, 3)

    def buffers(run):
        torch.manual_seed(0)
        module = nn.BatchNorm1d(3, momentum=momentum).double()
        for _ in range(2):
            run(module)
        return list(module.buffers())

    expected = buffers(lambda module: module(x))
    once = route != "forward-over-forward"  # forward-over-forward runs the function for each group of directions
    found = buffers(lambda module: hodiff.hvp(lambda x: module(x).sin().sum(), x, v, route=route))
    if once:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    assert found[2].dtype == torch.long
    assert found[2] >= 2


NAMED = {
    "layer": lambda x: F.layer_norm(x, (3,)),
    "builtin layer": lambda x: torch.layer_norm(x, (3,)),
    "native layer": lambda x: torch.native_layer_norm(x, (3,), None, None, 0.1)[0],
    "batch": lambda x: F.batch_norm(x, None, None, training=True),
    "builtin batch": lambda x: torch.batch_norm(x, None, None, None, None, True, 0.1, 0.1, False),
    "native batch": lambda x: torch.native_batch_norm(x, None, None, None, None, True, 0.1, 0.1)[0],
    "legit batch": lambda x: torch._native_batch_norm_legit(x, None, None, True, 0.1, 0.1)[0],
    "instance": lambda x: F.instance_norm(x[None]),
    "builtin instance": lambda x: torch.instance_norm(x[None], None, None, None, None, True, 0.1, 0.1, False),
    "group": lambda x: F.group_norm(x, 1, eps=0.1),
    "root mean square": lambda x: F.rms_norm(x, (3,), eps=0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_derivatives_match_differences(name):
    """Group norm and RMS norm are included, although torch's own rules are right.

    All names call one Function, whose own tests compare third derivatives.
    """
    hodiff.assert_differentiable(
        hodiff.corrected()(NAMED[name]), randn(2, 3), order=2, scipy=False, vmap="native" not in name
    )


@pytest.mark.parametrize("name", [name for name in NAMED if name not in {"group", "root mean square"}])
def test_torch_alone_is_wrong(name):
    """The test above would prove nothing if torch alone were right."""
    x, v = randn(2, 3), randn(2, 3)

    def f(x):
        return NAMED[name](x).sin().sum()

    product = hodiff.hvp(f, x, v, route="reverse-over-forward")
    assert not torch.allclose(hodiff.hvp(f, x, v, route="reverse-over-forward", correct=False), product, rtol=1e-3)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_layer_norm_along_a_line_matches_closed_form(route):
    r"""The output along $x = t d$, with a centered d of variance $s^2$, is $d\, t / \sqrt{s^2 t^2 + \varepsilon}$."""
    d, t, eps = torch.tensor([1.0, -3.0, 2.0], dtype=D), torch.tensor(0.8, dtype=D), 0.7
    variance = d.square().mean()
    q = variance * t**2 + eps
    second = -3 * eps * variance * t * q**-2.5
    third = -3 * eps * variance * q**-2.5 + 15 * eps * variance**2 * t**2 * q**-3.5

    def f(t):
        return F.layer_norm(t * d, (3,), eps=eps)[0] / d[0]

    def product(t):
        return hodiff.hvp(f, t, torch.ones_like(t), route=route)

    torch.testing.assert_close(product(t), second, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.func.grad(product)(t), third, rtol=1e-11, atol=0)


@pytest.mark.parametrize("single", [False, True], ids=["float64", "float32"])
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_group_norm_products_are_linear_for_tiny_vectors(route, single):
    """Products are linear in the vector, even if it is far smaller than the input."""
    generator = torch.Generator().manual_seed(0)
    x, v, y = (torch.randn(2, 6, 3, generator=generator, dtype=torch.float64) for _ in range(3))

    def by_parts(x):
        groups = x.reshape(2, 3, -1)
        centred = groups - groups.mean(-1, keepdim=True)
        return ((centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()).reshape(x.shape) ** 2 * y).sum()

    expected = hodiff.hvp(by_parts, x, v)
    dtype = torch.float32 if single else torch.float64
    for size in (1e-6, 1e-20):
        got = hodiff.hvp(
            lambda x: (F.group_norm(x, 3) ** 2 * y.to(dtype)).sum(), x.to(dtype), (v * size).to(dtype), route=route
        )
        error = ((got.double() / size - expected).norm() / expected.norm()).item()
        assert error < 10 * torch.finfo(dtype).eps, size


STATISTICS = {
    "layer": (lambda x: torch.native_layer_norm(x, (3, 2), None, None, 0.1)[1:], lambda x: (x, (1, 2), True)),
    "layer's operator": (
        lambda x: torch.ops.aten.native_layer_norm(x, [2], None, None, 0.1)[1:],
        lambda x: (x, (2,), True),
    ),
    "batch": (
        lambda x: torch.native_batch_norm(x, None, None, None, None, True, 0.1, 0.1)[1:],
        lambda x: (x, (0, 2), False),
    ),
    "batch with update": (
        lambda x: torch.ops.aten._batch_norm_with_update(x, None, None, randn(3), randn(3), 0.1, 0.1)[1:3],
        lambda x: (x, (0, 2), False),
    ),
    "group": (
        lambda x: torch.native_group_norm(x, None, None, 4, 3, 2, 1, 0.1)[1:],
        lambda x: (x.reshape(4, 1, 6), (2,), False),
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("route", hodiff.ROUTES)
@pytest.mark.parametrize("name", STATISTICS)
def test_returned_statistics_are_differentiated(name, route):
    """Mean and deviation, which torch returns beside the normalized input, have derivatives by every route."""
    statistics, of_groups = STATISTICS[name]

    def by_hand(x):
        x, dims, keepdim = of_groups(x)
        mean = x.mean(dims, keepdim=True)
        deviation = ((x - mean).square().mean(dims, keepdim=True) + 0.1).rsqrt()
        return (mean, deviation) if keepdim else (mean.flatten(-len(dims)), deviation.flatten(-len(dims)))

    x, v = randn(4, 3, 2), randn(4, 3, 2)
    f, expected = (
        (lambda x, each=each: sum(y.flatten().dot(y.flatten().sin()) for y in each(x)))
        for each in (statistics, by_hand)
    )
    torch.testing.assert_close(hodiff.hvp(f, x, v, route=route), hodiff.hvp(expected, x, v))
    torch.testing.assert_close(
        hodiff.directional_derivatives(f, x, v, order=3), hodiff.directional_derivatives(expected, x, v, order=3)
    )


@pytest.mark.parametrize("of", ["weight", "bias"])
def test_native_group_norm_accepts_non_contiguous_weights(of):
    """Torch's kernel reads wrong elements of such weights."""
    x, generator = torch.randn(2, 6, 3, dtype=D), torch.Generator().manual_seed(0)
    numbers = torch.randn(2, 6, dtype=D, generator=generator)
    expected = F.group_norm(x, 2, *numbers)
    given = dict(zip(("weight", "bias"), numbers, strict=True))
    given[of] = torch.stack([given[of], given[of] + 5], -1)[..., 0]
    with hodiff.corrected():
        y, _, _ = torch.native_group_norm(x, given["weight"], given["bias"], 2, 6, 3, 2, 1e-5)
        torch.testing.assert_close(y, expected)
        (gradient,) = torch.autograd.functional.vjp(
            lambda w: torch.native_group_norm(x, *({**given, of: w}).values(), 2, 6, 3, 2, 1e-5)[0].sum(), given[of]
        )[1:]
    by_torch = torch.autograd.functional.vjp(
        lambda w: F.group_norm(x, 2, *({**given, of: w}).values()).sum(), given[of]
    )[1]
    torch.testing.assert_close(gradient, by_torch)


STRIDED = {
    "batch": lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    "batch, evaluation": lambda x, w, b: F.batch_norm(x, b.detach(), w.detach(), w, b),
    "instance": lambda x, w, b: F.instance_norm(torch.stack([x, x.sin()], -1), weight=w, bias=b),
    "group": lambda x, w, b: F.group_norm(x, 2, w, b),
    "layer": lambda x, w, b: F.layer_norm(x, (4,), w, b),
}


@pytest.mark.parametrize("name", STRIDED)
def test_weights_of_any_strides_have_the_derivatives_of_contiguous_ones(name):
    """Torch's gradient of batch_norm reads wrong elements of such a weight."""
    x, p, v = randn(6, 4), randn(4, 3) ** 2 + 1, randn(4, 3)

    def loss(p, columns):
        return (STRIDED[name](x * p[:, 0], *columns(p)) ** 3).sum()

    def strided(p):
        return loss(p, lambda p: (p[:, 1], p[:, 2]))

    def contiguous(p):
        return loss(p, lambda p: (p[:, 1].contiguous(), p[:, 2].contiguous()))

    with hodiff.corrected():
        torch.testing.assert_close(torch.func.grad(strided)(p), torch.func.grad(contiguous)(p))
    expected = hodiff.hvp(contiguous, p, v)
    for route in hodiff.ROUTES:
        torch.testing.assert_close(hodiff.hvp(strided, p, v, route=route), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.02, 1.0, 100.0])
@pytest.mark.parametrize("name", ["group_norm", "layer_norm", "instance_norm", "batch_norm"])
def test_products_in_16_bits_keep_their_digits(name, scale, dtype):
    f = {
        "group_norm": lambda x: F.group_norm(x, 2).pow(3).sum(),
        "layer_norm": lambda x: F.layer_norm(x, (8,)).pow(3).sum(),
        "instance_norm": lambda x: F.instance_norm(x.view(2, 2, 4)).pow(3).sum(),
        "batch_norm": lambda x: F.batch_norm(x, None, None, training=True).pow(3).sum(),
    }[name]
    generator = torch.Generator().manual_seed(0)
    x, v = ((torch.randn(6, 8, generator=generator) * scale).to(dtype) for _ in range(2))
    if name == "instance_norm":
        x, v = x[:2], v[:2]
    expected = hodiff.hvp(f, x.double(), v.double())
    for route in hodiff.ROUTES:
        found = hodiff.hvp(f, x, v, route=route).double()
        assert float((found - expected).abs().max() / expected.abs().max()) < 30 * torch.finfo(dtype).eps, route
