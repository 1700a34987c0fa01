"""Hessians of energies against the closed form of central forces, in every way to compute them."""

import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from atoms.crystals import cluster, lennard_jones, pair_hessian
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff.common.chunks import LivePeak

FREE = [4, 0, 2]


@pytest.fixture(scope="module")
def x() -> Tensor:
    return cluster(6)


@pytest.fixture(scope="module")
def exact(x: Tensor) -> Tensor:
    return torch.from_numpy(pair_hessian(x.numpy()))


def near(found: Tensor, expected: Tensor, tolerance: float = 1e-13) -> bool:
    return found.shape == expected.shape and bool((found - expected).abs().max() <= tolerance * expected.abs().max())


@pytest.mark.parametrize("options", [{}, {"chunk_size": 4}, {"chunk_size": None}, {"batched": True}])
def test_hessian_of_central_forces(x: Tensor, exact: Tensor, options: dict) -> None:
    found = hodiff.atoms.hessian(lennard_jones, x, **options)
    assert near(found, exact)
    assert torch.equal(found, found.permute(2, 3, 0, 1))
    assert found.transpose(1, 2).shape == (6, 6, 3, 3)


@pytest.mark.parametrize("batched", [False, True])
def test_free_atoms_and_rows(x: Tensor, exact: Tensor, batched: bool) -> None:
    partial = hodiff.atoms.hessian(lennard_jones, x, free=FREE, batched=batched)
    assert near(partial, exact[FREE][:, :, FREE])
    mask = torch.zeros(6, dtype=torch.bool)
    mask[FREE] = True
    places = sorted(FREE)
    masked = hodiff.atoms.hessian(lennard_jones, x, free=mask, batched=batched)
    assert near(masked, exact[places][:, :, places])
    rows = hodiff.atoms.hessian(lennard_jones, x, rows=[5, 1], batched=batched, chunk_size=4)
    assert near(rows, exact[[5, 1]])
    both = hodiff.atoms.hessian(lennard_jones, x, rows=[2, 4], free=FREE, batched=batched)
    assert near(both, exact[[2, 4]][:, :, FREE])


def test_only_columns_of_free_atoms_are_computed(x: Tensor) -> None:
    pulled = []

    class Counted(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: object, inputs: object, output: object) -> None:
            pass

        @staticmethod
        def backward(ctx: object, g: Tensor) -> Tensor:
            pulled.append(g.shape)
            return g.clone()

    # One pullback for the gradient, and one for each column.
    found = hodiff.atoms.hessian(lambda x: lennard_jones(Counted.apply(x)), x, free=[3], chunk_size=1)
    assert found.shape == (1, 3, 1, 3)
    assert len(pulled) <= 2 * 3 + 6


def test_products(x: Tensor, exact: Tensor) -> None:
    v = torch.randn(3, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.einsum("iajb,kjb->kia", exact, v)
    assert near(hodiff.atoms.hvp(lennard_jones, x, v), expected)
    assert near(hodiff.atoms.hvp(lennard_jones, x, v[0]), expected[0])
    part = torch.einsum("iajb,jb->ia", exact[FREE][:, :, FREE], v[0, FREE])
    assert near(hodiff.atoms.hvp(lennard_jones, x, v[0, FREE], free=FREE), part)


def test_several_systems_of_one_size(x: Tensor) -> None:
    batch = torch.stack([x, 1.1 * x, x.flip(0)])
    expected = torch.stack([torch.from_numpy(pair_hessian(each.numpy())) for each in batch])
    assert near(hodiff.atoms.hessian(lennard_jones, batch), expected)
    free = hodiff.atoms.hessian(lennard_jones, batch, free=FREE)
    assert near(free, expected[:, FREE][:, :, :, FREE])


def test_systems_of_different_sizes_share_the_columns() -> None:
    sizes = (2, 5, 3)
    parts = [1.05 * cluster(size) for size in sizes]
    systems = torch.arange(3).repeat_interleave(torch.tensor(sizes))

    def energies(x: Tensor) -> Tensor:
        return torch.stack([lennard_jones(each) for each in x.split(sizes)])

    for total in (energies, lambda x: energies(x).sum()):
        found = hodiff.atoms.hessian(total, torch.cat(parts), systems=systems)
        for one, part in zip(found, parts, strict=True):
            assert near(one, torch.from_numpy(pair_hessian(part.numpy())))


def test_systems_without_a_free_atom_have_empty_hessians() -> None:
    part = 1.05 * cluster(3)
    systems = torch.arange(2).repeat_interleave(3)
    found = hodiff.atoms.hessian(
        lambda x: torch.stack([lennard_jones(each) for each in x.split(3)]),
        torch.cat([part, part]),
        systems=systems,
        free=[0, 1, 2],
    )
    assert [each.shape for each in found] == [(3, 3, 3, 3), (0, 3, 0, 3)]
    assert near(found[0], torch.from_numpy(pair_hessian(part.numpy())))


def test_interacting_systems_are_refused(x: Tensor) -> None:
    with pytest.raises(hodiff.InputError, match="systems that do not interact"):
        hodiff.atoms.hessian(lennard_jones, x, systems=torch.tensor([0, 0, 0, 1, 1, 1]))
    # The mean over the batch couples the copies.
    with pytest.raises(hodiff.InputError, match="systems that do not interact"):
        hodiff.atoms.hessian(lambda x: lennard_jones(x - 1e-2 * x.sin().mean(0)), x, batched=True)


def test_soft_systems_next_to_stiff_ones_are_compared_by_themselves(x: Tensor) -> None:
    def apart(y: Tensor) -> Tensor:
        first, second = y.split(len(x))
        return 1e6 * lennard_jones(first) + lennard_jones(second)

    systems = torch.arange(2).repeat_interleave(len(x))
    both = torch.cat([x, x + 20])
    found = hodiff.atoms.hessian(apart, both, systems=systems)
    exact = torch.from_numpy(pair_hessian(x.numpy()))
    assert near(found[0], 1e6 * exact)
    assert near(found[1], exact)

    def weak(y: Tensor) -> Tensor:
        first, second = y.split(len(x))
        return apart(y) + 0.1 * (first.mean(0) * second.mean(0)).sum()

    with pytest.raises(hodiff.InputError, match="forces on system 1 that depend on the positions of another"):
        hodiff.atoms.hessian(weak, both, systems=systems)


def test_batches_of_energies_of_a_single_system_are_refused(x: Tensor) -> None:
    def single(x: Tensor) -> Tensor:
        atoms, _ = x.shape
        return lennard_jones(x) / atoms

    with pytest.raises(hodiff.InputError, match=r"batched: expected an energy of positions \(B, N, 3\)"):
        hodiff.atoms.hessian(single, x, batched=True)
    with pytest.raises(ZeroDivisionError):
        hodiff.atoms.hessian(lambda x: lennard_jones(x) / 0 + 1 / 0, x, batched=True)


def test_one_product_evaluates_the_energy_once(x: Tensor) -> None:
    calls = []

    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return lennard_jones(x)

    # A first call may compare the gradient with differences, once for each function.
    hodiff.atoms.hvp(counted, x, x)
    calls.clear()
    found = hodiff.atoms.hvp(counted, x, x)
    assert len(calls) == 1
    torch.testing.assert_close(found, (torch.from_numpy(pair_hessian(x.numpy())) * x).sum((2, 3)))

    def noisy(x: Tensor) -> Tensor:
        return lennard_jones(torch.nn.functional.dropout(x, 0.5))

    with pytest.raises(hodiff.InputError, match="expected the same value each time"):
        hodiff.atoms.hvp(noisy, x, x)

    def seeded(x: Tensor) -> Tensor:
        return lennard_jones(x + 0.01 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).double())

    torch.testing.assert_close(
        hodiff.atoms.hvp(seeded, x, x)[None], hodiff.atoms.hvp(seeded, x, torch.stack([x, x]))[:1]
    )


class Cube(torch.autograd.Function):
    """Without rules for vmap."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * g * x.square()


class Network(nn.Module):
    """Two rounds of messages between all pairs of atoms."""

    def __init__(self, activation: Callable[[Tensor], Tensor]):
        super().__init__()
        self.messages = nn.ModuleList([nn.Linear(9, 8), nn.Linear(9, 8)])
        self.readout = nn.Linear(8, 1)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        d = (x[..., :, None, :] - x[..., None, :, :]).square().sum(-1, keepdim=True)
        h = x.new_ones(*x.shape[:-1], 8)
        for layer in self.messages:
            pairs = torch.cat([h[..., None, :, :].expand(*d.shape[:-1], 8), d], -1)
            h = h + (self.activation(layer(pairs)) * torch.exp(-d)).mean(-2)
        return self.readout(h).sum((-2, -1))


@pytest.mark.filterwarnings("ignore:.*vmap")
@pytest.mark.parametrize("activation", [torch.tanh, Cube.apply])
def test_network_against_differences_of_forces(x: Tensor, activation: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Network(activation).double()

    def force(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(model(x), x)[0]

    step = 1e-5
    expected = torch.stack([
        (force(x + step * e) - force(x - step * e)) / (2 * step)
        for e in torch.eye(18, dtype=torch.float64).view(18, 6, 3)
    ]).view(6, 3, 6, 3)
    found = hodiff.atoms.hessian(model, x)
    assert near(found, expected, 1e-8)
    assert near(hodiff.atoms.hessian(model, x, batched=True), found, 1e-12)
    # The weights require gradients, and the result has no graph.
    assert found.numpy().shape == (6, 3, 6, 3)
    hodiff.atoms.hvp(model, x, x).numpy()


@pytest.mark.slow
def test_compiled_models_are_differentiated(x: Tensor) -> None:
    """Torch itself refuses the second derivative of what its compiler made."""
    torch.manual_seed(0)
    model = Network(torch.tanh).double()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    assert near(hodiff.atoms.hessian(compiled, x), hodiff.atoms.hessian(model, x))


@pytest.mark.slow
def test_compiled_products(x: Tensor, exact: Tensor) -> None:
    assert near(hodiff.atoms.hessian(lennard_jones, x, compile=True), exact)
    found = hodiff.atoms.hessian(lennard_jones, x, rows=[5, 1], free=[1, 2, 5], compile=True)
    assert near(found, exact[[5, 1]][:, :, [1, 2, 5]])
    with pytest.raises(hodiff.InputError, match="compile: expected False with batched"):
        hodiff.atoms.hessian(lennard_jones, x, batched=True, compile=True)


def test_single_precision(x: Tensor, exact: Tensor) -> None:
    found = hodiff.atoms.hessian(lennard_jones, x.float())
    assert found.dtype == torch.float32
    assert near(found.double(), exact, 3e-6)


class NotAGradient(torch.autograd.Function):
    """Its gradient is the derivative of no function."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * x.roll(1, -1)


@pytest.mark.parametrize("batched", [False, True])
def test_asymmetric_hessians_warn(x: Tensor, batched: bool) -> None:
    with pytest.warns(hodiff.HodiffWarning, match="not symmetric"):
        hodiff.atoms.hessian(lambda x: lennard_jones(NotAGradient.apply(x)), x, batched=batched)


def test_smaller_groups_if_memory_runs_out(x: Tensor, exact: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    dense = hodiff.HessianOperator.to_dense

    def limited(self: hodiff.HessianOperator, *, progress: bool) -> Tensor:
        sizes.append(self.chunk_size)
        if self.chunk_size > 4:
            raise torch.OutOfMemoryError("no memory")
        return dense(self, progress=progress)

    monkeypatch.setattr(hodiff.HessianOperator, "to_dense", limited)
    assert near(hodiff.atoms.hessian(lennard_jones, x), exact)
    assert sizes == [18, 4]
    with pytest.raises(torch.OutOfMemoryError):
        hodiff.atoms.hessian(lennard_jones, x, chunk_size=8)


def test_groups_follow_from_measured_memory(x: Tensor, exact: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of 2 MiB for each column leaves 8 columns for 16 MiB, or a little fewer."""
    sizes = []
    dense = hodiff.HessianOperator.to_dense

    def noted(self: hodiff.HessianOperator, *, progress: bool) -> Tensor:
        sizes.append(self.chunk_size)
        return dense(self, progress=progress)

    monkeypatch.setattr(hodiff.HessianOperator, "to_dense", noted)
    table = torch.ones(2**18, dtype=torch.float64)
    found = hodiff.atoms.hessian(lambda x: lennard_jones(x) + (x[0, 0] * table).square().sum(), x)
    exact = exact.clone()
    exact[0, 0, 0, 0] += 2 * 2**18
    assert near(found, exact)
    assert hodiff.atoms.hessian(lennard_jones, x).shape == found.shape
    assert 1 <= sizes[0] <= 8 < sizes[1]


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    assert torch.get_num_threads() == 4
    torch.set_num_threads(before)


def threads_of(kind: type, x: Tensor, **options: Any) -> set[int]:
    """The threads that pull back through a node whose hook notes them."""
    seen = set()

    def note(g: Tensor) -> None:
        seen.add(threading.get_ident())
        time.sleep(0.03)  # so that one thread does not take all groups

    def noting(x: Tensor) -> Tensor:
        y = kind.apply(x) if issubclass(kind, torch.autograd.Function) else 1 * x
        y.register_hook(note)
        return lennard_jones(y)

    found = hodiff.atoms.hessian(noting, x, **options)
    assert near(found, hodiff.atoms.hessian(lennard_jones, x, **{**options, "chunk_size": 1}))
    return seen


@pytest.mark.usefixtures("four_threads")
def test_groups_run_in_threads(x: Tensor) -> None:
    main = threading.get_ident()
    assert len(threads_of(Tensor, x) - {main}) > 1
    assert len(threads_of(Tensor, x, rows=[0, 1, 2, 3, 4]) - {main}) > 1
    assert threads_of(Tensor, x, chunk_size=1) == {main}  # the least memory


@pytest.mark.usefixtures("four_threads")
def test_functions_of_users_run_in_the_calling_thread(x: Tensor) -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g.clone()

    assert threads_of(Own, x) == {threading.get_ident()}


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("mode", [LivePeak, lambda: torch.autocast("cpu"), lambda: torch.device("cpu")])
def test_modes_see_every_group(x: Tensor, mode: Callable[[], AbstractContextManager[Any]]) -> None:
    with mode():
        assert threads_of(Tensor, x) == {threading.get_ident()}


@pytest.mark.usefixtures("four_threads")
def test_an_error_in_a_thread_is_raised(x: Tensor) -> None:
    main = threading.get_ident()

    def refuse(g: Tensor) -> None:
        if threading.get_ident() != main:
            raise ValueError("not here")

    def energy(x: Tensor) -> Tensor:
        y = 1 * x
        y.register_hook(refuse)
        return lennard_jones(y)

    with pytest.raises(ValueError, match="not here"):
        hodiff.atoms.hessian(energy, x)


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_in_threads(x: Tensor, exact: Tensor, reentrant: bool) -> None:
    def energy(x: Tensor) -> Tensor:
        return checkpoint(lennard_jones, x, use_reentrant=reentrant)

    assert near(hodiff.atoms.hessian(energy, x), exact)


def test_measured_memory() -> None:
    x = torch.zeros(1000, dtype=torch.float64)
    with LivePeak() as live:
        kept = x + 1
        for _ in range(3):
            _ = (x + 2) * 3
        kept.view(10, 100).t()
    assert live.peak == 3 * 8000
    del _
    assert live.bytes == 8000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((lambda x: x), torch.zeros(2, 3)), "energy: expected a function that returns one energy"),
        ((lennard_jones, torch.zeros(6)), "positions: expected a floating-point tensor of shape"),
        ((lennard_jones, np.zeros((2, 3))), "torch.from_numpy"),
        ((3, torch.zeros(2, 3)), "energy"),
    ],
)
def test_wrong_arguments(arguments: tuple, message: str) -> None:
    with pytest.raises(hodiff.InputError, match=message):
        hodiff.atoms.hessian(*arguments)


@pytest.mark.parametrize(
    "options",
    [{"free": [0, 6]}, {"free": [1, 1]}, {"free": []}, {"free": torch.ones(5, dtype=torch.bool)}, {"free": "all"},
     {"rows": [3], "free": [1, 2]}, {"rows": [-1]}, {"systems": torch.ones(6)}, {"systems": torch.arange(6) + 1},
     {"batched": 1}, {"chunk_size": 0}],
)  # fmt: skip
def test_wrong_options(x: Tensor, options: dict) -> None:
    (name, *_) = options
    with pytest.raises(hodiff.InputError, match=rf"atoms\.hessian: .*{name}"):
        hodiff.atoms.hessian(lennard_jones, x, **options)


def test_wrong_vectors(x: Tensor) -> None:
    for v in (x[:2], x.float(), x[None, None], [1.0]):
        with pytest.raises(hodiff.InputError, match=r"atoms\.hvp: v: expected"):
            hodiff.atoms.hvp(lennard_jones, x, v)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ase.calculators.calculator", None)
    monkeypatch.delitem(sys.modules, "hodiff.atoms.ase", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'hodiff\[atoms\]'"):
        importlib.import_module("hodiff.atoms.ase")
