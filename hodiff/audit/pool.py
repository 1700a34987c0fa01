"""Worker processes of audits, which survive operators that hang or crash, and the requests that they serve."""

from __future__ import annotations

import difflib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tqdm import tqdm

from hodiff.errors import HodiffError, InputError

Request = dict[str, Any]
Reply = dict[str, Any]

# Time limit of a start: importing torch's database takes some seconds, and many minutes on a busy machine.
_STARTING = 1800.0
# Similarity of names that are suggested.
_NEAR = 0.7


class TimedOutError(Exception):
    """Error of a process that did not answer in time, and was killed."""


class DiedError(Exception):
    """Error of a process that ended by itself."""


# Takes a request and its reply, and returns further requests.
Done = Callable[[Request, Reply | TimedOutError | DiedError], Sequence[Request]]


class Worker:
    """Worker process.

    Attributes:
        operators: The names of the database's operators.
    """

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, sys.path))
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hodiff.audit.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            text=True,
        )
        try:
            greeting = self._read(_STARTING)
        except (TimedOutError, DiedError) as error:
            raise HodiffError(f"audit: a worker process did not start: {error}") from error
        if "error" in greeting:
            self.close()
            raise HodiffError(greeting["error"])
        self.operators: list[str] = greeting["operators"]

    def ask(self, request: Request, limit: float) -> Reply:
        """Send a request and wait for its reply, at most `limit` seconds."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise DiedError(str(error)) from error
        return self._read(limit)

    def close(self) -> None:
        """Kill the process."""
        self._complaints.close()
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    continue  # nobody reads the rest

    def _read(self, limit: float) -> Reply:
        assert self._process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(limit, end)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if line:
            reply: Reply = json.loads(line)
            return reply
        self._process.wait()
        last = self._last_complaint()
        self.close()
        if late.is_set():
            raise TimedOutError(f"took more than {limit:g} s")
        raise DiedError(f"the process ended with status {self._process.returncode}{last}")

    def _last_complaint(self) -> str:
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").split("\n")
        return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")


def serve_operators(
    operators: str | Iterable[str] | None,
    requests: Sequence[Request],
    done: Done,
    *,
    jobs: int,
    limit: float,
    progress: bool,
) -> list[str]:
    """Serve each request for every operator that matches the names; return these operators."""
    first = Worker()
    try:
        names = select_operators(operators, first.operators)
    except BaseException:
        first.close()
        raise
    everything = [{"operator": name, **request} for request in requests for name in names]
    with tqdm(total=len(everything), disable=not progress, unit="operator", smoothing=0.05) as bar:

        def answered(request: Request, reply: Reply | TimedOutError | DiedError) -> Sequence[Request]:
            further = done(request, reply)
            bar.update(not further)
            return further

        serve(first, everything, jobs=min(jobs, len(everything)), limit=limit, done=answered)
    return names


def select_operators(wanted: str | Iterable[str] | None, known: Sequence[str]) -> list[str]:
    """Return the operators that match the names, with or without variant and module; all operators for None."""
    if wanted is None:
        return list(known)
    picked: dict[str, None] = {}
    for want in [wanted] if isinstance(wanted, str) else wanted:
        exact = [name for name in known if name == want or name.startswith(f"{want}.")]
        matches = exact or [name for name in known if f".{want}." in f".{name}."]
        if not matches:
            near = difflib.get_close_matches(want, known, cutoff=_NEAR)
            hint = (
                f"Did you mean {', '.join(near)}?"
                if near
                else "Names are like nn.functional.layer_norm, or layer_norm."
            )
            raise InputError(f"audit: operators: torch's database has no {want!r}. {hint}")
        picked.update(dict.fromkeys(matches))
    return list(picked)


def serve(first: Worker, requests: Sequence[Request], *, jobs: int, limit: float, done: Done) -> None:
    """Distribute requests to processes; `done` takes each reply, one at a time, and returns further requests."""
    waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
    for request in requests:
        waiting.put(request)
    lock, stop = threading.Lock(), threading.Event()
    broken: list[BaseException] = []
    died: list[Request] = []

    def work(worker: Worker | None) -> None:
        try:
            while not stop.is_set():
                try:
                    request = waiting.get_nowait()
                except queue.Empty:
                    break
                worker = worker or Worker()
                reply: Reply | TimedOutError | DiedError
                try:
                    reply = worker.ask(request, limit)
                except (TimedOutError, DiedError) as error:
                    worker.close()
                    worker, reply = None, error
                if isinstance(reply, DiedError) and request not in died:
                    died.append(request)  # retry once: the process may have been killed, for example for lack of memory
                    waiting.put(request)
                    continue
                with lock:
                    for following in done(request, reply):
                        waiting.put(following)
        except BaseException as error:
            broken.append(error)
            stop.set()
        finally:
            if worker is not None:
                worker.close()

    threads = [threading.Thread(target=work, args=(first if i == 0 else None,)) for i in range(max(jobs, 1))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        stop.set()
    if broken:
        raise broken[0]
