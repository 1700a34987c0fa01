"""One rank of two, run by test_distributed.py: optimizers on split batches make the steps of one process."""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from optim.table import TABLE, Case, Problem, cross_entropy

import hodiff
import hodiff.optim as ho

STEPS = 5


def labels_by_probabilities(probabilities: torch.Tensor, _: int, generator: Any = None) -> torch.Tensor:
    """Draw labels that depend on the probabilities alone, so that one process and two ranks draw the same."""
    noise = (probabilities * 1e4).frac().clamp_min(1e-6)
    return (probabilities / -noise.log()).argmax(-1, keepdim=True)


def half(batch: Any) -> list[torch.Tensor]:
    return [each.chunk(2)[dist.get_rank()] for each in batch]


def numbers_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def assert_equal_on_ranks(model: nn.Module) -> None:
    own = numbers_of(model)
    parts = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(parts, own)
    assert torch.equal(*parts)


def assert_same(model: nn.Module, expected: nn.Module, tolerance: float = 1e-10) -> None:
    assert_equal_on_ranks(model)
    error = float((numbers_of(model) - numbers_of(expected)).abs().max())
    assert error < tolerance, error


def train(case: Case, problem: Problem, optimizer: Any, model: Callable[..., Any], cut: Callable[..., Any]) -> None:
    """Make some steps, each with a part of a batch."""
    for inputs, labels in map(cut, problem.batches[:STEPS]):
        if case.pair:
            optimizer.step(lambda: (model(inputs), lambda outputs: cross_entropy(outputs, labels)))
        elif case.loop:
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        else:
            optimizer.step(lambda: cross_entropy(model(inputs), labels))


# Settings with which steps do not amplify rounding errors.
GENTLE: dict[str, dict[str, Any]] = {
    "SophiaH": {"gamma": 5.0},
    "SophiaG": {"gamma": 5.0},
    "NewtonCG, Gauss-Newton": {"damping": 1.0},
    "LayerwiseGaussNewton": {"damping": 1.0},
}
CASES = {
    **{name: case for name, case in TABLE.items() if not name.startswith(("Shampoo", "SOAP"))},
    "KFAC, exact": Case(partial(ho.KFAC, fisher="exact"), {"kl_clip": None, "update_every": 2, "refresh_every": 2}),
    "KFAC, empirical": Case(partial(ho.KFAC, fisher="empirical"), {"update_every": 2, "refresh_every": 2}),
    "EKFAC, clipped": Case(ho.EKFAC, {"update_every": 2, "refresh_every": 2}),
}
WRAPS: dict[str, Callable[..., Any]] = {
    "plain": lambda model: model,
    "DDP": DistributedDataParallel,
    "views": partial(DistributedDataParallel, gradient_as_bucket_view=True),
    "static graph": partial(DistributedDataParallel, static_graph=True),
    "unused": partial(DistributedDataParallel, find_unused_parameters=True),
}


def one_process(case: Case, **options: Any) -> Problem:
    problem = Problem()
    optimizer = case(problem.model.parameters(), process_group="local", **options)
    train(case, problem, optimizer, problem.model, lambda batch: batch)
    return problem


def steps_are_those_of_one_process() -> None:
    for name, case in CASES.items():
        options = GENTLE.get(name, {})
        expected = one_process(case, **options)
        for how, wrap in WRAPS.items():
            problem = Problem()
            optimizer = case(problem.model.parameters(), process_group=dist.group.WORLD, **options)
            print(name, how, flush=True)
            train(case, problem, optimizer, wrap(problem.model), half)
            assert_same(problem.model, expected.model)


def is_refused(case: Case, problem: Problem, optimizer: Any, cut: Callable[..., Any]) -> bool:
    """Make steps, before each of which the ranks meet; return whether this rank was refused a step."""
    refused = False
    for batch in problem.batches[:STEPS]:
        dist.barrier()
        try:
            if not refused:
                train(case, SimpleNamespace(batches=[batch]), optimizer, problem.model, cut)
        except hodiff.InputError as error:
            assert "process_group: expected the process group of the ranks that train this model" in str(error)
            refused = True
    return refused


def silent_drift_is_refused() -> None:
    for case in CASES.values():
        problem = Problem()
        assert is_refused(case, problem, case(problem.model.parameters()), half)


def models_of_one_rank_are_accepted() -> None:
    for name in ("SophiaH", "KFAC", "NewtonCG", "SAM", "LBFGS"):
        case = CASES[name]
        equal_data, other_model, local = Problem(), Problem(seed=dist.get_rank()), Problem()
        assert not is_refused(case, equal_data, case(equal_data.model.parameters()), lambda batch: batch)
        assert not is_refused(case, other_model, case(other_model.model.parameters()), half)
        optimizer = case(local.model.parameters(), process_group="local")
        assert not is_refused(case, local, optimizer, half)
        if dist.get_rank() == 0:  # other ranks need not take part
            alone = Problem(seed=7)
            train(case, alone, case(alone.model.parameters()), alone.model, half)


def errors_of_one_rank_reach_all() -> None:
    for name, case in CASES.items():
        problem = Problem()
        optimizer = case(problem.model.parameters(), process_group=dist.group.WORLD)
        before = numbers_of(problem.model)
        batch, closure = half(problem.batches[0]), problem.closure
        problem.loss(batch).backward()

        def fails() -> Any:
            if dist.get_rank() == 1:
                raise KeyError("of this rank")
            return closure(case, batch)()

        with pytest.raises((KeyError, hodiff.InputError)) as caught:
            optimizer.step(fails)
        expected = "of this rank" if dist.get_rank() == 1 else "got an error on rank 1"
        assert expected in str(caught.value), name
        assert torch.equal(before, numbers_of(problem.model))
        optimizer.zero_grad()
        train(case, problem, optimizer, problem.model, half)
        assert_equal_on_ranks(problem.model)


def different_parameters_are_refused() -> None:
    for name, case in CASES.items():
        problem = Problem(seed=dist.get_rank())
        optimizer = case(problem.model.parameters(), process_group=dist.group.WORLD)
        with pytest.raises(hodiff.InputError, match="process_group: expected equal parameters on all ranks"):
            train(case, problem, optimizer, problem.model, half)


def accumulated_and_scaled_gradients_agree() -> None:
    """Two backward passes, the first within no_sync, clipping, and a GradScaler that overflows on one rank."""
    for name in ("SophiaH", "SophiaG", "AdaHessian", "KFAC", "EKFAC", "Shampoo"):
        case = TABLE[name]
        options = GENTLE.get(name, {})
        group = {} if name == "Shampoo" else {"process_group": dist.group.WORLD}
        problems = {}
        for how in ("joint", "ranks"):
            problem = problems[how] = Problem()
            alone = how == "joint"
            optimizer = case(problem.model.parameters(), **options, **({**group, "process_group": "local"} if alone and group else group))
            model: Any = problem.model if alone else DistributedDataParallel(problem.model)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            batches = problem.batches if alone else list(map(half, problem.batches))
            for first, second in zip(batches[:6:2], batches[1:6:2], strict=True):
                optimizer.zero_grad()
                with nullcontext() if alone else model.no_sync():
                    scaler.scale(cross_entropy(model(first[0]), first[1]) / 2).backward()
                scaler.scale(cross_entropy(model(second[0]), second[1]) / 2).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(problem.model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
        print(name, float((numbers_of(problems["joint"].model) - numbers_of(problems["ranks"].model)).abs().max()))
        #assert_same(problems["ranks"].model, problems["joint"].model)


def main() -> None:
    own = torch.multinomial
    torch.multinomial = labels_by_probabilities
    parts = [
        steps_are_those_of_one_process,
        silent_drift_is_refused,
        models_of_one_rank_are_accepted,
        errors_of_one_rank_reach_all,
        different_parameters_are_refused,
        accumulated_and_scaled_gradients_agree,
    ]
    for part in parts[int(os.environ.get("FROM", 0)):]:
        print(part.__name__, flush=True)
        part()
    torch.multinomial = own
    print("both agree")


if __name__ == "__main__":
    rank, path = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    main()
    dist.destroy_process_group()
