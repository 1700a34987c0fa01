"""Scripts that reproduce a wrong derivative with torch alone."""

import ast
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten

from hodiff.__main__ import main
from hodiff.audit import reproductions, standalone
from hodiff.audit.call_source import UnwritableError, written_call
from hodiff.audit.reproduction import reproduction, run
from hodiff.checks.mutations.sample import Sample
from hodiff.errors import InputError

D = torch.float64


def operator(call, *args, **kwargs):
    """Return an entry like those of torch's operator database, with one sample."""
    inputs = SimpleNamespace(
        input=args[0].requires_grad_(), args=args[1:], kwargs=kwargs, output_process_fn_grad=lambda x: x
    )
    return SimpleNamespace(
        op=call,
        name="example",
        aten_name="example",
        variant_test_name="",
        supports_autograd=True,
        gradcheck_wrapper=lambda op, *args, **kwargs: op(*args, **kwargs),
        sample_inputs=lambda *_, **__: [inputs],
    )


def sample(call, *leaves) -> Sample:
    flat, structure = tree_flatten(leaves)
    places = tuple(i for i, leaf in enumerate(flat) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return Sample(call, tuple(flat), structure, places)


def printed(script: str) -> list[str]:
    """The output that a script's docstring states."""
    lines = (ast.get_docstring(ast.parse(script)) or "").splitlines()
    return [line[4:] for line in lines if line.startswith("    ")]


def script_of(op) -> str:
    return reproduction(op, count=6, seed=0)["script"]


@pytest.fixture(scope="module")
def script() -> str:
    matrix, scales = torch.tensor([[1.0, 2.0], [-0.5, 3.0]], dtype=D), torch.tensor([0.5, 0.75], dtype=D)
    op = operator(torch.linalg.householder_product, matrix, scales)
    return reproduction(op, count=6, seed=0, smaller=False)["script"]


def test_script_reproduces_a_wrong_second_derivative(script):
    assert "The second derivative of example by reverse-over-forward is wrong." in script
    assert "hodiff" not in script
    lines = run(script)
    assert lines == printed(script)
    assert any(line.startswith("  reverse-over-forward: ") and line.endswith("WRONG") for line in lines)
    assert any(line.startswith("  reverse-over-reverse: ") and not line.endswith("WRONG") for line in lines)


def test_script_has_the_closed_form(script):
    """The product of reflections is a quadratic polynomial of t, whose second difference is its second derivative."""
    names = {}
    exec(script.split("print(f")[0], names)
    left, middle, right = (float(names["f"](torch.tensor(t, dtype=D))) for t in (-1.0, 0.0, 1.0))
    (truth,) = (line.split()[2] for line in printed(script) if line.startswith("order 2"))
    assert abs(left + right - 2 * middle) > 0.1
    assert float(truth) == pytest.approx(left + right - 2 * middle, rel=1e-9)


def test_script_states_an_error():
    raising = script_of(operator(F.hardsigmoid, torch.tensor([0.5, -1.0], dtype=D)))
    assert "raises an error" in raising
    assert any("Error: " in line and "hardsigmoid_backward" in line for line in run(raising))


def test_script_names_the_first_derivative_that_raises_inside_torch_func_alone():
    """`tensor_split` reads its indices, which tensors inside a transform do not show."""
    split = operator(torch.tensor_split, torch.tensor([0.5, -1.0, 2.0], dtype=D), torch.tensor([1]))
    script = script_of(split)
    assert "first derivative of example by reverse raises an error inside torch.func, but not in torch.aut" in script


@pytest.mark.parametrize(
    ("call", "at"),
    [
        (lambda x: torch.linalg.eigh(x + x.mH), [[1.0]]),
        (lambda x: torch.cumprod(x, 0), [0.0]),
        (F.hardsigmoid, [-5.0, 0.5]),
    ],
    ids=["eigh", "cumprod", "hardsigmoid"],
)
def test_derivatives_of_scripts_are_not_zero(call, at):
    (truth,) = (
        line.split()[2] for line in printed(script_of(operator(call, torch.tensor(at, dtype=D)))) if "order 2" in line
    )
    assert abs(float(truth)) > 0.01


def test_right_operators_have_nothing_to_reproduce():
    nothing = script_of(operator(torch.sin, torch.tensor([0.5, -1.0], dtype=D)))
    assert nothing.startswith("# example: right by every route at 1 sample with torch")
    assert not ast.parse(nothing).body
    constant = script_of(SimpleNamespace(name="example", variant_test_name="", supports_autograd=False))
    assert "no sample" in constant


def test_rounding_is_no_reproduction():
    """A constant computed with roundings has derivatives that are roundings."""
    flat = operator(lambda x: F.normalize(x, dim=-1), torch.tensor([[0.3]], dtype=D))
    assert "WRONG" not in "".join(printed(script_of(flat)))


# The call as code


def test_written_call_has_the_calls_of_a_wrapper():
    """Wrappers of the database, such as for symmetric matrices, become lines of code."""

    def wrapped(a, labels):
        values, vectors = torch.linalg.eigh(a + a.mH)
        return values[labels], vectors.abs()

    lines, outputs, changed = written_call(sample(wrapped, torch.eye(2, dtype=D), torch.tensor([1, 0])))
    names = {"torch": torch, "x0": torch.tensor([[1.0, 2.0], [0.0, 5.0]], dtype=D), "x1": torch.tensor([1, 0])}
    exec("\n".join(lines), names)
    expected = wrapped(names["x0"], names["x1"])
    assert len(outputs) == 2
    for each, value in zip(outputs, expected, strict=True):
        torch.testing.assert_close(eval(each, names), value)
    assert not changed


def test_written_call_finds_changes_in_place():
    lines, outputs, changed = written_call(sample(lambda x: x.mul_(2).sin(), torch.ones(2, dtype=D)))
    assert changed == {"x0"}
    assert lines[0].endswith("x0.mul_(2)")
    assert len(outputs) == 1


def test_objects_have_no_code():
    class Odd:
        pass

    with pytest.raises(UnwritableError, match="Odd"):
        written_call(sample(lambda x: F.layer_norm(x, Odd()), torch.ones(2, dtype=D)))


# The functions that scripts copy


def test_differences_are_exact_to_thirteen_digits():
    value, error = standalone.difference(lambda t: torch.exp(2 * t))
    assert value == pytest.approx(2.0, rel=1e-13, abs=0)
    assert 0 < error < 3e-14


def test_report_compares_every_route():
    lines = list(standalone.report(lambda t: torch.exp(2 * t), 3))
    assert len(lines) == 3 + 2 + 4 + 8
    assert not any("WRONG" in line for line in lines)
    assert lines[-1].startswith("  forward-over-forward-over-forward: 8")
    broken = list(standalone.report(lambda t: torch.exp(2 * t) * (t.detach() + 1), 2))
    assert any(line.endswith("WRONG") for line in broken)


def test_values_without_differences_are_not_called_wrong():
    lines = list(standalone.report(lambda t: torch.log(t - 1), 2))
    assert lines[0].startswith("order 1: nan")
    assert not any("WRONG" in line for line in lines)


def test_routes_have_their_modes():
    f = torch.func.grad
    for route in ("reverse", "forward", "reverse-over-forward", "forward-over-reverse"):
        order = route.count("-over-") + 1
        expected = torch.sin
        for _ in range(order):
            expected = f(expected)
        t = torch.tensor(0.3, dtype=D)
        assert float(standalone.differentiate(torch.sin, route)(t)) == pytest.approx(float(expected(t)))


# The command

END = "end of script\n"
RUN_EACH = f"""
import runpy, sys
for file in sys.argv[1:]:
    runpy.run_path(file, run_name="__main__")
    print({END!r}, end="")
assert "hodiff" not in sys.modules
"""


def test_script_needs_an_operator(capsys):
    assert main(["audit", "--script"]) == 2
    assert "--op" in capsys.readouterr().err
    with pytest.raises(InputError, match="samples"):
        reproductions("sin", samples=0)


@pytest.mark.slow
def test_scripts_run_as_printed(tmp_path):
    """The scripts print in an interpreter without hodiff what their docstrings state."""
    names = ["linalg.householder_product", "nn.functional.instance_norm", "linalg.eigh", "cumprod", "ormqr"]
    found = reproductions(names, jobs=1)
    assert set(found) == set(names)
    for name, script in found.items():
        (tmp_path / f"{name}.py").write_text(script, encoding="utf-8")
        assert "import hodiff" not in script
    # One process for all, as the import of torch takes seconds.
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN_EACH, *(f"{name}.py" for name in found)],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    )
    outputs = result.stdout.split(END)
    for (name, script), output in zip(found.items(), outputs[:-1], strict=True):
        got, stated = output.splitlines(), printed(script)
        assert len(got) == len(stated) > 3, name
        for one, other in zip(got, stated, strict=True):
            head, _, rest = one.partition(", relative error")
            assert head.rpartition(": ")[0] == other.partition(", relative error")[0].rpartition(": ")[0]
            assert rest.endswith("WRONG") == other.endswith("WRONG")
