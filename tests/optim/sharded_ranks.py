"""One rank of several, run by test_sharded.py: optimizers on `fully_shard`ed models make the steps of one process."""

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from optim.ranks import CASES as ALL
from optim.ranks import GENTLE, labels_by_probabilities
from optim.table import TABLE, Case, cross_entropy

import hodiff
import hodiff.optim as ho

STEPS = 4
KFACS = ("KFAC", "EKFAC", "KFAC, exact", "KFAC, empirical", "EKFAC, clipped")
CURVATURE = ("SophiaH", "SophiaG", "AdaHessian", *KFACS)
OWNED = ("Shampoo", "Shampoo, the paper's", "SOAP", "KLShampoo", "KLSOAP")
GRADIENTS_ONLY = (*OWNED, "SAM", "ASAM")
RESUMED = ("SophiaH", "AdaHessian", "SOAP", "KLShampoo", "Shampoo", "KFAC", "EKFAC", "HessianFree")
SYSTEMS = tuple(name for name in TABLE if name.startswith(("NewtonCG", "Layerwise", "HessianFree")))
CASES = {name: {**TABLE, **ALL}[name] for name in (*CURVATURE, *GRADIENTS_ONLY, *SYSTEMS)}
# SOAP divides coordinates without gradients by their rounding errors.
CALM = {**GENTLE, **{name: {"eps": 1e-3} for name in ("SOAP", "KLSOAP", "KLShampoo")}}


class Net(nn.Module):
    """A classifier whose rows do not divide by the number of ranks, and whose gradients have full rank but for one.

    SOAP's basis is arbitrary where a gradient has no component in several directions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv1d(1, 2, 2), nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(x[:, None]).tanh().flatten(1)).tanh())


class Problem:
    """The classifier in one process, or sharded, with the batches that belong to it."""

    def __init__(self, shard: Callable[[Net], Any] | None = None, seed: int = 0):
        torch.manual_seed(seed)
        self.model = Net().double()
        torch.manual_seed(7)
        self.batches = [(torch.randn(8, 3).double(), torch.randint(3, (8,))) for _ in range(STEPS)]
        if shard is not None:
            shard(self.model)
            self.batches = [tuple(part(each) for each in batch) for batch in self.batches]

    def closure(self, case: Case, batch: Any) -> Callable[[], Any]:
        inputs, labels = batch
        if case.pair:
            return lambda: (self.model(inputs), lambda outputs: cross_entropy(outputs, labels))
        return lambda: cross_entropy(self.model(inputs), labels)

    def train(self, case: Case, optimizer: Any) -> list[float]:
        return [float(optimizer.step(self.closure(case, batch)).detach()) for batch in self.batches]

    def numbers(self) -> torch.Tensor:
        return torch.cat([whole(p.detach()).reshape(-1) for p in self.model.parameters()])


def part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def in_layers(model: Net) -> None:
    for layer in (model.first, model.second):
        fully_shard(layer)
    fully_shard(model)


def with_replicas(model: Net) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copy", "shard")))


def made(name: str, problem: Problem, group: Any = "world", **options: Any) -> Any:
    group = dist.group.WORLD if group == "world" else group
    if name not in GRADIENTS_ONLY:
        options["process_group"] = group
    return CASES[name](problem.model.parameters(), **{**CALM.get(name, {}), **options})


def assert_same(found: Problem, expected: Problem, tolerance: float = 1e-10) -> None:
    error = float((found.numbers() - expected.numbers()).abs().max())
    assert error < tolerance, error


def steps_are_those_of_one_process() -> None:
    shards = [in_layers] if dist.get_world_size() <= 2 else [in_layers, with_replicas]
    for name, case in CASES.items():
        one = Problem()
        losses = one.train(case, made(name, one, "local"))
        for shard in shards:
            many = Problem(shard)
            optimizer = made(name, many)
            found = torch.tensor(many.train(case, optimizer), dtype=torch.float64)
            assert_same(many, one)
            if name in GRADIENTS_ONLY:  # which have no group, and return the loss of this rank
                dist.all_reduce(found.div_(dist.get_world_size()))
            torch.testing.assert_close(found, torch.tensor(losses, dtype=torch.float64), rtol=1e-9, atol=1e-9)
            for parameter in many.model.parameters():
                state = optimizer.state[parameter]
                alike = [v for v in state.values() if isinstance(v, torch.Tensor) and v.shape == parameter.shape]
                if name not in GRADIENTS_ONLY:
                    assert all(isinstance(v, DTensor) and v.placements == parameter.placements for v in alike), name
                holders = torch.tensor(float(not {"moments", "whitened_moments", "A"}.isdisjoint(state)))
                dist.all_reduce(holders)
                owned = name in OWNED
                assert holders == float(owned or (name in KFACS and parameter.dim() > 1)), name


def other_dtensors_make_the_steps_of_whole_tensors() -> None:
    """Optimizers with owners, with parameters that are sharded, replicated or ordinary tensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    starts = [torch.randn(5, 4, generator=generator).double(), torch.randn(4, 3, generator=generator).double()]
    for name in OWNED:
        found = []
        for places in (None, (Shard(1), Shard(0)), (Shard(0), Replicate()), (Replicate(), None)):
            place = (None, None) if places is None else places
            leaves = [
                nn.Parameter(each.clone() if at is None else distribute_tensor(each.clone(), mesh, [at]))
                for each, at in zip(starts, place, strict=True)
            ]
            optimizer = CASES[name](leaves, **CALM.get(name, {}))
            data = inputs if places is None else distribute_tensor(inputs, mesh, [Replicate()])
            for _ in range(STEPS):
                optimizer.zero_grad()
                first, last = leaves
                if places is not None and place[1] is None:
                    (data @ first).full_tensor().tanh().matmul(last).square().sum().backward()
                else:
                    ((data @ first).tanh() @ last).square().sum().backward()
                optimizer.step()
            found.append([whole(each.detach()) for each in leaves])
        for each in found[1:]:
            torch.testing.assert_close(each, found[0], rtol=1e-9, atol=1e-9)


def curvature_by_hand_precedes_an_ordinary_loop() -> None:
    """A closure gives the curvature; gradients come from backward passes of `fully_shard`, and are clipped."""
    for name in CURVATURE:
        problems = []
        for shard in (None, in_layers):
            problem = Problem(shard)
            optimizer = made(name, problem, "local" if shard is None else "world", update_every=None)
            for i, (inputs, labels) in enumerate(problem.batches):
                optimizer.zero_grad()
                closure = problem.closure(CASES[name], (inputs, labels))
                if i % 2 == 0:
                    optimizer.update_curvature(closure if shard else _seen(name, problem.model, inputs, labels))
                closure().backward()
                nn.utils.clip_grad_norm_(problem.model.parameters(), 0.1)
                optimizer.step()
            problems.append(problem)
        assert_same(problems[1], problems[0])


def _seen(name: str, model: Net, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return model(inputs) if name == "SophiaG" else cross_entropy(model(inputs), labels)


def ranks_count_by_their_labels() -> None:
    """Ranks whose losses ignore other numbers of labels make the steps of replicas."""
    for name in ("SophiaG", *KFACS):
        problems = []
        for shard in (None, in_layers):
            problem = Problem(shard)
            if shard is None:
                problem.batches = [tuple(map(part, batch)) for batch in problem.batches]
            for _, labels in problem.batches:
                labels[: dist.get_rank() % 2] = -100
            problem.train(CASES[name], made(name, problem, update_every=1))
            problems.append(problem)
        assert_same(problems[1], problems[0])


def parameters_of_other_optimizers_get_their_gradients() -> None:
    """A closure's step sets the gradients of the optimizer, and adds to those of other parameters."""
    for name in ("SophiaH", "SophiaG"):
        problems = []
        for shard in (None, in_layers):
            problem = Problem(shard)
            group = {"process_group": "local" if shard is None else dist.group.WORLD}
            last = CASES[name](problem.model.last.parameters(), **{**CALM[name], **group})
            others = [*problem.model.first.parameters(), *problem.model.second.parameters()]
            first = torch.optim.SGD(others, lr=0.05)
            for batch in problem.batches:
                last.step(problem.closure(CASES[name], batch))
                first.step()
                first.zero_grad()
            problems.append(problem)
        assert_same(problems[1], problems[0])


def uses_outside_of_layers_are_refused() -> None:
    for name in ("KFAC", "EKFAC"):
        problem = Problem(in_layers)
        optimizer, (inputs, labels) = made(name, problem), problem.batches[0]

        def penalized(problem: Problem = problem, inputs: Any = inputs, labels: Any = labels) -> Any:
            return cross_entropy(problem.model(inputs), labels) + problem.model.last.weight.square().sum()

        optimizer.step(penalized)  # which adds to the gradient only
        tied = Problem(in_layers)

        def twice(tied: Problem = tied, inputs: Any = inputs, labels: Any = labels) -> Any:
            outputs = tied.model(inputs)
            return cross_entropy(outputs @ tied.model.last.weight, labels)

        with pytest.raises(hodiff.InputError, match="only by calls of their layers"):
            made(name, tied).step(twice)


def saved_states_resume(folder: Path) -> None:
    """A state is saved, and loaded into an optimizer that has made a step, as another one would."""
    for name in RESUMED:
        case, problem, other = CASES[name], Problem(in_layers), Problem(in_layers, seed=3)
        optimizer, resumed = made(name, problem), made(name, other, lr=0.02)
        problem.train(case, optimizer)
        other.train(case, resumed)
        path = folder / name
        dcp.save({"model": problem.model.state_dict(), "optimizer": optimizer}, checkpoint_id=path)
        model = other.model.state_dict()
        dcp.load({"model": model, "optimizer": resumed}, checkpoint_id=path)
        other.model.load_state_dict(model)
        assert_same(other, problem, 1e-15)
        problem.train(case, optimizer)
        other.train(case, resumed)
        assert_same(other, problem, 1e-12)


def states_resume_on_other_ranks(folder: Path) -> None:
    """A state of all ranks is loaded on the first two."""
    mesh, group = DeviceMesh("cpu", [0, 1]), dist.new_group([0, 1])
    for name in RESUMED:
        case, problem, path = CASES[name], Problem(in_layers), folder / f"{name} of all"
        optimizer = made(name, problem)
        problem.train(case, optimizer)
        dcp.save({"model": problem.model.state_dict(), "optimizer": optimizer}, checkpoint_id=path)
        problem.train(case, optimizer)
        if dist.get_rank() < 2:
            other = Problem(lambda model: fully_shard(model, mesh=mesh), seed=3)
            whole_batches = Problem().batches
            other.batches = [tuple(each.chunk(2)[dist.get_rank()] for each in batch) for batch in whole_batches]
            resumed = made(name, other, group, lr=0.02)
            other.train(case, resumed)
            model = other.model.state_dict()
            dcp.load({"model": model, "optimizer": resumed}, checkpoint_id=path, process_group=group)
            other.model.load_state_dict(model)
            other.train(case, resumed)
            found = other.numbers()
        expected = problem.numbers()
        if dist.get_rank() < 2:
            assert float((found - expected).abs().max()) < 1e-9, name
        dist.barrier()


def what_cannot_be_done_is_refused() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    free = nn.Parameter(torch.ones(4))
    for name in CURVATURE[:4]:
        problem = Problem(in_layers)
        (inputs, labels), parameters = problem.batches[0], list(problem.model.parameters())
        with pytest.raises(hodiff.InputError, match=r"pass process_group=torch\.distributed\.group\.WORLD"):
            CASES[name](parameters)
        for refused in (lambda: ho.LBFGS(parameters), lambda: ho.Muon(parameters), lambda: ho.ENGD(problem.model)):
            with pytest.raises(hodiff.InputError, match="use an optimizer that supports them"):
                refused()
        with pytest.raises(hodiff.InputError, match="expected sharded parameters only, or none, got both"):
            CASES[name]([*parameters, free], process_group=dist.group.WORLD)
        optimizer = made(name, problem)
        loss = cross_entropy(problem.model(inputs), labels)
        loss.backward()
        with pytest.raises(hodiff.InputError, match=r"expected step\(closure\) for sharded parameters"):
            optimizer.step()
        with pytest.raises(hodiff.InputError, match=r"expected step\(closure\) for sharded parameters"):
            optimizer.update_curvature(loss)
        optimizer.zero_grad()
        other = made(name, problem, generator=torch.Generator().manual_seed(dist.get_rank()))
        for use in (other.step, other.update_curvature):
            with pytest.raises(hodiff.InputError, match="expected generators in the same state on all ranks"):
                use(problem.closure(CASES[name], (inputs, labels)))

        def goes_back(problem: Problem = problem, inputs: Any = inputs, labels: Any = labels) -> Any:
            found = cross_entropy(problem.model(inputs), labels)
            found.backward()
            return found

        with pytest.raises(hodiff.InputError, match="does not call backward"):
            optimizer.step(goes_back)
        leaf = nn.Parameter(distribute_tensor(torch.ones(4), mesh))
        with pytest.raises(hodiff.InputError, match="expected a closure that calls modules under fully_shard"):
            CASES[name]([leaf], process_group=dist.group.WORLD).step(lambda leaf=leaf: leaf.square().sum())


class Checkpointed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def checkpoints_change_no_step() -> None:
    for name in ("SophiaH", "SophiaG", "NewtonCG", "KFAC", "EKFAC"):
        one, many = Problem(), Problem(in_layers)
        many.model = Checkpointed().double()
        many.model.load_state_dict(one.model.state_dict())
        in_layers(many.model)
        one.train(CASES[name], made(name, one, "local"))
        many.train(CASES[name], made(name, many))
        assert_same(many, one)


def settings_of_the_model_are_refused() -> None:
    """Offloading, other groups and tensor parallelism are refused by name, on all ranks."""
    alone = [dist.new_group([i]) for i in range(dist.get_world_size())][dist.get_rank()]

    def offloaded(model: Net) -> None:
        fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))

    def refused(match: str, problem: Problem, group: Any = "world") -> None:
        for name in ("SophiaH", "KFAC", "NewtonCG"):
            with pytest.raises(hodiff.InputError, match=match):
                made(name, problem, group).step(problem.closure(CASES[name], problem.batches[0]))

    refused("without offload_policy", Problem(offloaded))
    refused("expected the ranks of the device mesh of fully_shard", Problem(in_layers), alone)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "parts"))

    def in_parts(model: Net) -> None:
        parallelize_module(model, mesh["parts"], {"second": ColwiseParallel(), "last": RowwiseParallel()})
        fully_shard(model, mesh=mesh["data"])

    if dist.get_world_size() > 2:
        refused("use no tensor parallelism", Problem(in_parts))


def gradients_of_ignored_parameters_are_those_of_the_rank() -> None:
    found = []
    for due in (True, False):
        problem = Problem()
        ignored = problem.model.last.bias
        fully_shard(problem.model, ignored_params={ignored})
        sharded = [p for p in problem.model.parameters() if p is not ignored]
        inputs, labels = map(part, problem.batches[0])
        closure = lambda problem=problem, x=inputs, y=labels: cross_entropy(problem.model(x), y)  # noqa: E731
        if due:
            ho.SophiaH(sharded, process_group=dist.group.WORLD).step(closure)
        else:
            closure().backward()
        found.append(ignored.grad)
    torch.testing.assert_close(*found)


def main(folder: Path) -> None:
    torch.multinomial = labels_by_probabilities
    steps_are_those_of_one_process()
    other_dtensors_make_the_steps_of_whole_tensors()
    if dist.get_world_size() == 1:
        curvature_by_hand_precedes_an_ordinary_loop()
    elif dist.get_world_size() > 2:
        states_resume_on_other_ranks(folder)
        settings_of_the_model_are_refused()
    else:
        curvature_by_hand_precedes_an_ordinary_loop()
        ranks_count_by_their_labels()
        parameters_of_other_optimizers_get_their_gradients()
        uses_outside_of_layers_are_refused()
        saved_states_resume(folder)
        what_cannot_be_done_is_refused()
        checkpoints_change_no_step()
        settings_of_the_model_are_refused()
        gradients_of_ignored_parameters_are_those_of_the_rank()
    sys.stdout.write("all agree")


if __name__ == "__main__":
    rank, path, count = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=count, timeout=timedelta(minutes=2)
    )
    main(Path(path).parent)
    dist.destroy_process_group()
