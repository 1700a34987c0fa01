"""The pytest plugin, in separate pytest processes."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch

import hodiff
from hodiff.checks import Report

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[2]

INI = """
[pytest]
hodiff_order = 1
hodiff_vmap = false
hodiff_scipy = off
"""

FUNCTIONS = """
import pytest, torch, hodiff

X = torch.tensor([0.5, 2.0], dtype=torch.float64)

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x**2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return 4 * ctx.saved_tensors[0] * g
"""

# A stand-in for hodiff, whose import takes seconds. Its check finds a warning only, and the title says how it was
# called.
STUB = """
import sys
from types import ModuleType, SimpleNamespace

WASTE = SimpleNamespace(code="HD501", title="for nothing", location="f.py:3", remedy="Ask first.")

def stub(f, inputs, **options):
    return SimpleNamespace(title=f"f with {sorted(options.items())}", warnings=(WASTE,))

for name in ("hodiff", "hodiff.checks", "hodiff.checks.check"):
    sys.modules[name] = ModuleType(name)
sys.modules["hodiff.checks.check"].assert_differentiable = stub
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Return a function that runs pytest on files with this plugin, and with other plugins only if named."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments, ini=INI, **files):
        pytester.makeini(ini)
        pytester.makepyfile(**files)
        return pytester.runpytest_subprocess("-p", "pytest_hodiff", "-p", "no:cacheprovider", *arguments)

    return run


@pytest.mark.slow
def test_outcomes_and_failure_text(run):
    result = run(
        test_functions=FUNCTIONS
        + """
def test_right(hodiff_check):
    report = hodiff_check(torch.sin, X)
    assert max(entry.order for entry in report.entries) == 1

def test_wrong(hodiff_check):
    hodiff_check(Doubled, X)  # by the fixture

def test_wrong_by_name():
    hodiff.assert_differentiable(Doubled, X, order=1, vmap=False, scipy=False)  # by name

def test_no_inputs(hodiff_check):
    hodiff_check(torch.sin, 3)  # an integer
"""
    )
    result.assert_outcomes(passed=1, failed=3)
    text = result.stdout.str()
    for line in (
        "hodiff_check(Doubled, X)  # by the fixture",
        "scipy=False)  # by name",
        "(torch.sin, 3)  # an integer",
    ):
        assert re.search(rf"(?m)^> +.*{re.escape(line)}", text)
    title = r"check of Doubled at float64\[2\], within corrected\(\): \d error"
    assert len(re.findall(rf"(?m)^E +.*CheckError: {title}", text)) == 2
    assert len(re.findall(r"(?m)^E +order  route ", text)) >= 2
    assert re.search(r"(?m)^FAILED test_functions.py::test_wrong - hodiff\S+CheckError: check of Doubled", text)
    assert "InputError: check: inputs: expected at least one floating-point tensor" in text
    # Tracebacks contain lines of the test file only.
    places = re.findall(r"(?m)^(\S+\.py):\d+: ", text)
    assert set(places) == {"test_functions.py"}


def test_options_come_from_call_then_marker_then_ini(run):
    result = run(
        conftest=STUB,
        test_options="""
import pytest

pytestmark = pytest.mark.hodiff(order=4, seed=4)

def options(check, **given):
    return dict(eval(check(None, None, **given).title.removeprefix("f with ")))

def test_module(hodiff_check):
    assert options(hodiff_check) == {"order": 4, "seed": 4, "vmap": False, "scipy": False}

@pytest.mark.hodiff(order=3)
class TestClass:
    def test_class(self, hodiff_check):
        assert options(hodiff_check) == {"order": 3, "seed": 4, "vmap": False, "scipy": False}

    @pytest.mark.hodiff(order=2, vmap=True)
    def test_function(self, hodiff_check):
        assert options(hodiff_check) == {"order": 2, "seed": 4, "vmap": True, "scipy": False}
        assert options(hodiff_check, order=1, compile="eager")["order"] == 1
        assert options(hodiff_check)["order"] == 2
        assert "compile" not in options(hodiff_check)

@pytest.mark.hodiff(3)
def test_positional(hodiff_check):
    pass
""",
    )
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["*test_positional: expected keyword arguments, such as order=3, got (3,).*"])


def test_ini_values_are_read(run):
    values = {"order": "3", "vmap": "no", "compile": "eager", "scipy": "TRUE", "seed": "7", "method": "matrices"}
    ini = "[pytest]\n" + "".join(f"hodiff_{name} = {value}\n" for name, value in values.items())
    read = {"order": 3, "vmap": False, "compile": "eager", "scipy": True, "seed": 7, "method": "matrices"}
    title = f"f with {sorted(read.items())}"
    body = f"def test_all(hodiff_check):\n    assert hodiff_check(None, None).title == {title!r}\n"
    run(ini=ini, conftest=STUB, test_ini=body).assert_outcomes(passed=1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "value"), [("order", "two"), ("vmap", "perhaps")])
def test_rejects_unreadable_ini_values(run, name, value):
    result = run(ini=f"[pytest]\nhodiff_{name} = {value}\n", test_ini="def test_all(hodiff_check):\n    pass\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*hodiff_{name}: expected * in the ini file, got '{value}'."])


WARNED = "def test_a(hodiff_check):\n    hodiff_check(None, None)\n    hodiff_check(None, None)\n"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("processes", [(), ("-p", "xdist", "-n", "1")])
def test_warnings_are_listed_once_and_fail_no_test(run, processes):
    result = run(*processes, conftest=STUB, test_warned=WARNED)
    result.assert_outcomes(passed=1)
    text = result.stdout.str()
    assert "= warnings of hodiff =" in text
    expected = r"test_warned.py::test_a: f with .*: HD501 for nothing \(f.py:3\): Ask first\."
    assert len(re.findall(expected, text)) == 1


def test_no_warnings_print_no_section(run):
    result = run(test_nothing="def test_nothing(hodiff_check):\n    pass\n")
    result.assert_outcomes(passed=1)
    assert "warnings of hodiff" not in result.stdout.str()


@pytest.mark.slow
def test_entry_point_loads_the_plugin_without_torch(pytester, monkeypatch):
    """The distribution is built from the declarations in pyproject.toml."""
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    ((name, module),) = project["project"]["entry-points"]["pytest11"].items()
    assert module in project["tool"]["setuptools"]["py-modules"]
    folder = pytester.mkdir("site")
    information = folder / "hodiff_declared-0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: hodiff-declared\nVersion: 0\n")
    (information / "entry_points.txt").write_text(f"[pytest11]\n{name} = {module}\n")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "")
    pytester.makepyfile(
        """
        import sys

        def test_start(request):
            assert request.config.pluginmanager.has_plugin("hodiff")
            assert not {"torch", "hodiff", "numpy", "scipy"} & set(sys.modules)
        """
    )
    result = pytester.runpytest_subprocess("--strict-markers", "-p", "no:hypothesispytest", "-p", "no:jaxtyping")
    result.assert_outcomes(passed=1)
    assert any(line.startswith("@pytest.mark.hodiff(**options)") for line in markers(pytester))


def markers(pytester):
    return pytester.runpytest_subprocess("--markers").stdout.lines


def test_assertion_returns_the_report():
    report = hodiff.assert_differentiable(torch.sin, torch.tensor([0.5]), order=1, vmap=False, scipy=False)
    assert isinstance(report, Report)
    assert max(entry.order for entry in report.entries) == 1


def test_failed_assertion_is_an_assertion_error_with_the_report(monkeypatch):
    found = hodiff.Finding("reverse", 1, "wrong", "", "mend", code="HD101", title="wrong gradient")
    report = Report("f", (), (found,))
    monkeypatch.setattr(sys.modules["hodiff.checks.check"], "check", lambda f, inputs, **options: report)
    with pytest.raises(AssertionError) as caught:
        hodiff.assert_differentiable(torch.sin, torch.ones(2))
    assert isinstance(caught.value, hodiff.CheckError)
    assert str(caught.value) == str(report)


def test_checks_are_importable_without_pytest():
    assert "pytest" not in Path(sys.modules["hodiff.checks.check"].__file__).read_text()


@pytest.mark.slow
def test_tests_of_the_guide_pass(run):
    """The tests in the guide pass with its ini file."""
    text = (ROOT / "docs" / "guides" / "checking.md").read_text()
    (ini,) = re.findall(r"(?s)```ini\n(.*?)```", text)
    files = [block for block in re.findall(r"(?s)```python\n(.*?)```", text) if "def test_" in block]
    assert len(files) == 2
    assert re.findall(r"(?m)^hodiff_(\w+)", ini) == ["order", "vmap", "compile", "scipy", "seed", "method"]
    result = run(ini=ini, **{f"test_{i}": block for i, block in enumerate(files)})
    result.assert_outcomes(passed=3)
