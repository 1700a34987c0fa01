"""Tests of process groups in one process; test_distributed.py runs two ranks."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from optim.table import TABLE, Problem

import hodiff
from hodiff.optim.kfac.shared_factors import owners_of
from hodiff.optim.ranks import LOCAL, Ranks, Replicas, mark_of, norm_of_all


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128])
@pytest.mark.parametrize("size", [1, 5, 2**12, 2**12 + 1, 3 * 2**16 + 7])
def test_marks_show_any_change(dtype, size):
    torch.manual_seed(size)
    x = torch.randn(size, dtype=dtype)
    assert mark_of([x]) == mark_of([x.clone()])
    for place in {0, size // 2, size - 1}:
        changed = x.clone()
        changed[place] += 1
        assert mark_of([changed]) != mark_of([x])
    if size > 1:
        swapped = x.clone()
        swapped[[0, -1]] = x[[-1, 0]]
        assert mark_of([swapped]) != mark_of([x])
        assert mark_of([x, x.flip(0)]) != mark_of([x.flip(0), x])


def test_marks_of_nothing_and_of_nan():
    assert mark_of([]) == mark_of([torch.empty(0, 3)]) == norm_of_all([]) == 0
    assert mark_of([torch.tensor([float("nan")])]) != mark_of([torch.tensor([float("nan")])])


def test_norms_match_the_joint_vector():
    parts = [torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (3, 0, 2)]
    assert norm_of_all(parts) == pytest.approx(float(torch.cat(parts).norm()))


def test_largest_blocks_go_to_ranks_with_the_least_work():
    states = [{"A": torch.empty(1, n, n), "B": torch.empty(1, 1)} for n in (2, 10, 3, 9, 4)]
    owners = owners_of(states, 2)
    # 10³ = 1000 against 9³ + 4³ + 3³ + 2³ = 828.
    assert owners == [1 - owners[1], owners[1], 1 - owners[1], 1 - owners[1], 1 - owners[1]]


def test_errors_without_other_ranks_raise_at_once():
    def fails():
        raise KeyError

    with pytest.raises(KeyError):
        Ranks("", LOCAL).attempt(fails)


@pytest.mark.parametrize("name", ["SophiaH", "NewtonCG", "SAM", "LBFGS"])
def test_local_models_stay_local_in_copies(name):
    case, problem = TABLE[name], Problem()
    optimizer = case(problem.model.parameters(), process_group="local")
    assert not optimizer._ranks.watched
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert not twin._ranks.watched
        assert twin._ranks.size == 1
    assert pickle.loads(pickle.dumps(case(problem.model.parameters())))._ranks.watched


class OneOfTwo(Ranks):
    """A rank whose partner has no numbers."""

    def __init__(self, rank):
        super().__init__("", LOCAL)
        self.size, self.rank = 2, rank

    def exchange(self, caller, error, numbers, device):
        return torch.tensor([numbers, numbers], dtype=torch.float64)

    def sum_(self, tensors):
        list(tensors)


@pytest.mark.parametrize("name", ["KFAC", "EKFAC"])
def test_ranks_that_compute_and_that_receive_a_block_have_equal_strides(name):
    """Products round differently with other strides, so that parameters of the ranks would drift apart."""
    strides = []
    for rank in range(2):
        problem = Problem()
        optimizer = TABLE[name](problem.model.parameters(), process_group="local")
        optimizer._ranks = OneOfTwo(rank)
        problem.loss(problem.batches[0]).backward()
        optimizer.step()
        states = optimizer.state_dict()["state"]
        strides.append({(i, n): t.stride() for i, s in states.items() for n, t in s.items() if torch.is_tensor(t)})
    assert len(strides[0]) > 4
    assert strides[0] == strides[1]


class Notes:
    """Store of `torch.distributed` with the operations that notes need."""

    def __init__(self):
        self.values = {}

    def compare_set(self, key, expected, value):
        assert expected == ""
        return self.values.setdefault(key, value.encode())

    def set(self, key, value):
        self.values[key] = value.encode()

    def check(self, keys):
        return all(key in self.values for key in keys)


def test_ranks_with_other_steps_at_equal_parameters_are_refused(monkeypatch):
    monkeypatch.setattr("hodiff.optim.ranks.number_of_ranks", lambda: 2)
    store = Notes()
    monkeypatch.setattr("hodiff.optim.ranks.default_store", lambda: store)
    x, g = torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)

    def rank():
        monkeypatch.setattr("hodiff.optim.ranks._notes", Counter())
        return Replicas()

    first = rank()
    first.watch("A", [x], [g])
    rank().watch("A", [x], [g * (1 + 1e-12)])  # rounding
    rank().watch("A", [x + 1], [2 * g])  # another model
    rank().watch("B", [x], [2 * g])  # another optimizer
    rank().watch("A", [x], [float("nan") * g])  # the step raises an error of its own
    with pytest.raises(hodiff.InputError, match="another rank computes other steps from the same parameters"):
        rank().watch("A", [x], [g * (1 + 1e-6)])
    with pytest.raises(hodiff.InputError, match="process_group='local'"):
        first.watch("A", [x + 2], [g])
    first.watch("A", [x + 3], [g])  # only steps 1, 2, 4, 8 ... are checked
