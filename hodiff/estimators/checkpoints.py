"""States of long computations in a folder, from which any number of ranks resumes."""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hodiff.common.options import require_int
from hodiff.common.trees import describe
from hodiff.distributed.vectors import reduce_over
from hodiff.errors import HodiffWarning, InputError, levels_to_the_caller
from hodiff.estimators.results import precise
from hodiff.estimators.saved_vectors import SavedVectors
from hodiff.estimators.view import View

FILE = "state.json"
FORMAT = 3


@dataclass(frozen=True)
class Checkpoint:
    """Folder for the state of a long computation: `checkpoint=` of `eigsh`, `solve` and `spectral_density`.

    The state is saved every few products. The same call resumes from a folder that has a state, also on another number
    of ranks, and returns the numbers of an uninterrupted run up to rounding. Vectors are saved by
    `torch.distributed.checkpoint`, each rank its own part. One product with a random vector compares the operator with
    that of the saved run. A new state replaces the old one when it is complete, so that an interrupted save does no
    harm. Missing, truncated and changed files raise an `InputError`, by their checksums; if `state.json` itself is
    missing, the run starts again, with a warning if the folder has vectors. A finished run leaves its last state;
    delete the folder to start again.

    Args:
        folder: The folder, created if needed; for several ranks on a file system that they share. Each call needs its
            own.
        every: Number of products between two states, 1 or more. A state of `eigsh` has all vectors that Lanczos keeps,
            a state of `solve` four for each column; to save it takes as much memory again.

    Raises:
        InputError: If `folder` is no path, or `every` no positive int.

    Example:
        >>> import tempfile, torch
        >>> from hodiff.estimators import Checkpoint, solve
        >>> A, b = torch.diag(torch.arange(1.0, 90)), torch.ones(89)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     first = solve(A, b, checkpoint=Checkpoint(folder, every=10))
        ...     again = solve(A, b, checkpoint=folder)
        >>> first.iterations == again.iterations, bool((first.value == again.value).all())
        (True, True)
    """

    folder: str | Path
    every: int = 50

    def __post_init__(self) -> None:
        if not isinstance(self.folder, (str, Path)):
            raise InputError(f"Checkpoint: folder: expected a path, got {describe(self.folder)}.")
        require_int("Checkpoint", "every", self.every, 1)


@dataclass
class State:
    """State of a stage: numbers that JSON represents, and blocks of vectors (n, k)."""

    numbers: dict[str, Any]
    blocks: dict[str, Tensor] = field(default_factory=dict)


Keep = Callable[[Callable[[], State]], None]
Stage = Callable[[State | None, Keep], State]


class Stages:
    """Stages of a computation, which resumes in the stage that was interrupted.

    Args:
        view: Operator of the computation.
        checkpoint: The user's option; None saves nothing.
        call: Options that a resumed call must repeat.
        given: Blocks of vectors that a resumed call must repeat.
        generator: Source of the random numbers drawn within stages.

    Raises:
        InputError: If the folder has a state of another call or operator.
    """

    def __init__(
        self,
        view: View,
        checkpoint: Checkpoint | str | Path | None = None,
        call: dict[str, Any] | None = None,
        given: dict[str, Tensor] | None = None,
        generator: torch.Generator | None = None,
    ):
        self._view, self._generator = view, generator
        self._finished: dict[str, State] = {}
        self._interrupted: tuple[str, State] | None = None
        self._folder: Path | None = None
        if checkpoint is None:
            return
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = Checkpoint(checkpoint)
        if view.shards is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise InputError(
                f"{view.caller}: checkpoint: expected one process or sharded parameters, got {dist.get_world_size()} "
                "ranks with whole vectors each, whose states could differ; pass DTensors with placement Replicate."
            )
        self._folder, self._every, self._last = Path(checkpoint.folder), checkpoint.every, view.products
        self._vectors = SavedVectors(view, self._folder)
        self._image = view.matmat(self._vectors.probe)
        own = {"caller": view.caller, "n": view.total, "dtype": str(view.dtype), **(call or {})}
        if generator is not None:
            own["generator"] = f"state {zlib.crc32(generator.get_state().numpy().tobytes())}"
        self._call = {
            **own,
            **{
                name: (precise(view.gram(self._vectors.probe, block))[0]).tolist()
                for name, block in (given or {}).items()
            },
        }
        sizes = {name: view.norms(block).tolist() for name, block in (given or {}).items()}
        saved = self._read()
        if saved is not None:
            self._require_call(saved["call"], sizes)
            self._load(saved)

    def stage(self, name: str, compute: Stage) -> State:
        """Compute a stage, resume it, or return its result from the state."""
        if name in self._finished:
            return self._finished[name]
        start = None
        if self._interrupted is not None and self._interrupted[0] == name:
            start, self._interrupted = self._interrupted[1], None
        result = compute(start, lambda state: self._keep(name, state))
        if self._folder is not None:
            self._finished[name] = result
        return result

    def _keep(self, name: str, state: Callable[[], State]) -> None:
        if self._folder is not None and self._view.products - self._last >= self._every:
            self._save(name, state())
            self._last = self._view.products

    def _save(self, current: str, state: State) -> None:
        """Write vectors, then replace the file that names their folder, then delete older vectors."""
        assert self._folder is not None
        view, stages = self._view, {**self._finished, current: state}
        vectors = f"products-{view.products}"
        blocks = {"probe": {"image": self._image}, **{name: each.blocks for name, each in stages.items()}}
        saved = self._vectors.save(blocks, vectors)
        record = {
            "format": FORMAT,
            "call": self._call,
            "products": view.products,
            **saved,
            "current": current,
            "generator": None if self._generator is None else self._generator.get_state().tolist(),
            "numbers": {name: each.numbers for name, each in stages.items()},
        }
        error: OSError | None = None
        if self._first_rank:
            try:
                new = self._folder / f"{FILE}.new"
                new.write_text(json.dumps({**record, "checksum": _checksum(record)}))
                os.replace(new, self._folder / FILE)
            except OSError as caught:
                error = caught
            else:
                for each in self._folder.glob("products-*"):
                    if each.name != vectors:
                        shutil.rmtree(each, ignore_errors=True)
        if reason := self._vectors.of_any_rank(None if error is None else str(error)):
            raise self._vectors.unwritable(reason) from error

    def _read(self) -> dict[str, Any] | None:
        """Read the record; all ranks must find the same one."""
        assert self._folder is not None
        record, reason = None, None
        try:
            record = json.loads((self._folder / FILE).read_bytes())
            if record.pop("checksum") != _checksum(record):
                reason = f"a changed file {FILE}"
            elif record["format"] != FORMAT:
                reason = f"a file {FILE} of another version"
        except (FileNotFoundError, NotADirectoryError):
            rest = sorted(each.name for each in self._folder.glob("products-*"))
            if rest and self._first_rank:
                warnings.warn(
                    f"{self._view.caller}: checkpoint: the folder {self._folder} has {rest[-1]} and no {FILE}, so the "
                    "run starts again. A run that was interrupted while it saved its first state leaves such a folder; "
                    "otherwise stop, and restore the file.",
                    HodiffWarning,
                    stacklevel=levels_to_the_caller(),
                )
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            reason = f"a file {FILE} that is no state ({type(error).__name__})"
        self._vectors.require_whole(reason)
        if self._view.shards is not None:
            found = torch.tensor([-1 if record is None else record["products"]], device=self._view.device)
            least, most = (int(reduce_over(self._view.shards.mesh, found.clone(), each)) for each in ("MIN", "MAX"))
            if least != most:
                raise InputError(
                    f"{self._view.caller}: checkpoint: expected a folder on a file system that all ranks share, got "
                    f"{self._folder}, in which ranks find different states; pass another folder."
                )
        return record

    def _require_call(self, saved: dict[str, Any], sizes: dict[str, list[float]]) -> None:
        """Raise if options or vectors differ from those of the saved run."""
        for name in dict.fromkeys([*self._call, *saved]):
            before, now = saved.get(name), self._call.get(name)
            if name in sizes and isinstance(before, list) and len(before) == len(sizes[name]):
                tolerance = self._view.rounding**0.5
                if all(abs(a - b) <= tolerance * c for a, b, c in zip(before, now or [], sizes[name], strict=True)):
                    continue
                before, now = "a vector", "another one"
            if before != now:
                raise InputError(
                    f"{self._view.caller}: checkpoint: expected the call whose state is in {self._folder}, got another "
                    f"{name}: {now} instead of {before}; repeat the call, or pass another folder."
                )

    def _load(self, record: dict[str, Any]) -> None:
        """Read all stages, and compare the operator's product with that of the saved run."""
        view = self._view
        blocks = self._vectors.load(record)
        self._require_operator(blocks.pop("probe")["image"])
        stages = {name: State(numbers, blocks.get(name, {})) for name, numbers in record["numbers"].items()}
        current = record["current"]
        self._interrupted, self._finished = (current, stages.pop(current)), stages
        if self._generator is not None:
            self._generator.set_state(torch.tensor(record["generator"], dtype=torch.uint8))
        if view.bar is not None:
            view.bar.update(record["products"])
        view.products += record["products"]
        self._last = view.products

    def _require_operator(self, image: Tensor) -> None:
        view = self._view
        size, rounding, measured = view.norms(image).item(), view.rounding, view.measured
        gap = view.norms(precise(self._image) - precise(image)).item()
        agrees = gap <= rounding**0.5 * size or (view.finds_coarser() and gap <= view.rounding**0.5 * size)
        # The computation measures the rounding itself, where it did so before.
        view.rounding, view.measured = rounding, measured
        if not agrees:
            raise InputError(
                f"{view.caller}: checkpoint: A: expected the operator whose state is in {self._folder}, got one whose "
                f"product with a vector differs by {gap / size if size else gap:.2g}; restore parameters and data, or "
                "pass another folder."
            )

    @property
    def _first_rank(self) -> bool:
        shards = self._view.shards
        return shards is None or int(shards.mesh.mesh.flatten()[0]) == dist.get_rank()


def _checksum(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record).encode())
