"""One rank of two, run by test_distributed.py: optimizers on split batches make the steps of one process."""

import copy
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
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
    "HessianFree": {"weight_decay": 0.1},
    "SSBroyden": {"max_iter": 1},
    "HessianFree, preconditioned": {"weight_decay": 0.1},
}
CASES = {
    **{name: case for name, case in TABLE.items() if not name.startswith(("Shampoo", "SOAP", "KL", "Muon"))},
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
        for wrap in WRAPS.values():
            problem = Problem()
            optimizer = case(problem.model.parameters(), process_group=dist.group.WORLD, **options)
            train(case, problem, optimizer, wrap(problem.model), half)
            assert_same(problem.model, expected.model)


def single_precision_stays_equal() -> None:
    """Parameters of both ranks are equal in every bit after several refreshes."""
    for name in ("SophiaH", "SophiaG", "AdaHessian", "KFAC", "EKFAC"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        inputs = torch.randn(4, 64, 8)
        options = {"lr": 0.1, "update_every": 2, **({"refresh_every": 2} if "KFAC" in name else {})}
        optimizer = getattr(ho, name)(model.parameters(), process_group=dist.group.WORLD, **options)
        wrapped = DistributedDataParallel(model)
        for batch in 8 * [half([each])[0] for each in inputs]:
            optimizer.zero_grad()
            cross_entropy(wrapped(batch), batch[:, :3].argmax(1)).backward()
            optimizer.step()
        assert_equal_on_ranks(model)


def is_refused(case: Case, problem: Problem, optimizer: Any, cut: Callable[..., Any]) -> bool:
    """Make steps, before each of which the ranks meet; return whether this rank was refused a step."""
    refused = False
    for batch in problem.batches[:STEPS]:
        dist.barrier()
        try:
            if not refused:
                train(case, SimpleNamespace(batches=[batch]), optimizer, problem.model, cut)
        except hodiff.InputError as error:
            if "process_group: expected the process group of the ranks that train this model" not in str(error):
                raise
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
    for case in CASES.values():
        problem = Problem(seed=dist.get_rank())
        optimizer = case(problem.model.parameters(), process_group=dist.group.WORLD)
        with pytest.raises(hodiff.InputError, match="process_group: expected equal parameters on all ranks"):
            train(case, problem, optimizer, problem.model, half)


def joint_and_own(case: Case, **options: Any) -> Iterator[tuple[Problem, Any, Any, list[Any]]]:
    """Yield a problem, optimizer, model and batches: first of one process, then of this rank under DDP."""
    one, own = Problem(), Problem()
    yield one, case(one.model.parameters(), process_group="local", **options), one.model, one.batches
    optimizer = case(own.model.parameters(), process_group=dist.group.WORLD, **options)
    yield own, optimizer, DistributedDataParallel(own.model), list(map(half, own.batches))


def accumulated_and_clipped_gradients_agree() -> None:
    """Two backward passes, the first within no_sync, a GradScaler, and clipping."""
    for name in ("SophiaH", "AdaHessian", "KFAC", "EKFAC"):
        models = []
        for problem, optimizer, model, batches in joint_and_own(TABLE[name], **GENTLE.get(name, {})):
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            for first, second in zip(batches[:6:2], batches[1:6:2], strict=True):
                optimizer.zero_grad()
                with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
                    scaler.scale(cross_entropy(model(first[0]), first[1]) / 2).backward()
                scaler.scale(cross_entropy(model(second[0]), second[1]) / 2).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(problem.model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
            models.append(problem.model)
        assert_same(models[1], models[0])


def batches_that_overflow_on_one_rank_are_skipped_on_all() -> None:
    for name in ("SophiaH", "AdaHessian", "SophiaG", "KFAC"):
        models = []
        for problem, optimizer, _, batches in joint_and_own(TABLE[name], **GENTLE.get(name, {})):
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            for i, (inputs, labels) in enumerate(batches[:STEPS]):
                optimizer.zero_grad()
                loss = cross_entropy(problem.model(inputs), labels)
                if i == 3 and (not models or dist.get_rank() == 1):
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            models.append(problem.model)
        assert_same(models[1], models[0])


def curvature_by_hand_agrees() -> None:
    for name in ("SophiaH", "SophiaG", "EKFAC"):
        models = []
        for problem, optimizer, model, batches in joint_and_own(
            TABLE[name], **{**GENTLE.get(name, {}), "update_every": None}
        ):
            for i, (inputs, labels) in enumerate(batches[:STEPS]):
                optimizer.zero_grad()
                outputs = model(inputs)
                loss = cross_entropy(outputs, labels)
                if i % 2 == 0:
                    optimizer.update_curvature(outputs if name == "SophiaG" else loss)
                loss.backward()
                optimizer.step()
            models.append(problem.model)
        assert_same(models[1], models[0])


def complex_parameters_agree() -> None:
    targets = torch.randn(6, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    for name in ("SAM", "LBFGS"):
        parameters = []
        for group, part in (("local", targets), (dist.group.WORLD, half([targets])[0])):
            z = nn.Parameter(torch.ones(3, dtype=torch.complex128))
            optimizer = CASES[name]([z], process_group=group)
            for _ in range(STEPS):
                optimizer.step(lambda z=z, part=part: (z * z.conj() * part - z.conj()).abs().square().mean())
            parameters.append(nn.ParameterList([torch.view_as_real(z.detach())]))
        assert_same(parameters[1], parameters[0])


def sparse_gradients_are_refused() -> None:
    for name in ("SAM", "SophiaH"):
        table = nn.Embedding(4, 3, sparse=True)
        nn.init.ones_(table.weight)
        optimizer = CASES[name](table.parameters(), process_group=dist.group.WORLD)
        with pytest.raises(hodiff.InputError, match="expected dense gradients"):
            optimizer.step(lambda table=table: table(torch.tensor([0, 1])).square().sum())


def steps_by_closures_agree() -> None:
    for name in ("SophiaH", "SophiaG", "AdaHessian", "KFAC", "EKFAC"):
        models = []
        for problem, optimizer, model, batches in joint_and_own(CASES[name], **GENTLE.get(name, {})):
            losses = [
                optimizer.step(lambda model=model, batch=batch: cross_entropy(model(batch[0]), batch[1]))
                for batch in batches[:STEPS]
            ]
            models.append((problem.model, torch.stack(losses)))
        assert_same(models[1][0], models[0][0])
        torch.testing.assert_close(models[1][1], models[0][1])


def different_generators_are_refused() -> None:
    for name in ("SophiaH", "SophiaG", "KFAC"):
        problem = Problem()
        generator = torch.Generator().manual_seed(dist.get_rank())
        optimizer = TABLE[name](problem.model.parameters(), process_group=dist.group.WORLD, generator=generator)
        with pytest.raises(hodiff.InputError, match="generator: expected generators in the same state on all ranks"):
            train(TABLE[name], problem, optimizer, problem.model, half)


def labels_are_drawn_independently() -> None:
    """The same examples on both ranks have other labels, and both ranks take the same step."""
    for name in ("SophiaG", "KFAC"):
        problem, seen = Problem(), []
        optimizer = TABLE[name](problem.model.parameters(), process_group=dist.group.WORLD)
        original = torch.multinomial

        def noted(probabilities: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            seen.append(original(probabilities, *args, **options))
            return seen[-1]

        torch.multinomial = noted
        train(TABLE[name], problem, optimizer, problem.model, lambda batch: batch)
        torch.multinomial = original
        own = torch.cat(seen)
        parts = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(parts, own)
        assert not torch.equal(*parts)
        assert_equal_on_ranks(problem.model)


def whole_batch_of_one_rank_weighs_as_much_as_a_part() -> None:
    """The joint loss is the mean of the ranks' losses, whatever the lengths of their batches."""
    for name in ("NewtonCG", "KFAC, empirical", "SophiaH"):
        case, options, one, own = CASES[name], GENTLE.get(name, {}), Problem(), Problem()

        def cut(batch: Any, rank: int) -> list[torch.Tensor]:
            return [each[:2] if rank == 0 else each[2:] for each in batch]

        optimizer = case(own.model.parameters(), process_group=dist.group.WORLD, **options)
        train(case, own, optimizer, own.model, lambda batch: cut(batch, dist.get_rank()))
        optimizer = case(one.model.parameters(), process_group="local", **options)
        for batch in one.batches[:STEPS]:
            parts = [cut(batch, rank) for rank in range(2)]
            if case.loop:
                optimizer.zero_grad()
                if name.startswith("KFAC"):  # a loss must have one cross-entropy
                    for inputs, labels in parts:
                        (cross_entropy(one.model(inputs), labels) / 2).backward()
                else:
                    sum(cross_entropy(one.model(inputs), labels) / 2 for inputs, labels in parts).backward()
                optimizer.step()
            else:
                optimizer.step(lambda: sum(cross_entropy(one.model(inputs), labels) / 2 for inputs, labels in parts))
        assert_same(own.model, one.model)


def copies_keep_the_group_and_pickles_are_refused() -> None:
    for name in ("SophiaH", "NewtonCG", "SAM", "LBFGS"):
        case, problem = CASES[name], Problem()
        optimizer = case(problem.model.parameters(), process_group=dist.group.WORLD)
        train(case, problem, optimizer, problem.model, half)
        twin, other = copy.deepcopy((problem, optimizer))
        train(case, problem, optimizer, problem.model, half)
        train(case, twin, other, twin.model, half)
        assert_same(twin.model, problem.model, 1e-15)
        with pytest.raises(hodiff.InputError, match=r"save optimizer\.state_dict"):
            pickle.dumps(optimizer)


def saved_states_resume(folder: Path) -> None:
    """Resume from torch.distributed.checkpoint, on both ranks and in one process."""
    for i, (name, case) in enumerate(TABLE.items()):
        path = folder / f"checkpoint{i}"
        group = {} if name.startswith(("Shampoo", "SOAP", "KL", "Muon")) else {"process_group": dist.group.WORLD}
        options = GENTLE.get(name, {})
        problem = Problem()
        optimizer = case(problem.model.parameters(), **group, **options)
        train(case, problem, optimizer, problem.model, half if group else lambda batch: batch)
        stored = io.BytesIO()
        torch.save(optimizer.state_dict(), stored)
        dcp.save({"model": problem.model.state_dict(), "optimizer": stored.getvalue()}, checkpoint_id=path)
        train(case, problem, optimizer, problem.model, half if group else lambda batch: batch)
        for alone in (False, True):
            other = Problem(seed=3)
            other.batches = problem.batches
            local = {"process_group": "local"} if group and alone else group
            resumed = case(other.model.parameters(), **local, **options, lr=123.0)
            loaded: dict[str, Any] = {"model": other.model.state_dict(), "optimizer": b""}
            dcp.load(loaded, checkpoint_id=path)
            other.model.load_state_dict(loaded["model"])
            resumed.load_state_dict(torch.load(io.BytesIO(loaded["optimizer"]), weights_only=True))
            train(case, other, resumed, other.model, half if group and not alone else lambda batch: batch)
            assert_same(other.model, problem.model)


def sharded_parameters_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    parameters = [nn.Parameter(distribute_tensor(torch.ones(4), mesh))]
    for name, case in CASES.items():
        group = None if name not in ("SAM", "ASAM", "LBFGS") else dist.group.WORLD
        with pytest.raises(hodiff.InputError, match="params: expected parameters that each rank holds whole"):
            case(parameters, process_group=group)


def wrong_groups_are_refused() -> None:
    problem = Problem()
    first = dist.new_group([0])
    for case in CASES.values():
        with pytest.raises(hodiff.InputError, match="process_group: expected a process group of torch"):
            case(problem.model.parameters(), process_group="world")
        if dist.get_rank() == 1:
            with pytest.raises(hodiff.InputError, match="process_group: expected a group that this process belongs"):
                case(problem.model.parameters(), process_group=first)


def main(folder: Path) -> None:
    original = torch.multinomial
    torch.multinomial = labels_by_probabilities
    parts = [
        steps_are_those_of_one_process,
        single_precision_stays_equal,
        silent_drift_is_refused,
        models_of_one_rank_are_accepted,
        errors_of_one_rank_reach_all,
        different_parameters_are_refused,
        accumulated_and_clipped_gradients_agree,
        batches_that_overflow_on_one_rank_are_skipped_on_all,
        curvature_by_hand_agrees,
        steps_by_closures_agree,
        complex_parameters_agree,
        sparse_gradients_are_refused,
        different_generators_are_refused,
        whole_batch_of_one_rank_weighs_as_much_as_a_part,
        copies_keep_the_group_and_pickles_are_refused,
        sharded_parameters_are_refused,
        wrong_groups_are_refused,
    ]
    for part in parts:
        part()
    saved_states_resume(folder)
    torch.multinomial = original
    labels_are_drawn_independently()
    print("both agree")  # noqa: T201 - for a run by hand


if __name__ == "__main__":
    rank, path = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timedelta(minutes=5))
    main(Path(path).parent)
    dist.destroy_process_group()
