"""Every lesson runs, its report agrees with its text, and its printed figures are right."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import lesson_tools
import pytest
import torch
import torch.nn.functional as F
from scipy.special import jv

ROOT = Path(__file__).resolve().parents[2]
FOLDER = lesson_tools.FOLDER
PATHS = lesson_tools.LESSONS

# Name of the function that a lesson checks, and the same function in torch operators
LESSONS = {
    "01_square": ("Square", torch.square),
    "02_cube": ("Cube", lambda x: x**3),
    "03_exp": ("Exp", torch.exp),
    "04_sinh": ("sinh", torch.sinh),
    "05_two_outputs": ("SquaresAndProduct", lambda x, y: (x**2 + y**2, x * y)),
    "06_sigmoid": ("Sigmoid", torch.sigmoid),
    "07_tanh": ("Tanh", torch.tanh),
    "08_relu": ("Relu", torch.relu),
    "09_matmul": ("MatMul", torch.matmul),
    "10_bias_add": ("BiasAdd", torch.add),
    "11_broadcasting": ("Multiply", torch.mul),
    "12_linear": ("Linear", F.linear),
    "13_sum": ("Sum", lambda x: x.sum(-1)),
    "14_mean": ("Mean", lambda x: x.mean(-1)),
    "15_max": ("Max", lambda x: tuple(x.max(-1))),
    "16_conv1d": ("Conv1d", F.conv1d),
    "17_non_tensor_arguments": ("Power", torch.pow),
    "18_optional_bias": ("with_and_without", lambda x, w, b: (x * w + b, x * w)),
    "19_attention": ("Attention", F.scaled_dot_product_attention),
    "20_triton": ("Sine", lambda x, turns: torch.sin(x)),
    "26_elementwise": ("Square", torch.square),
    "27_legacy_functions": ("Hypotenuse", lambda x: (1 + x * x).sqrt()),
    "29_gumbel_softmax": ("PerturbedSoftmax", lambda x, g, t: torch.softmax((x + g) / t, -1)),
    "30_checkpoint": ("checkpointed", lambda x, w: (((x @ w).sin() @ w).sin() @ w).sin()),
    "31_masks_and_memory": ("leaky_relu", F.leaky_relu),
    "32_logsumexp": ("LogSumExp", lambda x: torch.logsumexp(x, -1)),
    "33_swish": ("Swish", lambda x, beta: x / (1 + (-beta * x).exp())),
    "36_in_place": ("leaky_relu", lambda x: F.leaky_relu(x, 0.1)),
    "37_dim_and_keepdim": ("root_mean_square", lambda x, dim: (0.01 + (x * x).mean(dim)).sqrt()),
    "38_stride_and_padding": ("Conv1d", lambda x, w, s, p: F.conv1d(x, w, stride=s, padding=p)),
    "39_cpp_operator": ("Bessel", lambda x, n: torch.from_numpy(jv(n, x.numpy()))),
}

# Lessons with a surrogate derivative, or with differences: name, and highest order
APPROXIMATE = {
    "28_straight_through": ("ClippedSign", 3),
    "34_gradient_control": ("ScaledGradient", 3),
    "35_external_code": ("Period", 2),
    "40_quantization_aware_training": ("FakeQuantized", 3),
    "41_export": ("Round", 3),
}

# Kind, order, routes and advice of each required finding; rows that must have no finding
DEFECTS = {
    "21_once_differentiable": (("zero", 2, {"reverse-over-reverse"}, "once_differentiable"), {"reverse", "forward"}),
    "22_constant_slope": (
        ("raises", 2, {"reverse-over-reverse", "forward-over-reverse"}, "return it as an output"),
        {"reverse", "forward", "gradcheck"},
    ),
    "23_doubled_tangent": (("wrong", 1, {"forward"}, "jvp"), {"reverse", "reverse-over-reverse", "gradgradcheck"}),
    "24_wrong_batching": (("wrong", 0, {"vmap of values"}, "in_dims"), {"reverse-over-reverse", "gradgradcheck"}),
    "25_numpy_backward": (
        ("raises", 1, {"reverse", "reverse-over-reverse"}, ""),
        {"forward", "forward-over-forward", "gradcheck"},
    ),
}


def load(stem):
    return lesson_tools.load(PATHS[stem])


def row(out, start):
    """Words of the printed line that begins with `start`."""
    (line,) = (line for line in out.splitlines() if line.startswith(start))
    return line.removeprefix(start).split()


def legacy_refuses(lesson, out):
    assert out.count("raises RuntimeError") == 3
    for way, value in {"backward  ": "0.4472", "backward of backward ": "0.7155", "torch.vmap ": "1.1180"}.items():
        assert row(out, way)[-1] == value
    assert row(out, "backward of backward ") == ["0.7155", "0.7155"]


def clipping_holds_weights(lesson, out):
    before, after, largest = map(float, row(out, "the true slope, 0"))
    assert before == after
    for name, low, high in (("straight through", 2, 1000), ("clipped", 0.9, 1.1)):
        before, after, largest = map(float, row(out, name))
        assert after < before / 3
        assert low < largest < high


def noise_inside_differs(lesson, out):
    first, second, *batched = row(out, "NoisySoftmax")
    assert first != second
    assert batched == ["raises", "RuntimeError"]
    assert len(set(row(out, "PerturbedSoftmax"))) == 1


def nothing_is_kept(lesson, out):
    assert row(out, "plain call:")[0] == "983"  # (8 + 7) tensors of 256 x 64 float32
    assert row(out, "checkpoint:")[0] == "0"
    assert row(out, "gradient of a weight that is closed over:") == ["none"]
    x, w = (each.clone().requires_grad_() for each in lesson.INPUTS)
    right = torch.autograd.grad((((x @ w).sin() @ w).sin() @ w).sin().sum(), w)[0].flatten().tolist()
    got = re.search(r"passed in: \[(.*)\]", out)[1].split(", ")
    assert [float(each) for each in got] == pytest.approx(right, abs=1e-4)


def masks_take_bytes(lesson, out):
    assert row(out, "torch's leaky_relu:")[0] == "4"
    assert row(out, "a mask of torch.bool:")[0] == "1"


def rows_of_infinity_are_flat(lesson, out):
    assert row(out, "large")[0] == "inf"
    assert row(out, "small")[:2] == ["-inf", "-998.901"]
    assert row(out, "all are -∞")[2:] == ["[0.0,", "0.0,", "0.0]"]
    assert row(out, "torch.where around")[-3:] == ["[nan,", "nan,", "nan]"]
    row_of_infinity = torch.full((3,), -torch.inf, dtype=torch.float64)
    for hessian in (torch.func.hessian, lambda f: torch.func.jacrev(torch.func.jacrev(f))):
        assert not hessian(lesson.LogSumExp.apply)(row_of_infinity).any()


def one_output_has_two_slopes(lesson, out):
    pairs = re.findall(r"= (-0.2000), slope ([+-])", out)
    assert sorted(pairs) == [("-0.2000", "+"), ("-0.2000", "-")]
    x = torch.linspace(-2, 0, 2001, dtype=torch.float64)
    least = lesson.silu(x).min(0)
    assert (x[least.indices].item(), least.values.item()) == pytest.approx((-1.278, -0.278), abs=1e-3)


def hooks_leave_tangents(lesson, out):
    assert row(out, "hook, halves") == ["0.5000", "1.0000"]
    assert row(out, "reverse ") == ["-1.0000", "-1.0000"]
    for control in ("clip to ±0.25", "noise of 0.1"):
        assert row(out, control)[1:] == ["raises", "RouteError"]


def errors_are_within_their_estimates(lesson, out):
    for angle in ("0.5", "1.2", "2.0", "2.8"):
        _, estimated, true = map(float, row(out, angle))
        assert true <= estimated


def the_mark_is_needed(lesson, out):
    assert (row(out, "out of place:")[0], row(out, "in place:")[0]) == ("8", "4")
    assert row(out, "gradient at -2, marked:") == ["0.1000"]
    assert row(out, "gradient at -2, not marked:") == ["1.0000"]
    for refused in ("a square that had saved x:", "a leaf:"):
        assert row(out, refused) == ["raises", "RuntimeError"]


def shapes_are_those_of_torch(lesson, out):
    shapes = [tuple(map(int, re.findall(r"\d+", each))) for each in re.findall(r"becomes (\(.*\))", out)]
    x = lesson.INPUTS[0]
    options = ({"dim": (0, -1)}, {"dim": (0, -1), "keepdim": True}, {"dim": 1}, {"dim": -1, "keepdim": True})
    assert shapes == [tuple(x.mean(**each).shape) for each in options]
    for wrong in ((0, 3), (0, -3), (-4,)):
        with pytest.raises(ValueError, match="dim: expected different ones from -3 to 2"):
            lesson.root_mean_square(x, wrong)


def unread_numbers_have_no_gradient(lesson, out):
    assert [row(out, f"stride {s}, padding {p}:")[-1] for s, p in ((1, 0), (2, 0), (3, 1))] == ["1.3]", "0.0]", "0.0]"]


def the_operator_has_no_tangent(lesson, out):
    assert row(out, "tangent of the operator:") == ["0.0000"]
    assert float(row(out, "tangent of the Function:")[0]) == pytest.approx((jv(0, 0.5) - jv(2, 0.5)) / 2, abs=1e-4)
    assert row(out, "opcheck of the operator:") == ["{'SUCCESS'}"]


def int8_is_small_and_as_good(lesson, out):
    accuracy = {name: float(row(out, name)[0]) for name in ("float32 ", "int8  ", "trained, 8 bits")}
    assert accuracy["float32 "] > 90
    assert abs(accuracy["int8  "] - accuracy["trained, 8 bits"]) < 1
    assert float(row(out, "rounded, 2 bits")[0]) < 50
    assert float(row(out, "trained, 2 bits")[0]) > 85
    assert float(row(out, "int8 is ")[0]) > 3


def the_rule_stays_behind(lesson, out):
    rule = row(out, "gradient by the rule:")
    assert row(out, "torch.export") == ["yes", "True", "[0.0,", "0.0,", "0.0]", "yes"]
    assert row(out, "ONNX") == ["yes", "True", "none", "yes"]
    for way in ("torch.jit.trace", "torch.jit.script"):
        assert row(out, way) == ["yes", "True", *rule, "raises", "RuntimeError"]


# Claims of lessons about their output
CLAIMS = {
    "27_legacy_functions": legacy_refuses,
    "28_straight_through": clipping_holds_weights,
    "29_gumbel_softmax": noise_inside_differs,
    "30_checkpoint": nothing_is_kept,
    "31_masks_and_memory": masks_take_bytes,
    "32_logsumexp": rows_of_infinity_are_flat,
    "33_swish": one_output_has_two_slopes,
    "34_gradient_control": hooks_leave_tangents,
    "35_external_code": errors_are_within_their_estimates,
    "36_in_place": the_mark_is_needed,
    "37_dim_and_keepdim": shapes_are_those_of_torch,
    "38_stride_and_padding": unread_numbers_have_no_gradient,
    "39_cpp_operator": the_operator_has_no_tangent,
    "40_quantization_aware_training": int8_is_small_and_as_good,
    "41_export": the_rule_stays_behind,
}

needs_a_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


def lesson_parameters(stems, quick):
    """Return test parameters, marked slow except for the lessons in `quick`."""
    marks = {stem: [] if stem in quick else [pytest.mark.slow] for stem in stems}
    marks.get("39_cpp_operator", []).append(needs_a_compiler)
    return [pytest.param(stem, marks=each) for stem, each in marks.items()]


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def test_every_lesson_is_tested():
    assert sorted(LESSONS | APPROXIMATE | DEFECTS) == list(PATHS)
    assert set(CLAIMS) == {stem for stem in PATHS if int(stem[:2]) > 26}


def test_lessons_are_numbered_and_listed_in_order():
    assert [int(stem[:2]) for stem in PATHS] == list(range(1, len(PATHS) + 1))
    listed = re.findall(r"\]\((\w+)\.py\)", (FOLDER / "README.md").read_text())
    assert listed == list(PATHS)


@pytest.mark.parametrize("stem", PATHS)
def test_lesson_has_title_formula_and_command(stem):
    text = PATHS[stem].read_text()
    title = re.match(r'r"""Lesson (\d+)', text)
    assert title
    assert int(title[1]) == int(stem[:2])
    assert "\n$$ " in text
    assert f"python examples/functions/{stem}.py" in text
    paragraphs = [each for each in text.split('"""')[1].split("\n\n") if not each.startswith("    ")]
    assert paragraphs[-1].startswith("Exercise: ")


# Lessons with numbers, indices and a kernel run among the quick tests.
QUICK = {"01_square", "15_max", "20_triton", "32_logsumexp"}


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("stem", lesson_parameters(LESSONS, QUICK))
def test_lesson_check_passes(stem, capsys):
    lesson = load(stem)
    report = lesson.main()
    out = capsys.readouterr().out
    assert report.ok, str(report)
    assert str(report) in out
    assert not report.warnings, str(report)
    CLAIMS.get(stem, no_claim)(lesson, out)
    assert {entry.order for entry in report.entries} == {0, 1, 2, 3}
    assert not [entry for entry in report.entries if entry.status == "skipped"]

    name, reference = LESSONS[stem]
    function = getattr(lesson, name)
    got = as_tuple(getattr(function, "apply", function)(*lesson.INPUTS))
    for ours, theirs in zip(got, as_tuple(reference(*lesson.INPUTS)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)


def no_claim(lesson, out):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("stem", lesson_parameters(APPROXIMATE, {"34_gradient_control"}))
def test_approximate_lesson_reports_its_approximation(stem, capsys):
    lesson = load(stem)
    report = lesson.main()
    out = capsys.readouterr().out
    assert report.ok, str(report)
    assert str(report) in out
    assert not report.warnings, str(report)
    assert {entry.order for entry in report.entries} == set(range(APPROXIMATE[stem][1] + 1))
    assert report.codes == (() if stem == "35_external_code" else ("HD902",))
    CLAIMS[stem](lesson, out)


@pytest.mark.slow
@pytest.mark.one_in(6)
@pytest.mark.parametrize("stem", DEFECTS)
def test_defect_of_the_lesson_is_found(stem, capsys):
    report = load(stem).main()
    assert str(report) in capsys.readouterr().out
    (kind, order, routes, remedy), right = DEFECTS[stem]
    assert any(
        (finding.kind, finding.order) == (kind, order)
        and routes <= set(finding.route.split(", "))
        and remedy in finding.remedy
        for finding in report.findings
    ), str(report)
    assert not {entry.route for entry in report.entries if entry.failed} & right, str(report)


@pytest.mark.parametrize(
    ("stem", "name", "check"),
    [
        ("22_constant_slope", "Square", torch.autograd.gradcheck),
        ("23_doubled_tangent", "Cube", torch.autograd.gradcheck),
        ("23_doubled_tangent", "Cube", torch.autograd.gradgradcheck),
    ],
)
def test_gradcheck_of_torch_misses_the_defect(stem, name, check):
    lesson = load(stem)
    assert check(getattr(lesson, name).apply, [x.clone().requires_grad_() for x in lesson.INPUTS])


def derivatives(f, x, order):
    values = [f(x)]
    for _ in range(order):
        f = torch.func.grad(f)
        values.append(f(x))
    return torch.stack(values)


def test_sigmoid_derivatives_keep_their_digits():
    """All derivatives for large x are those of -exp(-x), to a relative error of exp(-x)."""
    x = torch.tensor(40.0, dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
    got = derivatives(load("06_sigmoid").Sigmoid.apply, x, 3)[1:]
    torch.testing.assert_close(got, signs * (-x).exp(), rtol=1e-14, atol=0)


@pytest.mark.slow
def test_tanh_lesson_prints_lost_digits(capsys):
    load("07_tanh").main()
    errors = re.findall(r"relative error (\S+)", capsys.readouterr().out)
    assert float(errors[0]) < 1e-15
    assert float(errors[-1]) == 1


@pytest.mark.slow
def test_relu_lesson_prints_the_kink(capsys):
    lesson = load("08_relu")
    lesson.main()
    assert "[non-smooth]" in capsys.readouterr().out
    assert torch.func.grad(lesson.Relu.apply)(torch.tensor(0.0)) == 0


def test_max_lesson_gives_ties_to_the_first():
    values = torch.tensor([1.0, 2.0, 2.0])
    gradient = torch.func.grad(lambda x: load("15_max").Max.apply(x)[0])(values)
    assert gradient.tolist() == [0, 1, 0]


@pytest.mark.parametrize("n", range(5))
def test_power_lesson_is_right_at_zero(n):
    Power = load("17_non_tensor_arguments").Power
    got = derivatives(lambda x: Power.apply(x, n), torch.tensor(0.0), 4)
    factorial = torch.tensor([1.0, 1.0, 2.0, 6.0, 24.0])
    assert torch.equal(got, torch.where(torch.arange(5) == n, factorial, 0.0))


@pytest.mark.slow
def test_numpy_lesson_prints_the_missing_term(capsys):
    load("25_numpy_backward").main()
    x = torch.tensor(0.5)
    got, right = re.search(r"at 0.5: (\S+), .* is (\S+)", capsys.readouterr().out).groups()
    assert float(right) == pytest.approx(float(2 * (2 * x).cos()), abs=1e-4)
    assert float(got) == pytest.approx(float(2 * x.cos() ** 2), abs=1e-4)


def run(stem, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error::UserWarning", PATHS[stem]],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=True,
    ).stdout


@pytest.mark.slow
def test_lesson_runs_as_a_script():
    assert "check of Square at float64[2], within corrected(): ok" in run("01_square")


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton uses the GPU")
@pytest.mark.slow
def test_triton_lesson_reports_its_fallback():
    out = run("20_triton", TRITON_INTERPRET="0")
    assert "a torch operator replaces the kernel" in out
    assert "check of Sine at float64[2], within corrected(): ok" in out


@pytest.mark.slow
def test_triton_lesson_runs_its_kernel():
    pytest.importorskip("triton")
    out = run("20_triton", TRITON_INTERPRET="1")
    assert "replaces the kernel" not in out
    assert "check of Sine at float64[2], within corrected(): ok" in out
