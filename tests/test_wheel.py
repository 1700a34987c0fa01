"""Packages that `make wheel` builds: complete, the same from the tree and from the sdist, working when installed.

They are installed into an empty environment, which finds torch, NumPy, SciPy and tqdm in the current environment.
"""

import email
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy
import pytest
import scipy
import torch
import tqdm
from compilers import compiler_works

import hodiff

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SOURCES = ("hodiff", "kernels", "tests")
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "CITATION.cff",
         "constraints.txt", "pytest_hodiff.py")  # fmt: skip
MADE = shutil.ignore_patterns("__pycache__", "*.so", "*.so.json", ".*")
COMPILED = "hodiff/kernels/_fused"

PROGRAM = """
import json, warnings
import torch
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import hodiff, hodiff.kernels, importlib.metadata
    from hodiff.kernels import fused_library

    x, v = torch.linspace(-1, 1, 5, dtype=torch.float64), torch.arange(5, dtype=torch.float64)
    torch.testing.assert_close(hodiff.hvp(lambda y: (y**4).sum() / 12, x, v), x**2 * v)

    report = hodiff.check(hodiff.functions.swish, (x, torch.tensor(1.5, dtype=torch.float64)))
    assert report.ok, str(report)

    rows = torch.linspace(-3, 3, 24).reshape(4, 6).requires_grad_()
    p = hodiff.functions.softmax(rows, -1)
    torch.testing.assert_close(p, torch.softmax(rows, -1))
    (by_rows,) = torch.autograd.grad((p**2).sum(), rows)
    torch.testing.assert_close(by_rows, 2 * p * (p - (p * p).sum(-1, keepdim=True)))
print(json.dumps({
    "hodiff": hodiff.__file__,
    "kernels": list(hodiff.kernels.__path__),
    "version": importlib.metadata.version("hodiff"),
    "compiled": fused_library.available(),
    "warnings": [str(each.message) for each in seen if issubclass(each.category, hodiff.HodiffWarning)],
}))
"""


def build(tree: Path, goal: Path, *options: str, **environment: str) -> Path:
    """Build with the installed setuptools, so that nothing is downloaded."""
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(goal), str(tree)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return goal


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Copy the sources without files built from them."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=MADE)
    for name in FILES:
        shutil.copy2(ROOT / name, tree)
    return tree


@pytest.fixture(scope="module")
def dist(tree, tmp_path_factory):
    """Build the sdist, and the wheel from it, as `make wheel` does."""
    return build(tree, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def wheel(dist):
    (wheel,) = dist.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel_without_compiler(tree, tmp_path_factory):
    folder = tmp_path_factory.mktemp("without_compiler")
    nothing = {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++", "PATH": str(folder)}
    copy = shutil.copytree(tree, folder / "tree", symlinks=True)
    (wheel,) = build(copy, folder / "dist", "--wheel", **nothing).glob("*.whl")
    return wheel


def contents(wheel: Path) -> dict[str, int]:
    """Checksum of each file in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {each.filename: each.CRC for each in archive.infolist()}


def installed(wheel: Path, folder: Path) -> dict:
    """Output of PROGRAM in an environment in which only the wheel is installed."""
    environment, elsewhere = folder / "environment", folder / "empty"
    elsewhere.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    # Only these packages are borrowed. A .pth file leads to hodiff here, and .pth files in these folders are not read.
    places = {str(Path(package.__file__).parents[1]) for package in (torch, numpy, scipy, tqdm)}
    (site_packages / "borrowed.pth").write_text("\n".join(sorted(places)))
    command = [str(python), "-I", "-c", PROGRAM]
    done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    for path in (said["hodiff"], *said["kernels"]):
        assert Path(path).is_relative_to(site_packages), "hodiff comes from the wheel"
    assert said["warnings"] == []
    return said


def test_wheel_works_when_installed(wheel, tmp_path):
    works = compiler_works(tmp_path)
    assert installed(wheel, tmp_path)["compiled"] == works
    assert any(name.startswith(COMPILED) and name.endswith(".so") for name in contents(wheel)) == works


def test_wheel_built_without_compiler_works(wheel_without_compiler, tmp_path):
    assert not [name for name in contents(wheel_without_compiler) if name.startswith(COMPILED)]
    assert installed(wheel_without_compiler, tmp_path)["compiled"] is False


def test_wheel_has_every_file_of_the_packages(wheel):
    """The wheel has every file of hodiff, and of the folder that it links to, except C++ sources and builds."""
    held = {
        path.relative_to(ROOT).as_posix()
        for folder in ("hodiff", "hodiff/kernels")
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and path.suffix not in {".cpp", ".inc"}
        and "_fused." not in path.name
    }
    found = {name for name in contents(wheel) if not name.startswith(COMPILED)}
    information = {name for name in found if ".dist-info/" in name}
    assert {"hodiff/py.typed", "hodiff/kernels/fused.py"} <= held
    assert found - information == held | {"pytest_hodiff.py"}
    assert any(name.endswith("/licenses/LICENSE") for name in information)


def test_wheel_from_the_tree_matches_wheel_from_the_sdist(tree, wheel, tmp_path):
    copy = shutil.copytree(tree, tmp_path / "tree", symlinks=True)
    (from_tree,) = build(copy, tmp_path / "dist", "--wheel").glob("*.whl")
    assert contents(from_tree) == contents(wheel)


def test_sdist_has_build_files_and_no_tests(dist):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {"attention/tiles.cpp", "attention/tiles.inc", "coloring/greedy.cpp", "cross_entropy/rows.cpp"}
    code = {"fused.cpp", *sources, "fused_build.py"}
    needed = {*(f"hodiff/kernels/{each}" for each in code), "hodiff/py.typed", *FILES}
    assert needed <= names
    assert not [name for name in names if name.startswith(("tests", "kernels")) or name.endswith(".so")]


def test_metadata_matches_pyproject(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_string(archive.read(name).decode())
    assert (metadata["Name"], metadata["Version"]) == ("hodiff", hodiff.__version__)
    assert metadata["License-File"] == "LICENSE"
