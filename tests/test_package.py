"""The package as users see it: cost of imports, documentation and metadata."""

import importlib
import importlib.metadata
import importlib.resources
import inspect
import json
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import hodiff

PUBLIC = sorted(
    name for name, value in vars(hodiff).items() if not name.startswith("_") and not isinstance(value, types.ModuleType)
)
HEAVY = {"scipy", "matplotlib", "sklearn", "pandas", "IPython", "jax", "hypothesis", "pytest"}
FUNCTIONS = [name for name in PUBLIC if inspect.isfunction(getattr(hodiff, name))]
CLASSES = [name for name in PUBLIC if inspect.isclass(getattr(hodiff, name))]


def modules_after(statement: str) -> set[str]:
    """Names of the modules that a fresh interpreter has loaded after the statement."""
    script = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow  # the next test covers more
def test_import_loads_no_heavy_package() -> None:
    assert HEAVY & {name.partition(".")[0] for name in modules_after("import hodiff")} == set()


@pytest.mark.slow
def test_import_loads_no_compiler() -> None:
    """Importing hodiff does not import Dynamo, which takes longer than torch."""
    assert "torch._dynamo" not in modules_after("import torch")
    assert "torch._dynamo" not in modules_after("import hodiff, hodiff.functions, hodiff.operators")


@pytest.mark.slow
def test_torch_alone_loads_no_heavy_package() -> None:
    """The other tests assume that torch does not import these modules itself."""
    assert HEAVY & {name.partition(".")[0] for name in modules_after("import torch")} == set()


@pytest.mark.slow
def test_hvp_and_hessian_load_no_heavy_package() -> None:
    statement = (
        "import torch, hodiff\n"
        "x = torch.ones(2)\n"
        "hodiff.hvp(lambda y: (y**3).sum(), x, x); hodiff.hessian_matrix(lambda y: (y**3).sum(), x)"
    )
    assert HEAVY & {name.partition(".")[0] for name in modules_after(statement)} == set()


@pytest.mark.slow
def test_first_use_in_compiled_code_works() -> None:
    """hodiff's wrappers of torch's transforms are installed before a compiler reads them."""
    statement = (
        "import torch, hodiff\n"
        "def slope(x): return torch.func.grad(lambda y: hodiff.laplacian(lambda z: (z**4).sum())(y))(x)\n"
        "print(torch.compile(slope, backend='eager')(torch.ones(2)).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, check=True)
    assert done.stdout == "[24.0, 24.0]\n"


@pytest.mark.slow  # the output of routes is tested below
def test_import_prints_and_warns_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import hodiff"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "route",
    # Each route takes a process; forward mode imports TorchScript's decompositions there, which takes seconds.
    [
        route if route == "reverse-over-reverse" else pytest.param(route, marks=pytest.mark.slow)
        for route in hodiff.ROUTES
    ],
)
def test_routes_run_with_warnings_as_errors(route: str) -> None:
    """Users may turn warnings into errors; torch's own warnings about TorchScript must not break a route."""
    statement = (
        "import torch, hodiff\n"
        f"x = torch.ones(2); print(hodiff.hvp(lambda y: (y**3).sum(), x, x, route={route!r}).tolist())"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", statement], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[6.0, 6.0]", "")


def test_public_names_exist() -> None:
    """Names that tests and guides use exist, and the tables above are not empty."""
    derivatives = {
        "hvp", "hessian", "hessian_matrix", "hessian_diagonal", "jacobian", "directional_derivatives",
    }  # fmt: skip
    assert derivatives <= set(FUNCTIONS)
    assert {"HodiffError", "InputError", "RouteError", "CheckError", "HodiffWarning"} <= set(CLASSES)
    assert set(getattr(hodiff, "__all__", PUBLIC)) <= set(dir(hodiff))


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES])
def test_public_names_are_documented(name: str) -> None:
    value: Any = getattr(hodiff, name)
    documentation = inspect.getdoc(value) or ""
    assert documentation.split("\n")[0].endswith("."), "the first line is one sentence"
    if inspect.isclass(value) and issubclass(value, BaseException):
        return
    assert ">>> " in documentation, "an example that runs"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstrings_explain_every_parameter(name: str) -> None:
    function = getattr(hodiff, name)
    documentation = inspect.getdoc(function) or ""
    missing = [
        parameter
        for parameter in inspect.signature(function).parameters
        if f"\n    {parameter}:" not in documentation
        and f"\n    *{parameter}:" not in documentation
        and f"\n    **{parameter}:" not in documentation
    ]
    assert missing == []
    sections = ["Args:", "Returns:"] if inspect.signature(function).parameters else ["Returns:"]
    assert [section for section in sections if section not in documentation] == []


def test_version_matches_the_metadata() -> None:
    assert hodiff.__version__ == importlib.metadata.version("hodiff")


def test_citation_matches_the_version() -> None:
    """The citation has all fields that Citation File Format 1.2.0 requires."""
    citation = (Path(__file__).parents[1] / "CITATION.cff").read_text(encoding="utf-8")
    said = dict(re.findall(r"^([a-z-]+): *(.*)$", citation, re.MULTILINE))
    assert {"cff-version", "message", "title", "authors"} <= set(said)
    assert (said["cff-version"], said["version"], said["license"]) == ("1.2.0", hodiff.__version__, "MIT")
    assert '- name: "The hodiff developers"' in citation


def test_requirements_are_torch_numpy_scipy_and_tqdm() -> None:
    required = {
        requirement.split(">")[0] for requirement in importlib.metadata.requires("hodiff") if "extra" not in requirement
    }
    assert required == {"torch", "numpy", "scipy", "tqdm"}


def test_package_is_typed() -> None:
    assert importlib.resources.files("hodiff").joinpath("py.typed").is_file()
    for name in FUNCTIONS:
        signature = inspect.signature(getattr(hodiff, name))
        annotations = [parameter.annotation for parameter in signature.parameters.values()]
        assert inspect.Parameter.empty not in [*annotations, signature.return_annotation], name


def test_kernels_package_imports() -> None:
    assert importlib.import_module("hodiff.kernels").__doc__
