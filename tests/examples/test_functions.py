"""Every lesson runs and its report says what the lesson says."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "functions"
PATHS = {path.stem: path for path in sorted(FOLDER.glob("*.py"))}

# The function that a lesson checks, and the same by torch's own operators
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
}

# Kind, order, routes and words of the remedy of a finding that must be there; rows where nothing may be found
DEFECTS = {
    "21_once_differentiable": (("zero", 2, {"reverse-over-reverse"}, "once_differentiable"), {"reverse", "forward"}),
    "22_constant_slope": (
        ("zero", 2, {"reverse-over-reverse", "forward-over-reverse"}, "return it as an output"),
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
    spec = importlib.util.spec_from_file_location(f"lesson_{stem}", PATHS[stem])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def test_every_lesson_is_tested():
    assert sorted(LESSONS | DEFECTS) == list(PATHS)


def test_lessons_are_numbered_and_listed_in_order():
    assert [int(stem[:2]) for stem in PATHS] == list(range(1, len(PATHS) + 1))
    listed = re.findall(r"\]\((\w+)\.py\)", (FOLDER / "README.md").read_text())
    assert listed == list(PATHS)


@pytest.mark.parametrize("stem", PATHS)
def test_lesson_states_itself(stem):
    text = PATHS[stem].read_text()
    title = re.match(r'r"""Lesson (\d+)', text)
    assert title
    assert int(title[1]) == int(stem[:2])
    assert "\n$$ " in text
    assert f"python examples/functions/{stem}.py" in text


# One of numbers, of indices and of a kernel at once.
SOON = {"01_square", "15_max", "20_triton"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "stem", [stem if stem in SOON else pytest.param(stem, marks=pytest.mark.slow) for stem in LESSONS]
)
def test_lesson_is_right(stem, capsys):
    lesson = load(stem)
    report = lesson.main()
    assert report.ok, str(report)
    assert str(report) in capsys.readouterr().out
    assert {entry.order for entry in report.entries} == {0, 1, 2, 3}
    assert not [entry for entry in report.entries if entry.status == "skipped"]

    name, reference = LESSONS[stem]
    function = getattr(lesson, name)
    got = as_tuple(getattr(function, "apply", function)(*lesson.INPUTS))
    for ours, theirs in zip(got, as_tuple(reference(*lesson.INPUTS)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stem", DEFECTS)
def test_defect_is_named(stem, capsys):
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
def test_torch_passes_the_defect(stem, name, check):
    lesson = load(stem)
    assert check(getattr(lesson, name).apply, [x.clone().requires_grad_() for x in lesson.INPUTS])


def derivatives(f, x, order):
    values = [f(x)]
    for _ in range(order):
        f = torch.func.grad(f)
        values.append(f(x))
    return torch.stack(values)


def test_sigmoid_keeps_its_digits():
    """For large x all derivatives are those of -exp(-x), to a relative exp(-x)."""
    x = torch.tensor(40.0, dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
    got = derivatives(load("06_sigmoid").Sigmoid.apply, x, 3)[1:]
    torch.testing.assert_close(got, signs * (-x).exp(), rtol=1e-14, atol=0)


def test_tanh_prints_what_it_loses(capsys):
    load("07_tanh").main()
    errors = re.findall(r"relative error (\S+)", capsys.readouterr().out)
    assert float(errors[0]) < 1e-15
    assert float(errors[-1]) == 1


def test_relu_prints_the_kink(capsys):
    lesson = load("08_relu")
    lesson.main()
    assert "[non-smooth]" in capsys.readouterr().out
    assert torch.func.grad(lesson.Relu.apply)(torch.tensor(0.0)) == 0


def test_max_gives_ties_to_the_first():
    values = torch.tensor([1.0, 2.0, 2.0])
    gradient = torch.func.grad(lambda x: load("15_max").Max.apply(x)[0])(values)
    assert gradient.tolist() == [0, 1, 0]


@pytest.mark.parametrize("n", range(5))
def test_power_is_right_at_zero(n):
    Power = load("17_non_tensor_arguments").Power
    got = derivatives(lambda x: Power.apply(x, n), torch.tensor(0.0), 4)
    factorial = torch.tensor([1.0, 1.0, 2.0, 6.0, 24.0])
    assert torch.equal(got, torch.where(torch.arange(5) == n, factorial, 0.0))


def test_numpy_prints_the_missing_term(capsys):
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
        timeout=120,
        check=True,
    ).stdout


@pytest.mark.slow
def test_runs_as_a_script():
    assert "check of Square at float64[2], within corrected(): ok" in run("01_square")


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton uses the GPU")
@pytest.mark.slow
def test_triton_says_when_torch_takes_its_place():
    out = run("20_triton", TRITON_INTERPRET="0")
    assert "a torch operator takes the kernel's place" in out
    assert "check of Sine at float64[2], within corrected(): ok" in out


@pytest.mark.slow
def test_triton_kernel():
    pytest.importorskip("triton")
    out = run("20_triton", TRITON_INTERPRET="1")
    assert "takes the kernel's place" not in out
    assert "check of Sine at float64[2], within corrected(): ok" in out
