"""Exact curvature of a GPT-2 of `transformers`, with parameters and data sharded over the ranks of a process group.

    python examples/sharded_language_model.py                two ranks on a CPU
    python examples/sharded_language_model.py --ranks 4

The script starts its own ranks. `fully_shard` leaves each rank a part of every parameter, and each rank reads its own
batches of lines from the manual of Python's `help`. Lines differ in length: attention masks the padding, and the loss
ignores it. A batch therefore counts with its number of characters that the model predicts. Vectors and the bases of
Lanczos methods are sharded like the parameters. Random vectors depend on the seed alone, so that any number of ranks
prints the same numbers:

    parameters (characters) on each rank: 15,040 (114), 15,040 (105)
    largest eigenvalue of the Hessian        28.2679
    second largest                           25.1017
    Gauss-Newton trace                       136.391
    its standard error                       2.57802
    mean of the Hessian's spectrum        0.00431574
    113 exact products
    influence of 'The "assert" sta'          8.00555
    influence of 'it in the body o'          4.61465

The weights are random, as at the start of training. The mean of the spectrum times the 30,080 parameters is the
Hessian's trace, 130, so two of 30,080 directions have 41 % of it. The trace of the Gauss-Newton matrix, which leaves
out the curvature of the model, is about as large: the curvature here is mostly that of the loss.

K-FAC then predicts the influence of training lines on a new line. Leaving a line out of training is predicted to raise
the loss of the new line by gradient(new)^T (F + damping)^-1 gradient(line) / n, for n characters and F by EKFAC
in all layers with a matrix of their own. One linear system gives u = (F + damping)^-1 gradient(new), sharded
like the parameters. The scores of all lines are one more product with a Hessian: of the losses times weights of the
lines, for the direction u, with respect to the weights.

Source: R. Grosse et al., "Studying large language model generalization with influence functions", 2023, section 3.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call

import hodiff
from hodiff.checks import along_directions
from hodiff.estimators import spectral_density

try:
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.pytorch_utils import Conv1D
except ImportError:
    sys.exit("This example needs a model of transformers: pip install transformers")

Parameters = dict[str, Tensor]
Inputs = dict[str, Tensor]
Batch = tuple[Inputs, Tensor]

CHARACTERS = 128  # ASCII
CONTEXT = 16
BATCHES, LINES = 4, 4  # number of batches on all ranks, and of lines in a batch
IGNORED = -100  # label that cross-entropy ignores
QUERY = "The function returns a new list."
DAMPING = 0.1  # as a share of the mean eigenvalue


def make_model(width: int) -> GPT2LMHeadModel:
    """Return a GPT-2 with two layers and random weights in float64, the same on every rank."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=CHARACTERS, n_positions=CONTEXT, n_embd=width, n_layer=2, n_head=4, use_cache=False, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double()


class Scores(nn.Module):
    """A GPT-2 that maps one batch of inputs to logits (LINES, CHARACTERS, CONTEXT - 1) of next characters."""

    def __init__(self, width: int):
        super().__init__()
        self.model = make_model(width)

    def forward(self, inputs: Inputs) -> Tensor:
        """Compute the logits."""
        logits: Tensor = self.model(**inputs).logits
        return logits[:, :-1].transpose(1, 2).contiguous()  # no view, about which fully_shard warns


def training_lines() -> list[str]:
    """Return the lines of all batches."""
    lines = [line.strip() for text in topics.values() for line in text.splitlines() if len(line.strip()) > 3]
    return lines[:: len(lines) // (BATCHES * LINES)][: BATCHES * LINES]


def batch_of(lines: Sequence[str]) -> Batch:
    """Return characters (lines, CONTEXT) and their attention mask, and the next characters."""
    tokens, mask = torch.zeros(2, len(lines), CONTEXT, dtype=torch.long)
    for row, line in enumerate(lines):
        codes = torch.tensor(list(line.encode("ascii", "replace"))[:CONTEXT])
        tokens[row, : len(codes)], mask[row, : len(codes)] = codes, 1
    return {"input_ids": tokens, "attention_mask": mask}, tokens.where(mask == 1, IGNORED)[:, 1:]


def load_batches(rank: int, ranks: int) -> list[Batch]:
    """Return this rank's batches of LINES lines."""
    lines = training_lines()
    return [batch_of(lines[start : start + LINES]) for start in range(rank * LINES, len(lines), ranks * LINES)]


def predicted(batch: Batch) -> int:
    """Count the characters that the model predicts, without padding."""
    return int((batch[1] != IGNORED).sum())


def multiplied(model: nn.Module) -> Parameters:
    """Return the weights and biases of layers that multiply by a matrix of their own."""
    return {
        name: each
        for name, each in model.named_parameters()
        if isinstance(model.get_submodule(name.rpartition(".")[0]), Conv1D)
    }


def influences(model: Scores, data: list[Batch], query: Batch) -> Tensor:
    """Predict how much the loss of a new line rises if a training line is left out, for each line."""
    ranks, x = dist.get_world_size(), multiplied(model)
    A = hodiff.EKFACOperator(model, F.cross_entropy, x, data=data, fisher="monte-carlo", process_group=dist.group.WORLD)
    damping = DAMPING * A.trace().value / sum(each.numel() for each in x.values())
    F.cross_entropy(model(query[0]), query[1]).backward()  # on every rank
    u = A.inverse(damping=damping) @ {name: each.grad for name, each in x.items()}
    model.zero_grad()

    def weighted(point: tuple[Parameters, Tensor], batch: Batch, weights: slice) -> Tensor:
        logits = functional_call(model, point[0], (batch[0],))
        losses = F.cross_entropy(logits, batch[1], reduction="none").sum(1)
        return losses @ point[1][weights]

    # An ordinary tensor is the same on all ranks, and the function is the mean over ranks.
    none = torch.zeros(BATCHES * LINES, dtype=torch.float64)
    scores = torch.zeros_like(none)
    for number, batch in enumerate(data):
        start = (number * ranks + dist.get_rank()) * LINES
        lines = slice(start, start + LINES)
        scores += hodiff.hvp(weighted, (x, none), (u, none), batch, lines)[1] * ranks
    return scores / sum(map(predicted, load_batches(0, 1)))


def report(ranks: int, width: int) -> None:
    """Compute curvature on every rank, and print it on one."""
    model = Scores(width)

    def loss(parameters: Parameters, batch: Batch) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (batch[0],)), batch[1])

    group, data = dist.group.WORLD, load_batches(dist.get_rank(), ranks)
    if dist.get_rank() == 0:
        whole = {name: each.detach() for name, each in model.named_parameters()}
        few = along_directions(loss, whole, data[0])
        print(hodiff.assert_differentiable(few, torch.zeros(2, dtype=torch.float64), vmap=False).summary)

    for block in model.model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    x: dict[str, Any] = dict(model.named_parameters())  # DTensors
    counts = torch.tensor([sum(map(predicted, data)), sum(each.to_local().numel() for each in x.values())])
    everywhere = [torch.zeros_like(counts) for _ in range(ranks)]
    dist.all_gather(everywhere, counts)

    H = hodiff.HessianOperator(loss, x, data=data, batch_size=predicted, process_group=group)
    G = hodiff.GaussNewtonOperator(model, F.cross_entropy, x, data=data, process_group=group)  # counts as `predicted`
    top = H.eigsh(2, which="LA", tol=1e-5)
    trace = G.trace(method="hutchinson", products=20, generator=torch.Generator().manual_seed(0))
    density = spectral_density(H, samples=4, steps=10, generator=torch.Generator().manual_seed(0))
    scores = influences(model, data, batch_of([QUERY]))
    if dist.get_rank() == 0:
        shares = ", ".join(
            f"{parameters:,} ({characters})" for characters, parameters in torch.stack(everywhere).tolist()
        )
        print(f"parameters (characters) on each rank: {shares}")
        second, first = top.eigenvalues.tolist()
        for name, value in (
            ("largest eigenvalue of the Hessian", first),
            ("second largest", second),
            ("Gauss-Newton trace", trace.value),
            ("its standard error", trace.standard_error),
            ("mean of the Hessian's spectrum", density.mean),
        ):
            print(f"{name:<34}{value:14.6g}")
        print(f"{top.products + trace.products + density.products} exact products")
        for line in scores.topk(2).indices.tolist():
            print(f"influence of {training_lines()[line][:CONTEXT]!r:<22}{scores[line].item():13.6g}")


def run_rank(rank: int, ranks: int, width: int, rendezvous: str) -> None:
    """Join the process group, and compute."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    report(ranks, width)
    dist.barrier()  # No rank exits while another still needs it.
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description="Exact curvature of a fully sharded GPT-2.")
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2, 4), help="number of processes")
    parser.add_argument("--width", type=int, default=32, help="width of the model, which has four heads")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (options.ranks, options.width, str(Path(folder) / "rendezvous")), options.ranks)


if __name__ == "__main__":
    main()
