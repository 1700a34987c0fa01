"""Kernels in low precision: defects found by comparison with a reference, and by tolerances for few digits."""

import pytest
import torch
from custom_functions import cubed_slope, custom

from hodiff.checks import check
from hodiff.errors import InputError
from hodiff.functions import nestable_jvp

NUMBERS = (0.5, -1.25, 2.0)


def cube(x):
    return x**3


def of_few_digits(x):
    assert x.dtype in {torch.float32, torch.bfloat16}
    return x**3


# x³ for float32 and bfloat16 only
Kernel = custom("Kernel", of_few_digits, cubed_slope, nestable_jvp(cubed_slope), vmap=True)


def changed(backward=None, jvp=None, saved=None, forward=None):
    """Return the kernel with some rules replaced; they are functions of (x, g)."""
    rules = {}
    if backward:
        rules["backward"] = staticmethod(lambda ctx, g: backward(ctx.saved_tensors[0], g))
    if jvp:
        rules["jvp"] = staticmethod(nestable_jvp(lambda ctx, t: jvp(ctx.saved_tensors[0], t)))
    if forward:
        rules["forward"] = staticmethod(forward)
    if saved:

        def setup_context(ctx, inputs, output):
            for_backward, for_forward = saved(*inputs)
            ctx.save_for_backward(for_backward)
            ctx.save_for_forward(for_forward)

        rules["setup_context"] = staticmethod(setup_context)
    return type("Changed", (Kernel,), rules)


def positive(x):
    return x**3 * (x > 0)


# Name: the kernel, its reference, the expected code
DEFECTS = {
    "factor": (changed(backward=lambda x, g: 2 * x**2 * g), cube, "HD101"),
    "sign": (changed(backward=lambda x, g: -3 * x**2 * g), cube, "HD101"),
    "tangent": (changed(jvp=lambda x, t: 6 * x**2 * t), cube, "HD102"),
    "intermediate": (changed(lambda s, g: s * g, saved=lambda x: (3 * x**2, x)), cube, "HD103"),
    "detached": (changed(backward=lambda x, g: 3 * x.detach() ** 2 * g), cube, "HD104"),
    "half detached": (changed(backward=lambda x, g: 3 * x.detach() * x * g), cube, "HD104"),
    "constant slope": (changed(jvp=lambda s, t: s * t, saved=lambda x: (x, 3 * x**2)), cube, "HD108"),
    "incoming": (changed(backward=lambda x, g: 3 * x**2 * g.detach()), cube, "HD116"),
    "through": (changed(backward=lambda x, g: g, saved=lambda x: (x.sign(), x)), cube, "HD109"),
    "mask": (changed(jvp=lambda x, t: 3 * x**2 * (x > 0) * t, forward=positive), positive, "HD110"),
}


def errors(report):
    return {finding.code for finding in report.errors}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", DEFECTS)
def test_defect_in_float32_is_named(name):
    kernel, reference, code = DEFECTS[name]
    report = check(kernel, torch.tensor(NUMBERS), reference=reference)
    assert errors(report) == {code}, str(report)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", ["factor", "sign", "tangent", "intermediate", "detached", "constant slope"])
def test_defect_in_bfloat16_is_named(name):
    kernel, reference, code = DEFECTS[name]
    report = check(kernel, torch.tensor(NUMBERS, dtype=torch.bfloat16), reference=reference)
    assert errors(report) == {code}, str(report)


@pytest.mark.slow
@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_right_kernel_has_no_finding(dtype, seed):
    report = check(Kernel, torch.tensor(NUMBERS, dtype=dtype), reference=cube, seed=seed, order=3)
    assert report.codes == (), str(report)
    report = check(Kernel.apply, torch.tensor(NUMBERS, dtype=dtype), reference=cube, seed=seed)
    assert report.codes == (), str(report)


def test_first_order_error_is_reported_once():
    """The Function has no reference inside f; errors that follow from the first order have no separate code."""
    kernel, _, _ = DEFECTS["factor"]
    report = check(lambda x: kernel.apply(x) * 2, torch.tensor(NUMBERS), reference=lambda x: 2 * x**3)
    assert errors(report) == {"HD101"}, str(report)


@pytest.mark.slow
def test_nan_is_an_error_at_the_input_and_a_warning_elsewhere():
    kernel = changed(backward=lambda x, g: 3 * x**3 / x * g)
    at_zero = check(kernel, torch.tensor([0.0, 1.5]), reference=cube)
    assert errors(at_zero) == {"HD112"}, str(at_zero)
    nearby = check(kernel, torch.tensor([0.5, 1.5]), reference=cube)
    assert (nearby.ok, nearby.codes) == (True, ("HD112",)), str(nearby)


def test_overflow_at_large_arguments_is_found():
    """log(1 + exp x) overflows in float32 beyond 88, and the reference does not."""

    def naive(x):
        assert x.dtype == torch.float32
        return torch.log1p(x.exp())

    report = check(naive, torch.tensor([0.5, -1.25]), reference=torch.nn.functional.softplus)
    assert (report.ok, report.codes) == (True, ("HD111",)), str(report)


def test_reference_is_called_in_float64_only():
    dtypes = set()

    def reference(x):
        dtypes.add(x.dtype)
        return x**3

    check(Kernel, torch.tensor(NUMBERS), reference=reference)
    assert dtypes == {torch.float64}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reference": 3}, "check: reference: expected the same function for float64, got int"),
        ({"reference": lambda x: x[:1]}, r"check: reference: expected outputs of shape \[\(3,\)\]"),
        ({"reference": lambda x: x / {}}, "check: reference: expected <lambda>.*TypeError"),
        ({"reference": lambda x: x + torch.rand(3)}, "check: reference: expected a deterministic function"),
        ({"reference": cube, "approximate": True}, "check: approximate: expected False with a reference"),
        ({"reference": cube, "ulps": 0}, "check: ulps: expected a positive finite number or None, got 0"),
        ({"reference": cube, "ulps": "2"}, "check: ulps: expected a positive finite number or None, got '2'"),
        ({"ulps": 2}, "check: ulps: expected None without a reference, got 2"),
    ],
)
def test_rejects_bad_values(options, message):
    with pytest.raises(InputError, match=message):
        check(Kernel, torch.tensor(NUMBERS), **options)
