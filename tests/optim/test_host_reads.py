"""Numbers that steps read from tensors: on a GPU, each read waits for all operators before it."""

import pytest
import torch
from optim.table import TABLE, cross_entropy
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hodiff.optim import ENGD, SPRING

aten = torch.ops.aten
# Operators whose results, or whose results' shapes, are on the host.
READING = {aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten.allclose}


class CountedOperators(TorchDispatchMode):
    """Count operators that wait for a tensor's numbers."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        # Indices by a mask are found by `nonzero`.
        by_mask = operator.overloadpacket in {aten.index, aten.index_put_} and any(
            isinstance(each, Tensor) and each.dtype == torch.bool for each in args[1]
        )
        self.count += operator.overloadpacket in READING or by_mask
        return operator(*args, **(kwargs or {}))


class CountedLists(TorchFunctionMode):
    """Count conversions to lists and arrays, which are no operators on a CPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function in {Tensor.tolist, Tensor.numpy, Tensor.cpu}
        return function(*args, **(kwargs or {}))


def reads(run):
    """Return the number of reads while a function runs."""
    with CountedOperators() as operators, CountedLists() as lists:
        run()
    return operators.count + lists.count


def test_reads_are_counted():
    x = torch.arange(3.0)
    ways = [x[0].item, x.tolist, lambda: bool(x.any()), lambda: float(x[1]), lambda: int(x[1]), lambda: x[x > 1]]
    ways += [
        x.nonzero,
        lambda: torch.equal(x, x),
        x.numpy,
        lambda: torch.allclose(x, x),
        lambda: x.masked_select(x > 1),
    ]
    for way in ways:
        assert reads(way) >= 1, way
    assert reads(lambda: x.clamp(min=1).sum().sqrt()) == 0


def model():
    """Return a network with parameters of several shapes, two of each."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 30), nn.Linear(30, 3))


# All steps of Muon are alike.
STEPS = {name: case for name, case in TABLE.items() if case.loop and not name.startswith("Muon")}


def test_muon_reads_once():
    network, (inputs, labels) = model().double(), (torch.randn(8, 4).double(), torch.randint(3, (8,)))
    optimizer = TABLE["Muon"](network.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        cross_entropy(network(inputs), labels).backward()
        assert reads(optimizer.step) == 1


@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS)
def test_steps_that_are_not_due_read_once(case):
    """The only read checks that all gradients are finite, before anything changes."""
    network, (inputs, labels) = model().double(), (torch.randn(8, 4).double(), torch.randint(3, (8,)))
    optimizer = case(network.parameters(), **{"update_every" if case.watches else "refresh_every": 50})

    def step():
        optimizer.zero_grad()
        cross_entropy(network(inputs), labels).backward()
        optimizer.step()

    found = [reads(step) for _ in range(7)]
    # Roots are also due in the steps 1, 2 and 4.
    assert found[0] > 1
    assert found[2] == found[4] == found[5] == found[6] == 1


@pytest.mark.parametrize("name", ["Shampoo", "SOAP", "Muon", "AdaHessian"])
def test_number_of_reads_does_not_grow_with_layers(name):
    """Steps that are due read once for parameters of each shape, not once for each parameter."""

    def count(layers):
        torch.manual_seed(0)
        network = nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers)))
        options = {"AdaHessian": {"update_every": 1}, "Muon": {}}.get(name, {"refresh_every": 1})
        optimizer = TABLE[name](network.parameters(), **options)
        x = torch.randn(4, 6)
        for _ in range(2):
            optimizer.zero_grad()
            network(x).square().sum().backward()
            found = reads(optimizer.step)
        return found

    assert count(2) == count(5)


@pytest.mark.parametrize(("kind", "most"), [(ENGD, 4), (SPRING, 5)])
@pytest.mark.parametrize("layers", [1, 4])
def test_steps_of_solvers_of_samples_read_few_numbers(kind, most, layers):
    """Every step solves: it reads the loss, whether numbers, factors and directions are finite, and a norm to bound."""
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)), nn.Linear(3, 1)).double()
    samples = torch.randn(6, 3, dtype=torch.float64)
    if kind is ENGD:
        optimizer = ENGD(network, line_search_fn=None)
        found = [reads(lambda: optimizer.step((network, samples))) for _ in range(3)]
    else:
        optimizer = SPRING(network)
        found = [reads(lambda: optimizer.step(network, samples, samples.sum(1))) for _ in range(3)]
    assert max(found) <= most
