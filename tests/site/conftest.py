"""Fixtures: the site from `make docs` if it is up to date, or built here; and a browser."""

import functools
import os
import shutil
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "site" / "html"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Sources of the pages.
SOURCES = ("docs", "hodiff", "examples", "papers", "benchmarks/results", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")


def newest_change(paths):
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*"))]
    return max(file.stat().st_mtime for file in files if file.is_file() and "__pycache__" not in file.parts)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """Return the folder of the built site."""
    front = BUILT / "index.html"
    if front.exists() and front.stat().st_mtime > newest_change([ROOT / each for each in SOURCES]):
        return BUILT
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "site_builder", "--output", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "docs")}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "html"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="session")
def address(site):
    """Serve the site on this machine, and return the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="session")
def browser():
    """Start the machine's Chromium without a window."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, address):
    """Open a new page; errors in the console and requests to other machines fail the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    wrong = []
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.on(
        "request", lambda sent: None if sent.url.startswith((address, "data:", "file:")) else wrong.append(sent.url)
    )
    yield page
    context.close()
    assert not wrong, wrong
