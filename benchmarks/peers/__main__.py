"""Time the peers; see `benchmarks.peers` for the environment that this needs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import torch_ways
from benchmarks.machine import hold_one_core, machine, one_core
from benchmarks.objectives import DIGITS, NETWORKS, Objective
from benchmarks.peers import jax_ways
from benchmarks.problems import Problem, Result, measure
from benchmarks.race import Clock, Contestant
from benchmarks.reference import difference_product, relative_error
from benchmarks.report import RESULTS, save_json, time_table


def curvlinops_hessian(objective: Objective) -> Any:
    """Return the Hessian as curvlinops' linear operator."""
    from curvlinops import HessianLinearOperator

    return HessianLinearOperator(
        objective.module,
        nn.CrossEntropyLoss(),
        list(objective.module.parameters()),
        [(objective.inputs, objective.targets)],
        check_deterministic=False,
        num_data=len(objective.inputs),
    )


def product_problem(objective: Objective) -> Problem:
    """Return the problem of a Hessian-vector product for torch and the peers."""
    x = objective.parameters()
    n = sum(tensor.numel() for tensor in x.values())
    direction = torch.randn(n, generator=torch.Generator().manual_seed(1))
    pieces = direction.split([tensor.numel() for tensor in x.values()])
    v = {name: piece.view_as(x[name]) for name, piece in zip(x, pieces, strict=True)}
    operator = curvlinops_hessian(objective)
    expected = difference_product(objective, direction)
    peers = {
        **jax_ways.ways(objective, direction),
        f"curvlinops {version('curvlinops-for-pytorch')}": lambda: operator @ direction,
    }
    torch_way = partial(torch_ways.double_backward, objective, x, v)
    return problem(objective, peers, torch_way, lambda result: relative_error(vector(result), expected), 1e-4)


def dense_problem(objective: Objective) -> Problem:
    """Return the problem of a dense Hessian for torch and the peers."""
    x = objective.parameters()
    n = sum(tensor.numel() for tensor in x.values())
    probe = torch.randn(n, generator=torch.Generator().manual_seed(1))
    expected = difference_product(objective, probe)
    operator = curvlinops_hessian(objective)
    peers = {
        **jax_ways.dense_ways(objective),
        f"curvlinops {version('curvlinops-for-pytorch')}, times identity": lambda: operator @ torch.eye(n),
    }

    def torch_way() -> Tensor:
        flat = torch.cat([tensor.flatten() for tensor in x.values()])
        return torch.autograd.functional.hessian(objective.flat, flat, vectorize=True)

    return problem(
        objective,
        peers,
        torch_way,
        lambda result: relative_error(vector(result).view(n, n) @ probe, expected),
        1e-4,
    )


def problem(
    objective: Objective,
    peers: dict[str, Callable[[], Any]],
    torch_way: Callable[[], Any],
    error: Callable[[Any], float],
    tolerance: float,
) -> Problem:
    """Return a problem for torch and the peers."""
    gradient = partial(torch_ways.gradient, objective, objective.parameters())
    return Problem(
        name=objective.name,
        title=objective.name,
        contestants=[
            Contestant("one gradient, eager", "unit", gradient),
            Contestant("torch, double backward", "torch", torch_way),
            *(
                Contestant(name, "peer gradient" if "one gradient" in name else "peer", run)
                for name, run in peers.items()
            ),
        ],
        error=error,
        tolerance=tolerance,
    )


def vector(result: Any) -> Tensor:
    """Flatten the result of a contestant."""
    if isinstance(result, dict):
        return torch.cat([tensor.flatten() for tensor in result.values()])
    return torch.from_numpy(np.array(result)).flatten()


def measured(problem: Problem, rounds: int, clock: Clock = time.perf_counter) -> Result:
    """Measure a problem and print its table."""
    result = measure(problem, rounds, clock)
    print(f"## {result.title}\n\n{time_table(result)}\n", flush=True)
    return result


def products(rounds: int) -> dict[str, Any]:
    """Measure Hessian-vector products and dense Hessians, on all cores."""
    by_vector = [measured(product_problem(build()), rounds) for build in NETWORKS.values()]
    whole = [measured(dense_problem(build()), rounds) for build in DIGITS.values()]
    return {
        "machine": {**machine(), "jax": version("jax"), "curvlinops": version("curvlinops-for-pytorch")},
        "hvp": {result.problem: result.to_json() for result in by_vector},
        "dense": {result.problem: result.to_json() for result in whole},
    }


def laplacians(rounds: int) -> dict[str, Any]:
    """Measure Laplacians by folx and hodiff, on one core, in processor seconds."""
    from benchmarks.peers import taylor

    hold_one_core()
    with one_core():
        results = [
            measured(each, min(rounds, taylor.ROUNDS.get(each.name, rounds)), time.process_time)
            for each in taylor.problems()
        ]
        here = {**machine(), "jax": version("jax"), "folx": version("folx")}
    return {"taylor machine": here, "taylor": {result.problem: result.to_json() for result in results}}


def hessians(rounds: int) -> dict[str, Any]:
    """Measure sparse Hessians by asdex and hodiff, on one core, in processor seconds."""
    from benchmarks.peers import sparse

    hold_one_core()
    results, before = {}, {}
    with one_core():
        for case in sparse.cases():
            problem, preparations = sparse.prepared(case)
            before[case.name] = {who: asdict(each) for who, each in preparations.items()}
            print(json.dumps(before[case.name]), flush=True)
            results[case.name] = measured(problem, rounds, time.process_time).to_json()
        here = {**machine(), "jax": version("jax"), "asdex": version("asdex")}
    return {"sparse machine": here, "sparse": results, "sparse preparation": before}


def libraries(rounds: int) -> dict[str, Any]:
    """Measure libraries for PyTorch and hodiff, on one core, in processor seconds."""
    from benchmarks.peers import libraries

    with one_core():
        results = [measured(each, rounds, time.process_time) for each in libraries.problems()]
        here = machine()
    (RESULTS / "libraries.md").write_text(libraries.page(results, here), encoding="utf-8")
    return {"libraries machine": here, "libraries": {result.problem: result.to_json() for result in results}}


PARTS = {"products": products, "libraries": libraries, "taylor": laplacians, "sparse": hessians}


def main() -> None:
    """Parse the command line, measure and save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=PARTS, help="one part alone; the results of the other stay")
    parser.add_argument("--save", type=Path, default=RESULTS, metavar="DIR", help="where peers.json goes")
    options = parser.parse_args()
    if options.only is None:
        # One process per part: JAX fixes its number of threads when it starts.
        for part in PARTS:
            words = ["--only", part, "--rounds", str(options.rounds), "--save", str(options.save)]
            subprocess.run([sys.executable, "-m", "benchmarks.peers", *words], check=True)
        return
    path = options.save / "peers.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    save_json(path, found | PARTS[options.only](options.rounds))


if __name__ == "__main__":
    main()
