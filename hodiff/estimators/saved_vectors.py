"""Blocks of vectors in a folder, saved by `torch.distributed.checkpoint`, each rank its own part."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hodiff.distributed.exchanges import exchanging
from hodiff.distributed.vectors import reduce_over
from hodiff.errors import InputError
from hodiff.estimators.probes import draw
from hodiff.estimators.view import View

# Number of bytes that are read at once.
_PART = 2**24

# Blocks (n, k) by stage and name.
Blocks = dict[str, dict[str, Tensor]]


class SavedVectors:
    """Vectors of an operator in a folder.

    Args:
        view: The operator.
        folder: The folder of the state.

    Attributes:
        probe: A random vector with elements 1 and -1, (n, 1).
    """

    def __init__(self, view: View, folder: Path):
        self._view, self._folder = view, folder
        self.probe = draw(view, "rademacher", 1, torch.Generator().manual_seed(0))

    def save(self, blocks: Blocks, name: str) -> dict[str, Any]:
        """Save blocks in a subfolder; return what `load` needs."""
        self._move("save", self._leaves(blocks), name)
        return {
            "vectors": name,
            "blocks": {
                stage: {key: [block.shape[1], str(block.dtype), block.stride(1)] for key, block in each.items()}
                for stage, each in blocks.items()
            },
            "checksums": self._checksums(name),
        }

    def load(self, record: dict[str, Any]) -> Blocks:
        """Load the blocks of a record; raise if files are not those that were saved."""
        self._require_files(record["vectors"], record["checksums"])
        blocks = {
            stage: {
                key: self._empty(count, getattr(torch, dtype.removeprefix("torch.")), by_rows=stride == 1)
                for key, (count, dtype, stride) in each.items()
            }
            for stage, each in record["blocks"].items()
        }
        leaves = self._leaves(blocks)
        self._move("load", leaves, record["vectors"])
        self._join(leaves, blocks)
        return blocks

    def _checksums(self, name: str) -> dict[str, int]:
        """Return the checksums of all files, each computed by the rank that wrote it."""
        rank, size = self._place
        files = sorted((self._folder / name).glob(f"__{rank}_*")) + [self._folder / name / ".metadata"] * (not rank)
        own = {each.name: _checksum(each) for each in files}
        if size == 1:
            return own
        every: list[Any] = [None] * size
        with exchanging("exchanging checksums"):
            dist.all_gather_object(every, own, group=self._group)
        return {file: number for each in every for file, number in each.items()}

    def _require_files(self, name: str, checksums: dict[str, int]) -> None:
        """Raise on all ranks if a file was changed, as torch does not check the numbers in its files."""
        reason, (rank, size) = None, self._place
        for file, expected in list(checksums.items())[rank::size]:
            try:
                if _checksum(self._folder / name / file) != expected:
                    reason = f"a changed file {name}/{file}"
            except OSError as error:
                reason = f"no file {name}/{file} ({type(error).__name__})"
        self.require_whole(reason)

    def require_whole(self, reason: str | None) -> None:
        """Raise on all ranks if one of them has a reason why the folder has no whole state."""
        if reason := self.of_any_rank(reason):
            raise self._damaged(reason)

    def of_any_rank(self, reason: str | None) -> str | None:
        """Return a reason to raise if any rank has one."""
        if self._view.shards is None:
            return reason
        failed = torch.tensor([float(reason is not None)], device=self._view.device)
        failed = reduce_over(self._view.shards.mesh, failed)
        return reason or ("an error on another rank, which names the file," if bool(failed) else None)

    def _damaged(self, what: str) -> InputError:
        return InputError(
            f"{self._view.caller}: checkpoint: expected an empty folder, or all files of a state of this version of "
            f"hodiff, got {what} in {self._folder}; restore the files, or pass another folder to start again."
        )

    def unwritable(self, reason: str) -> InputError:
        """Return the error for a state that cannot be saved."""
        return InputError(
            f"{self._view.caller}: checkpoint: expected a folder in which every rank can write, got {reason} in "
            f"{self._folder}; make room, or pass another folder."
        )

    def _move(self, action: str, leaves: dict[str, Tensor], vectors: str) -> None:
        """Save or load tensors by `torch.distributed.checkpoint`, with the ranks of the vectors."""
        if not dist.is_available():
            raise InputError("Checkpoint: expected torch with torch.distributed, got a build without it.")
        import torch.distributed.checkpoint as dcp

        options = {"no_dist": True} if self._view.shards is None else {"process_group": self._group}
        try:
            with exchanging("saving or loading a state"), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is", category=UserWarning)
                getattr(dcp, action)(leaves, checkpoint_id=self._folder / vectors, **options)
        # All ranks raise this exception if one of them cannot read or write. It is no `Exception`.
        except dcp.CheckpointException as error:
            reasons = [f"{type(each).__name__}: {each}".splitlines()[0] for each, _ in error.failures.values()]
            if action == "load":
                raise self._damaged(reasons[0]) from error
            raise self.unwritable(reasons[0]) from error

    @property
    def _group(self) -> Any:
        """The process group of the ranks that have the vectors; None for all ranks."""
        assert self._view.shards is not None
        mesh = self._view.shards.mesh
        if mesh.ndim > 1 and mesh.size() != dist.get_world_size():
            raise InputError(
                f"Checkpoint: expected a device mesh of one dimension or of all ranks, got {mesh} of "
                f"{dist.get_world_size()} ranks; save states on all ranks."
            )
        return mesh.get_group() if mesh.ndim == 1 else None

    @property
    def _place(self) -> tuple[int, int]:
        """This rank, by which torch names its files, and the number of ranks."""
        return (0, 1) if self._view.shards is None else (dist.get_rank(self._group), dist.get_world_size(self._group))

    @property
    def _shapes(self) -> Sequence[torch.Size]:
        view = self._view
        return [torch.Size([view.n])] if view.domain is None else view.domain.shapes

    def _leaves(self, blocks: Blocks) -> dict[str, Tensor]:
        """Return all blocks as tensors (k, *shape), one for each leaf of the operator's vectors."""
        found, shards = {}, self._view.shards
        for stage, named in blocks.items():
            for name, block in named.items():
                if not block.shape[1]:
                    continue
                if shards is not None:
                    leaves = shards.leaves(block, self._shapes)
                else:
                    parts = block.t().split([shape.numel() for shape in self._shapes], 1)
                    leaves = [part.reshape(len(part), *shape) for part, shape in zip(parts, self._shapes, strict=True)]
                found.update({f"{stage}/{name}/{i}": each.contiguous() for i, each in enumerate(leaves)})
        return found

    def _join(self, leaves: dict[str, Any], blocks: Blocks) -> None:
        """Copy leaves to the blocks of which they are parts."""
        for stage, named in blocks.items():
            for name, block in named.items():
                if block.shape[1]:
                    parts = [leaves[f"{stage}/{name}/{i}"] for i in range(len(self._shapes))]
                    local = parts if self._view.shards is None else [each.to_local() for each in parts]
                    shapes = [(len(each), size.numel()) for each, size in zip(local, self._shapes, strict=True)]
                    block.copy_(torch.cat([each.reshape(s) for each, s in zip(local, shapes, strict=True)], 1).t())

    def _empty(self, count: int, dtype: torch.dtype, *, by_rows: bool) -> Tensor:
        """Return a block; a run repeats its rounding only with vectors in the same memory layout."""
        shape = (self._view.n, count) if by_rows else (count, self._view.n)
        block = torch.empty(shape, dtype=dtype, device=self._view.device)
        return block if by_rows else block.t()


def _checksum(file: Path) -> int:
    found = 0
    with file.open("rb") as stream:
        while part := stream.read(_PART):
            found = zlib.crc32(part, found)
    return found
