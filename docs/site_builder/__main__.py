"""Build the site.

python -m site_builder [--output FOLDER]
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from sphinx.cmd.build import build_main

from site_builder.layout import ROOT, SiteError
from site_builder.tree import lay_out


def build(folder: Path) -> int:
    """Lay out the tree and make pages of it, in folder/html; any warning is an error."""
    source, pages = folder / "source", folder / "html"
    for each in (source, pages):
        shutil.rmtree(each, ignore_errors=True)
    lay_out(source)
    options = ["-b", "html", "-j", "2", "-W", "--keep-going", "-q", "-d", str(folder / "doctrees")]
    return int(build_main([*options, str(source), str(pages)]))


def main() -> int:
    """Read the command line and build; the exit status is Sphinx's."""
    parser = argparse.ArgumentParser(prog="python -m site_builder", description="Build the site.")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "site", help="the folder to build in")
    folder = parser.parse_args().output.resolve()
    try:
        status = build(folder)
    except SiteError as error:
        sys.exit(f"docs: {error}")
    if status == 0:
        sys.stdout.write(f"The site: {folder / 'html' / 'index.html'}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
