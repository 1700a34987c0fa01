"""Measure EK-FAC scores of kronfluence for a layer of attention, with torch's attention and within corrected().

    .venv-doors/kronfluence/bin/python tests/doors/kronfluence/measure_attention.py

kronfluence takes first derivatives only, for which torch's own attention suffices. Times alternate in one process.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import doors.kronfluence.conftest  # noqa: F401 - defines operators that do not load
import torch
import torch.nn.functional as F
from doors.kronfluence.test_scores import Classification
from kronfluence.analyzer import Analyzer, prepare_model
from kronfluence.arguments import FactorArguments, ScoreArguments
from torch import nn
from torch.utils.data import TensorDataset

import hodiff

HEADS, SIZE = 4, 16


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.head = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE), nn.Linear(HEADS * SIZE, 3)

    def forward(self, x):
        q, k, v = self.mix(x).unflatten(-1, (3, HEADS, SIZE)).permute(2, 0, 3, 1, 4)
        return self.head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).mean(1)


def report(words):
    """Write a line at once."""
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def run(length):
    torch.manual_seed(0)
    task = Classification()
    model = prepare_model(Attention(), task)
    data = TensorDataset(torch.randn(32, length, HEADS * SIZE), torch.randint(3, (32,)))
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        analyzer = Analyzer("model", model, task, output_dir=folder, cpu=True, disable_tqdm=True)
        analyzer.fit_all_factors(
            "factors", data, per_device_batch_size=8, factor_args=FactorArguments(use_empirical_fisher=True)
        )
        analyzer.compute_pairwise_scores(
            "scores",
            "factors",
            data,
            data,
            per_device_query_batch_size=8,
            per_device_train_batch_size=8,
            score_args=ScoreArguments(damping_factor=0.1),
        )
        found = analyzer.load_pairwise_scores("scores")["all_modules"]
    return time.perf_counter() - start, found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    report("| tokens | torch alone, seconds | within corrected() | ratio | largest relative difference of scores |")
    report("|---|---|---|---|---|")
    for length in options.lengths:
        times = {"plain": [], "corrected": []}
        found = {}
        for _ in range(options.rounds):
            for kind, context in (("plain", contextlib.nullcontext), ("corrected", hodiff.corrected)):
                with context():
                    seconds, found[kind] = run(length)
                times[kind].append(seconds)
        plain, corrected = (min(each) for each in times.values())
        difference = (found["plain"] - found["corrected"]).abs().max() / found["plain"].abs().max()
        report(f"| {length} | {plain:.2f} | {corrected:.2f} | {corrected / plain:.2f} | {difference:.0e} |")


if __name__ == "__main__":
    main()
