"""The judge accepts solutions of exercises and rejects wrong answers; the quiz computes its answers."""

import re
import shutil
import sys
from types import SimpleNamespace

import judge
import lesson_tools
import pytest
import quiz
import torch
from slow_cases import slow_except
from torch.autograd import Function

from hodiff.functions import scale_gradient

EXPECTED = lesson_tools.load(lesson_tools.FOLDER / "expected.py").EXPECTED
QUICK = {"04_sinh", "30_checkpoint"}


def compiled(stem):
    if stem == "39_cpp_operator" and shutil.which("c++") is None:
        pytest.skip("no C++ compiler")


def test_every_lesson_has_an_exercise_and_a_solution():
    assert list(lesson_tools.SOLUTIONS) == list(EXPECTED) == list(lesson_tools.LESSONS)


@pytest.mark.parametrize("stem", slow_except(EXPECTED, QUICK))
def test_solution_is_accepted(stem):
    compiled(stem)
    assert EXPECTED[stem](lesson_tools.load(lesson_tools.SOLUTIONS[stem])) is None


def outputs(change, result):
    """Apply the change to the floating-point outputs."""
    if isinstance(result, tuple):
        return tuple(change(each) if each.is_floating_point() else each for each in result)
    return change(result)


def cut_at_second_order(x):
    """The identity, whose gradient is a constant."""
    return CutIdentity.apply(x)


class CutIdentity(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent.detach()

    @staticmethod
    def jvp(ctx, tangent):
        return tangent.clone()


CHANGES = {
    "value": (lambda x: x + 1e-6, "returns"),
    "slope": (lambda x: scale_gradient(x, 1.001), "derivative of order 1 by reverse"),
    "graph": (cut_at_second_order, "derivative of order 2 by reverse-over-reverse"),
}
SAME = [stem for stem, expected in EXPECTED.items() if isinstance(expected, judge.Same)]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stem", slow_except(SAME, {"04_sinh"}))
def test_judge_rejects_changed_derivatives(stem, change):
    """Changes of the value, of the first derivative by a thousandth, and of the second derivative alone."""
    expected, (changed, words) = EXPECTED[stem], CHANGES[change]
    right = judge.called(lesson_tools.load(lesson_tools.SOLUTIONS[stem]), expected.name)
    wrong = SimpleNamespace(**{expected.name: lambda *inputs: outputs(changed, right(*inputs))})
    assert words in expected(wrong)


class OutOfPlace(Function):
    @staticmethod
    def forward(x):
        return -x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, cotangent):
        return -cotangent

    @staticmethod
    def jvp(ctx, tangent):
        return -tangent

    @staticmethod
    def vmap(info, in_dims, x):
        return -x, in_dims[0]


class Wasteful(lesson_tools.load(lesson_tools.SOLUTIONS["12_linear"]).Bilinear):
    @staticmethod
    def backward(ctx, cotangent):
        x, W, y = ctx.saved_tensors
        return cotangent * (W @ y), cotangent * torch.outer(x, y), cotangent * (x @ W)


class SharesOfInfinity(lesson_tools.load(lesson_tools.SOLUTIONS["32_logsumexp"]).LogAddExp):
    """Its gradients are NaN where the output is infinite."""

    @staticmethod
    def backward(ctx, cotangent):
        a, b, y = ctx.saved_tensors
        return tuple(((each - y).exp() * cotangent).sum_to_size(each.shape) for each in (a, b))


def rounded_by_one_step(w, bits):
    highest = 2 ** (bits - 1) - 1
    step = w.detach().abs().max() / highest
    return w + (step * (w / step).round() - w).detach()


def checkpoint_as_module(module, x):
    return lesson_tools.lesson(30).Checkpoint.apply(module, x)


def at_one_size(module):
    return torch.export.export(module, (torch.ones(2, 5, 3),))


def softplus(x):
    return torch.logaddexp(x, torch.zeros_like(x))


class Naive:
    """A plain function where a Function is expected."""

    def __init__(self, apply):
        self.apply = apply


# Typical wrong answers, and what the judge prints for them
WRONG = {
    "03_exp": ({"Exp2": Naive(lambda x: 2 * (x - 1).exp2())}, "bytes a number are kept"),
    "07_tanh": ({"Tanh": lesson_tools.lesson(7).Tanh}, "slope at 20"),
    "06_sigmoid": ({"Softplus": Naive(lambda x: x + (1 + (-x).exp()).log())}, "slope at -40"),
    "12_linear": ({"Bilinear": Wasteful}, "HD501"),
    "21_once_differentiable": ({"LoudSine": lesson_tools.lesson(21).Sine}, "the gradient is a constant"),
    "22_constant_slope": ({"square": lesson_tools.lesson(22).Square.apply}, "derivative of order 2"),
    "23_doubled_tangent": ({"transposed": lambda function, x: True}, "with a doubled tangent: True"),
    "24_wrong_batching": ({"Mean": lesson_tools.lesson(24).Mean}, "torch.vmap"),
    "25_numpy_backward": ({"Sine": lesson_tools.lesson(25).Sine}, "raises RuntimeError"),
    "27_legacy_functions": ({"LogOfOnePlusSquare": lesson_tools.lesson(27).LegacyHypotenuse}, "returns"),
    "28_straight_through": ({"Ternary": lesson_tools.lesson(28).ClippedSign}, "returns"),
    "29_gumbel_softmax": ({"hard_sample": lesson_tools.lesson(29).PerturbedSoftmax.apply}, "returns"),
    "30_checkpoint": ({"checkpoint_module": checkpoint_as_module}, "parameter 0 is None"),
    "31_masks_and_memory": ({"packed_leaky_relu": lesson_tools.lesson(31).leaky_relu}, "1 bytes a number"),
    "32_logsumexp": ({"LogAddExp": SharesOfInfinity}, "at -inf, -inf"),
    "33_swish": ({"Softplus": Naive(softplus)}, "bytes a number are kept"),
    "34_gradient_control": ({"scheduled": lambda x, strength: -strength * x}, "returns"),
    "36_in_place": ({"InPlaceNegation": OutOfPlace}, "the result is not the input"),
    "37_dim_and_keepdim": ({"variance": lambda x, dim, keepdim=False: x.var(dim, keepdim=keepdim)}, "returns"),
    "40_quantization_aware_training": ({"quantize_rows": rounded_by_one_step}, "with 3 bits"),
    "41_export": ({"export_rows": at_one_size}, "raises"),
}


@pytest.mark.parametrize("stem", slow_except(WRONG, {"30_checkpoint"}))
def test_judge_rejects_wrong_answer(stem):
    answer, words = WRONG[stem]
    assert words in EXPECTED[stem](SimpleNamespace(**answer))


class Divide(lesson_tools.load(lesson_tools.SOLUTIONS["11_broadcasting"]).Divide):
    """Its gradients have the shape of the output; the engine sums them."""

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return g / y, -g * x / y**2


class SumsFixedDimensions(Divide):
    """Right for shapes (n, 1) and (m,) only."""

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return (g / y).sum(-1, keepdim=True), (-g * x / y**2).sum(0)


class WritesToTheCotangent(lesson_tools.load(lesson_tools.SOLUTIONS["01_square"]).Sine):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g.mul_(x.cos())


class CumulatesRows(lesson_tools.load(lesson_tools.SOLUTIONS["13_sum"]).CumulativeSum):
    """Uses the second dimension where the last is meant."""

    @staticmethod
    def backward(ctx, g):
        return g.flip(1).cumsum(1).flip(1)


MADE_OF_TORCH = "is made without a Function: expected one with a backward of its own"
CONDUCT = {
    "unreduced": ("11_broadcasting", {"Divide": Divide}, r"gradient of shape \(.*\) for input \d of shape"),
    "fixed dimensions": ("11_broadcasting", {"Divide": SumsFixedDimensions}, "for inputs of shape .*reverse raises"),
    "written to": ("01_square", {"Sine": WritesToTheCotangent}, "the backward of .* writes to the incoming gradient"),
    "other rank": ("13_sum", {"CumulativeSum": CumulatesRows}, r"for inputs of shape \(4,\), reverse raises"),
    "sine": ("01_square", {"Sine": torch.sin}, f"Sine {MADE_OF_TORCH}"),
    "root": ("04_sinh", {"root_of_one_plus_square": lambda x: (1 + x * x).sqrt()}, MADE_OF_TORCH),
    "sort": ("15_max", {"Sort": lambda x: tuple(torch.sort(x, -1))}, MADE_OF_TORCH),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("case", CONDUCT)
def test_judge_rejects_answers_that_autograd_repairs(case):
    stem, answer, words = CONDUCT[case]
    assert re.search(words, EXPECTED[stem](SimpleNamespace(**answer)))


IN_ONE_SENTENCE = {
    "one output": ("15_max", "def Sort(x): return x.sort(-1)[0]", "Sort returns 1 output, expected 2"),
    "no output": ("01_square", "def Sine(x): pass", "Sine returns NoneType, expected a tensor"),
    "raises": ("01_square", "def Sine(x): raise ZeroDivisionError('zero')", "Sine raises ZeroDivisionError: zero"),
    "raises elsewhere": (
        "23_doubled_tangent",
        "def transposed(function, x): raise KeyError(1)",
        "judging it raises KeyError: 1",
    ),
    "missing": ("21_once_differentiable", "", "LoudSine is missing"),
    "syntax": ("01_square", "def Sine(x) return x", "running it raises SyntaxError"),
    "its own file": ("01_square", "open('/nowhere/at/all')", "running it raises FileNotFoundError"),
}


@pytest.mark.parametrize("case", IN_ONE_SENTENCE)
def test_judge_complains_in_one_sentence(case, tmp_path):
    stem, text, words = IN_ONE_SENTENCE[case]
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert judge.complaint(stem, path).startswith(words)


def test_judge_reports_missing_file(tmp_path):
    for path in (tmp_path / "nope.py", tmp_path, tmp_path / "nope"):
        assert judge.complaint("01_square", path) == "there is no such file; give the Python file with your answer"


def test_judge_reports_missing_function():
    assert EXPECTED["01_square"](SimpleNamespace()) == "Sine is missing"


@pytest.mark.slow
def test_judge_rejects_batching_rule_that_ignores_the_batch():
    compiled("39_cpp_operator")
    operator = lesson_tools.lesson(39).load_operator()
    answer = SimpleNamespace(batching_rule=lambda info, in_dims, x, n: (operator(x, n), 0))
    assert "with the batch at 1" in EXPECTED["39_cpp_operator"](answer)


def test_judge_command_prints_verdict_and_exit_status(tmp_path, monkeypatch, capsys):
    mine = tmp_path / "mine.py"
    mine.write_text("import torch\n\n\ndef Sine(x):\n    return torch.sin(x + 1e-3)\n")
    for more, status, words in (([], 0, "01_square.py: right\n"), ([str(mine)], 1, "mine.py: Sine returns")):
        monkeypatch.setattr(sys, "argv", ["judge.py", "1", *more])
        assert judge.main() == status
        assert words in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["judge.py", "99"])
    with pytest.raises(SystemExit):
        judge.main()
    assert "number: expected 1 to 41, got 99" in capsys.readouterr().err


ANSWERS = {
    quiz.constant_slope: "0.",
    quiz.penalty: "A wrong number, without a warning.",
    quiz.doubled_tangent: "It passes.",
    quiz.registered_operator: "0.",
    quiz.size_of_a_mask: "1000 bytes.",
    quiz.cannot_save_its_output: "silu.",
    quiz.gradient_of_a_bias: "Their sum over the rows.",
    quiz.logarithm_of_a_sigmoid: "nan.",
    quiz.closed_over_weight: "None: for autograd, the output does not depend on it.",
    quiz.unmarked: "1.",
    quiz.hooked_tangent: "1.",
    quiz.exported_rule: "0.",
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("question", quiz.QUESTIONS, ids=lambda question: question.run.__name__)
def test_quiz_answers_match_running_the_code(question):
    assert question.run() == ANSWERS[question.run]
    assert ANSWERS[question.run] in question.choices
    number = int(re.search(r"Lesson (\d+)\.$", question.why)[1])
    assert any(int(stem[:2]) == number for stem in lesson_tools.LESSONS)


def test_quiz_prints_its_answers(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["quiz.py", "--answers"])
    monkeypatch.setattr(quiz, "QUESTIONS", quiz.QUESTIONS[4:6])
    quiz.main()
    out = capsys.readouterr().out
    assert "2. Which function cannot save its output" in out
    assert "The code returns: silu." in out


def test_quiz_repeats_invalid_replies(monkeypatch):
    for letter, right in (("b", True), ("a", False)):
        replies = iter(["", "x", letter])
        monkeypatch.setattr("builtins.input", lambda prompt, replies=replies: next(replies))
        assert quiz.ask(quiz.QUESTIONS[4]) is right
