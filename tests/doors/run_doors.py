"""Test hodiff inside other programs, each in an environment of its own, and write the versions to a page.

    python tests/doors/run_doors.py [--quick] [DOOR ...]

A door is a folder beside this file with a `requirements.txt`. Its environment, `.venv-doors/DOOR`, sees the packages of
the interpreter that runs this script and this checkout of hodiff; pip adds the requirements, within the repository's
constraints but for packages that the requirements name. The doctests of `hodiff/doors/DOOR.py` belong to the tests of
the door.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
PAGE = ROOT / "docs" / "reference" / "doors.md"
DOORS = sorted(each.parent.name for each in HERE.glob("*/requirements.txt"))
# The usual options ignore the adapters, which import programs that the usual environment lacks.
OPTIONS = "--strict-markers --strict-config --doctest-modules --import-mode=importlib -ra -p no:logging"
# Other programs warn of their own; warnings of hodiff are errors here too.
WARNINGS = "default\nerror::hodiff.HodiffWarning"
ROW = re.compile(r"^\| `([^`]+)` \|.*\n", re.MULTILINE)


def name_in(line: str) -> str:
    """Return the name of the package in a line of requirements; "" in a comment."""
    return re.split(r"[^\w.-]", line)[0].lower()


def environment(door: str) -> Path:
    """Create or update the environment of a door, and return its interpreter."""
    folder = ROOT / ".venv-doors" / door
    python = folder / "bin" / "python"
    requirements = HERE / door / "requirements.txt"
    visible = f"{ROOT}\n{sysconfig.get_paths()['purelib']}\n"
    wanted = requirements.read_text() + CONSTRAINTS.read_text() + visible
    stamp = folder / "installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    venv.create(folder, with_pip=True, clear=True)
    (next(folder.glob("lib/python*/site-packages")) / "visible.pth").write_text(visible)
    # A program may require another version than the repository's.
    own = {name_in(line) for line in requirements.read_text().splitlines()}
    constraints = folder / "constraints.txt"
    constraints.write_text(
        "".join(line for line in CONSTRAINTS.read_text().splitlines(keepends=True) if name_in(line) not in own)
    )
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--constraint", constraints, "--requirement", requirements], check=True)
    stamp.write_text(wanted)
    return python


def versions(python: Path, door: str) -> str:
    """Return the versions of the required packages, of torch and of Python."""
    lines = (HERE / door / "requirements.txt").read_text().splitlines()
    names = [name for line in lines if (name := name_in(line))]
    code = (
        "import sys, platform, importlib.metadata as m\n"
        "versions = [f'{n} {m.version(n).partition(chr(43))[0]}' for n in sys.argv[1:]]\n"
        "print(', '.join(versions), '| Python', '.'.join(platform.python_version_tuple()[:2]))"
    )
    output = subprocess.run([python, "-c", code, *names, "torch"], check=True, capture_output=True, text=True)
    return output.stdout.strip()


def write_row(door: str, words: str) -> None:
    """Write the row of a door into the table of the page, in the order of the doors' names."""
    text = PAGE.read_text()
    rows = {match[1]: match[0] for match in ROW.finditer(text)}
    rows[door] = f"| `{door}` | {words} |\n"
    head, rule, rest = text.partition("|---|---|---|\n")
    PAGE.write_text(head + rule + "".join(rows[name] for name in sorted(rows)) + ROW.sub("", rest))


def report(words: str) -> None:
    """Write a line at once."""
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def tested(door: str, quick: bool) -> bool:
    """Run the tests of a door; if all of them pass, write its row."""
    started = time.monotonic()
    python = environment(door)
    module = Path("hodiff/doors", f"{door}.py")
    paths = [Path("tests/doors", door), *([module] if (ROOT / module).exists() else [])]
    command = [python, "-m", "pytest", "-q", "-o", f"addopts={OPTIONS}", "-o", f"filterwarnings={WARNINGS}"]
    selected = ["-m", "not slow"] if quick else []
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HODIFF_DOOR": door}
    report(f"{door}: {versions(python, door)}")
    passed = not subprocess.run([*command, *selected, *paths], cwd=ROOT, env=surroundings).returncode
    if passed and not quick:
        write_row(door, versions(python, door))
    report(f"{door}: {'passed' if passed else 'FAILED'}, {time.monotonic() - started:.0f} s")
    return passed


def main() -> None:
    """Test the named doors, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("doors", nargs="*", metavar="DOOR", help=f"one of {', '.join(DOORS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="skip slow tests, and leave the page as it is")
    options = parser.parse_args()
    if unknown := set(options.doors) - set(DOORS):
        parser.error(f"expected doors of {', '.join(DOORS)}, got {', '.join(sorted(unknown))}")
    failed = [door for door in options.doors or DOORS if not tested(door, options.quick)]
    sys.exit(f"FAILED: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
