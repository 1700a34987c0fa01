"""`python -m hodiff check`: its options, its output and its exit status."""

import inspect
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hodiff
from hodiff.__main__ import main
from hodiff.checks import Report
from hodiff.checks.check_options import METHODS
from hodiff.checks.command import check_command
from hodiff.checks.command.targets import load_target

FILE = """
import torch
from torch.autograd import Function


class Right(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


class Doubled(Right):
    @staticmethod
    def backward(ctx, g):
        return 4 * ctx.saved_tensors[0] * g


def scaled(x, factor=1.0):
    return factor * x.sin()


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.inner(x).tanh()


class Sized(torch.nn.Module):
    def __init__(self, size):
        super().__init__()


class Fragile(torch.nn.Module):
    def __init__(self):
        raise RuntimeError("no weights")


class Holder:
    scaled = staticmethod(scaled)


class Doubling(torch.nn.Module):
    def forward(self, x):
        return Doubled.apply(x)


class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Doubling()

    def forward(self, x):
        return {"wave": self.inner(x.sin())}


def mean_of_squares(output):
    return output.square().mean()


def kernel(x):
    assert x.dtype == torch.float32
    return x.sin()


layer = Layer()
number = 3
point = torch.tensor([0.5, 2.0], dtype=torch.float64)


def points():
    return torch.randn(3, 2)


def layer_kernel(x):
    assert x.dtype == torch.float32
    weight, bias = (each.detach().float() for each in layer.inner.parameters())
    return torch.tanh(x @ weight.T + bias)
"""

ROOT = Path(__file__).resolve().parents[3]

QUICK = ["--no-vmap", "--no-scipy", "--order", "1"]


KERNEL = ["checked_functions:kernel", "--inputs", "randn(2)", "--dtype", "float32"]
LAYER = ["checked_functions:layer", "--inputs", "randn(3, 2)"]


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "checked_functions.py"
    path.write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    before = set(sys.modules)
    yield path
    for name in set(sys.modules) - before:
        if tmp_path in Path(getattr(sys.modules[name], "__file__", None) or "/").parents:
            del sys.modules[name]


def run(*arguments):
    return main(["check", *arguments])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("scaled", "randn(3)"),
        ("scaled", "randn(3), 2.0"),
        ("layer", "randn(3, 2)"),
        ("Layer", "randn(3, 2)"),
        ("layer.inner", "randn(3, 2)"),
        ("Holder.scaled", "(randn(2),)"),
        ("scaled", "checked_functions.py:point"),
        ("layer", "checked_functions:points"),
    ],
)
@pytest.mark.parametrize("place", ["checked_functions", "checked_functions.py"])
def test_right_function_exits_with_0(file, capsys, place, name, inputs):
    assert run(f"{place}:{name}", "--inputs", inputs, *QUICK) == 0, capsys.readouterr().out
    assert ": ok" in capsys.readouterr().out.splitlines()[0]


def test_wrong_function_exits_with_1_and_prints_the_finding(file, capsys):
    assert run("checked_functions.py:Doubled", "--inputs", "randn(3)", *QUICK) == 1
    out = capsys.readouterr().out
    assert out.startswith("check of Doubled at float64[3], within corrected(): ")
    assert "HD101" in out


@pytest.mark.slow
def test_options_change_the_report(file, capsys):
    def quantities(*options):
        run("checked_functions:scaled", "--inputs", "randn(2)", "--json", "-", *options)
        report = Report.from_json(capsys.readouterr().out)
        return report, {entry.quantity for entry in report.entries}, {entry.route for entry in report.entries}

    report, named, routes = quantities()
    assert "vs SciPy" in named
    assert "vmap of values" in routes
    assert max(entry.order for entry in report.entries) == 2
    report, named, routes = quantities("--no-scipy", "--no-vmap", "--order", "3", "--dtype", "float32")
    assert "vs SciPy" not in named
    assert "vmap of values" not in routes
    assert max(entry.order for entry in report.entries) == 3
    assert "float32[2]" in report.title


def test_every_option_is_passed_to_check(file, monkeypatch):
    calls = []
    monkeypatch.setattr(
        check_command,
        "check",
        lambda *args, **options: calls.append((args, options)) or Report("f", (), ()),
    )
    run("checked_functions:scaled", "--inputs", "randn(2)")
    switches = ["--seed", "5", "--approximate", "--compile", "--order", "4", "--method", "directions", "--ulps", "3"]
    switches += ["--reference", "checked_functions:scaled", "--loss", "output.square().mean()"]
    switches += ["--torch-alone", "--explore", "--wrt", "inputs", "--fixed", "0,2"]
    switches += ["--autocast", "bfloat16"]
    run("checked_functions:scaled", "--inputs", "randn(2)", *switches)
    (plain, defaults), (seeded, options) = calls
    known = {
        name: each.default
        for name, each in inspect.signature(hodiff.check).parameters.items()
        if each.kind is each.KEYWORD_ONLY
    }
    assert defaults == known
    assert options.pop("reference").__name__ == "scaled"
    assert options.pop("loss")(torch.tensor([1.0, 3.0])) == 5.0
    others = {"order": 4, "compile": True, "seed": 5, "approximate": True, "method": "directions", "ulps": 3.0}
    others |= {"correct": False, "explore": True, "wrt": "inputs", "fixed": (0, 2), "autocast": torch.bfloat16}
    assert options == {name: value for name, value in known.items() if name not in {"reference", "loss"}} | others
    for inputs, seed in ((seeded[1], 5), (plain[1], 0)):
        generator = torch.Generator().manual_seed(seed)
        assert torch.equal(inputs, torch.randn(2, generator=generator, dtype=torch.float64))


def test_method_option_changes_the_errors(file, capsys):
    """Matrices and random directions give different errors."""
    errors = []
    for method in ("matrices", "directions"):
        assert run("checked_functions:scaled", "--inputs", "randn(2)", "--json", "--method", method, *QUICK) == 0
        errors.append([entry.error for entry in Report.from_json(capsys.readouterr().out).entries])
    assert errors[0] != errors[1]


def test_reference_function_judges_a_float32_kernel(file, capsys):
    command = ["--inputs", "randn(3)", "--dtype", "float32", "--reference", "checked_functions:scaled", *QUICK]
    assert run("checked_functions:kernel", *command) == 0, capsys.readouterr().out
    assert "ulps in float32" in capsys.readouterr().out
    # No sine is accurate to a thousandth of its rounding.
    assert run("checked_functions:kernel", *command, "--ulps", "0.001") == 1
    assert "HD113" in capsys.readouterr().out
    assert run("checked_functions:Right", *command) == 1


def test_reference_module_judges_a_float32_module(file, capsys):
    command = ["--inputs", "randn(3, 2)", "--dtype", "float32", "--reference", "checked_functions:layer", *QUICK]
    assert run("checked_functions:layer_kernel", *command) == 0, capsys.readouterr().out


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "loss",
    [
        "output.square().mean()",
        "mse_loss(output, randn(3, 1))",
        "(output[0, 0] - 2 * output[1:].sum()) ** 2 / 3",
        "-(output.T @ ones(3, 1)).sum()",
        "checked_functions:mean_of_squares",
        "checked_functions.py:mean_of_squares",
    ],
)
def test_loss_option_takes_an_expression_or_a_name(file, capsys, loss):
    """The loss is an expression or the name of a function."""
    assert run("checked_functions:layer", "--inputs", "randn(3, 2)", "--loss", loss, *QUICK) == 0
    out = capsys.readouterr().out
    assert "differentiated by 3 numbers in parameters and 6 in inputs" in out


def test_loss_of_a_dict_output_finds_the_wrong_submodule(file, capsys):
    command = ["--inputs", "randn(3, 2)", "--loss", "output['wave'].mean()", *QUICK]
    assert run("checked_functions:Outer", *command) == 1
    assert "submodule inner (Doubling)" in capsys.readouterr().out


@pytest.mark.slow
def test_compile_option_takes_a_backend(file, capsys):
    status = run("checked_functions:scaled", "--inputs", "randn(2)", "--compile", "eager", "--no-scipy", "--json")
    report = Report.from_json(capsys.readouterr().out)
    assert status == 0, str(report)
    assert "compile" in {entry.route for entry in report.entries}


def test_seed_determines_the_report(file, capsys):
    reports = []
    for seed in ("1", "1", "2"):
        run("checked_functions:layer", "--inputs", "randn(2)", "--json", "--seed", seed, *QUICK)
        reports.append(capsys.readouterr().out)
        sys.modules.pop("checked_functions")
    assert reports[0] == reports[1] != reports[2]


def test_json_file_is_written_beside_the_text(file, tmp_path, capsys):
    path = tmp_path / "report.json"
    assert run("checked_functions:scaled", "--inputs", "randn(2)", "--json", str(path), *QUICK) == 0
    assert str(Report.from_json(path.read_text())) + "\n" == capsys.readouterr().out
    assert json.loads(path.read_text())["ok"] is True


def test_explore_option_counts_explored_inputs(file, capsys):
    arguments = (f"{file}:scaled", "--inputs", "randn(2)", "--order", "1", "--no-vmap", "--no-scipy", "--explore")
    assert run(*arguments) == 0
    assert "explored 14 inputs around the given one" in " ".join(capsys.readouterr().out.split())


def test_approximate_option_replaces_the_finding_by_a_note(file, capsys):
    run("checked_functions:Doubled", "--inputs", "randn(3)", "--approximate", *QUICK)
    out = capsys.readouterr().out
    assert "HD101" not in out
    assert "HD902" in out


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checked_functions", "--inputs", "randn(2)"], "expected package.module:Name or path/to/file.py:Name"),
        (["nowhere.at_all:f", "--inputs", "randn(2)"], "no module 'nowhere'.*at_all.py:Name"),
        (["nowhere.py:f", "--inputs", "randn(2)"], "no file 'nowhere.py'"),
        (["checked_functions:scald", "--inputs", "randn(2)"], "has no 'scald'. It has .*scaled"),
        (["checked_functions:Holder.f", "--inputs", "randn(2)"], "'Holder' has no 'f'. It has scaled"),
        (["checked_functions:number", "--inputs", "randn(2)"], "is of type int; expected a torch.autograd.Function"),
        (["checked_functions:Holder", "--inputs", "randn(2)"], "is the class Holder; expected"),
        (["checked_functions:Sized", "--inputs", "randn(2)"], "needs arguments: size"),
        (["checked_functions:Fragile", "--inputs", "randn(2)"], "RuntimeError: no weights"),
        (["checked_functions:scaled", "--inputs", "randn(2"], r"--inputs: 'randn\(2' raises SyntaxError"),
        (["checked_functions:scaled", "--inputs", "checked_functions:nothing"], "--inputs: .* has no 'nothing'"),
        (["checked_functions:scaled", "--inputs", "3"], "at least one floating-point tensor"),
        (["checked_functions:Layer", "--inputs", "randn(5)"], "expected Layer.* to run, but .* raised"),
        (["checked_functions:scaled", "--inputs", "randn(2)", "--order", "0"], "order: expected an int of 1 or more"),
        (["checked_functions:scaled", "--inputs", "randn(2)", "--dtype", "int64"], "--dtype: expected one of float64"),
        (
            ["checked_functions:scaled", "--inputs", "randn(2)", "--method", "full"],
            "method: expected one of 'auto', 'directions', 'matrices', got 'full'",
        ),
        (
            ["checked_functions:scaled", "--inputs", "randn(2)", "--ulps", "2"],
            "ulps: expected None without a reference",
        ),
        (
            [*KERNEL, "--reference", "checked_functions:scaled", "--ulps", "-1"],
            "ulps: expected a positive finite number or None, got -1.0",
        ),
        ([*KERNEL, "--reference", "checked_functions:scald"], "--reference: .* has no 'scald'. It has .*scaled"),
        ([*KERNEL, "--reference", "checked_functions"], "--reference: expected package.module:Name"),
        ([*KERNEL, "--reference", "checked_functions:mean_of_squares"], "reference: expected outputs of shape"),
        ([*KERNEL, "--reference", "checked_functions:kernel"], "reference: expected kernel.* AssertionError"),
        ([*KERNEL, "--reference", "checked_functions:scaled", "--approximate"], "approximate: expected False"),
        (
            ["checked_functions:scaled", "--inputs", "randn(2)", "--loss", "output.sum()"],
            "loss: expected None unless f",
        ),
        ([*LAYER, "--loss", "output.sum("], r"--loss: 'output.sum\(' raises SyntaxError"),
        ([*LAYER, "--loss", "randn(2).sum()"], "--loss: .* raises NameError: the loss does not use 'output'"),
        ([*LAYER, "--loss", "output + target"], "--loss: 'output \\+ target' raises NameError: name 'target'"),
        (
            [*LAYER, "--loss", "mse_loss(output, randn(7))"],
            r"--loss: 'mse_loss\(output, randn\(7\)\)' raises .*\(3, 1\)",
        ),
        ([*LAYER, "--loss", "output.logits.sum()"], r"--loss: 'output.logits.sum\(\)' raises AttributeError.*\(3, 1\)"),
        ([*LAYER, "--loss", "nowhere:loss"], "--loss: there is no module 'nowhere'"),
        (
            ["checked_functions:scaled", "--inputs", "randn(2)", "--json", "nowhere/report.json", *QUICK],
            "cannot write 'nowhere/report.json'",
        ),
    ],
)
def test_unusable_targets_and_options_exit_with_2(file, capsys, arguments, message):
    assert run(*arguments) == 2
    written = capsys.readouterr().err
    assert written.startswith("hodiff: check: ")
    assert re.search(message, written), written


def test_non_numeric_ulps_exits_with_2(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["check", "torch:sin", "--inputs", "randn(2)", "--ulps", "many"])
    assert caught.value.code == 2
    assert "invalid float value: 'many'" in capsys.readouterr().err


def test_target_module_that_fails_to_import_exits_with_2(file, capsys):
    (file.parent / "broken_functions.py").write_text("import hodiff_has_no_such_module")
    for target in ("broken_functions:f", "broken_functions.py:f"):
        assert run(target, "--inputs", "randn(2)") == 2
        assert "No module named 'hodiff_has_no_such_module'" in capsys.readouterr().err


def test_missing_inputs_prints_usage(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["check", "torch:sin"])
    assert caught.value.code == 2
    assert "--inputs" in capsys.readouterr().err


def test_target_file_may_import_a_neighbour(file):
    folder = file.parent / "folder"
    folder.mkdir()
    (folder / "checked_neighbour.py").write_text("def twice(x):\n    return 2 * x\n")
    (folder / "checked_importer.py").write_text("from checked_neighbour import twice\n")
    assert load_target("folder/checked_importer.py:twice")(3) == 6


def test_target_file_may_share_the_name_of_an_imported_module(file):
    """The named file is loaded, and the imported module of that name is unchanged."""
    (file.parent / "hodiff.py").write_text("def mine(x):\n    return x\n")
    assert load_target("hodiff.py:mine")(3) == 3
    assert sys.modules["hodiff"] is hodiff


def test_runs_as_a_script(file, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["hodiff", "check", "checked_functions:Doubled", "--inputs", "randn(3)", *QUICK])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(inspect.getfile(main), run_name="__main__")
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "HD101" in out
    assert "\x1b" not in out


@pytest.mark.slow
def test_runs_as_a_process(file):
    command = [sys.executable, "-m", "hodiff", "check", "checked_functions:Doubled", "--inputs", "randn(3)", *QUICK]
    done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "HD101" in done.stdout
    assert "\x1b" not in done.stdout


def test_help_names_the_methods_and_forms_of_inputs(capsys):
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in (*METHODS, "torch.nn.functional", "path/to/file.py:Name"))


GUIDE = ROOT / "docs" / "guides" / "checking.md"


@pytest.mark.one_in(6)
@pytest.mark.parametrize("command", re.findall(r"(?m)^\$ python -m hodiff (.*)$", GUIDE.read_text()))
def test_commands_of_the_guide_succeed(command, tmp_path, capsys):
    arguments = [
        str(ROOT / word) if word.startswith("examples/") else str(tmp_path / word) if word.endswith(".json") else word
        for word in shlex.split(command)
    ]
    assert main(arguments) == 0, capsys.readouterr().out
    assert all(path.is_file() for path in map(Path, arguments) if path.suffix == ".json")
