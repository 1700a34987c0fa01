"""Tests of K-FAC and EK-FAC against natural gradients in closed form, steps by hand, and hodiff's operators."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drawing import seeded
from optim.table import TABLE, Problem, same
from torch import nn
from torch.utils.checkpoint import checkpoint

import hodiff
from hodiff.optim import EKFAC, KFAC, SophiaG
from hodiff.optim.kfac.fisher_columns import columns_of, find_any

D = torch.float64
RNG = np.random.default_rng(0)


def step_of(optimizer, model, loss):
    """Return the step for each parameter."""
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
    return [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)]


PLAIN = {"lr": 1.0, "momentum": 0.0, "kl_clip": None, "fisher": "exact", "update_every": 1, "refresh_every": 1}


@pytest.mark.parametrize(("make", "damping"), [(KFAC, 0.0), (EKFAC, 0.3)])
def test_deep_linear_networks_take_natural_gradient_steps(make, damping):
    # Two layers 3 -> 2 -> 4 and the mean squared error: Fisher blocks are J^T J, with Jacobians by hand.
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 4, bias=False)).double()
    x, y = RNG.standard_normal((20, 3)), RNG.standard_normal((20, 4))
    first, second = (p.detach().numpy() for p in model.parameters())
    jacobians = [
        np.concatenate([np.kron(second, each[None]) for each in x]),
        np.concatenate([np.kron(np.eye(4), first @ each) for each in x]),
    ]
    excess = (x @ first.T @ second.T - y).reshape(-1) * 2 / y.size
    expected = [
        np.linalg.solve(2 / y.size * jac.T @ jac + damping * np.eye(jac.shape[1]), jac.T @ excess) for jac in jacobians
    ]
    inputs, targets = torch.from_numpy(x), torch.from_numpy(y)
    ours = step_of(
        make(model.parameters(), **PLAIN, damping=damping), model, lambda: F.mse_loss(model(inputs), targets)
    )
    for our, true in zip(ours, expected, strict=True):
        np.testing.assert_allclose(our.numpy().reshape(-1), true, rtol=1e-8)


def test_kfac_matches_pseudocode():
    lr, alpha, damping, decay, beta, kappa = 0.5, 0.6, 0.02, 0.1, 0.7, 0.05
    model = nn.Linear(3, 4).double()
    optimizer = KFAC(
        model.parameters(),
        lr,
        alpha,
        damping,
        decay,
        factor_decay=beta,
        kl_clip=kappa,
        update_every=2,
        refresh_every=2,
        generator=seeded(7),
    )
    w = np.concatenate([model.weight.detach().numpy(), model.bias.detach().numpy()[:, None]], 1)
    x, y = RNG.standard_normal((6, 4)), RNG.integers(0, 4, 6)
    x[:, 3] = 1
    generator, momentum, count, clipped, A, B = seeded(7), 0.0, 0, 0, 0.0, 0.0
    for step in range(10):
        z = x @ w.T
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        gradient = (p - np.eye(4)[y]).T @ x / 6
        if step % 2 == 0:
            count += 1
            drawn = torch.multinomial(torch.from_numpy(p).float(), 1, generator=generator)[:, 0].numpy()
            g = p - np.eye(4)[drawn]
            new = x.T @ x / 6, g.T @ g / 6
            weight = max(1 / count, 1 - beta)
            A, B = ((1 - weight) * old + weight * one for old, one in zip((A, B), new, strict=True))
            if count in (1, 2, 4):
                pi = np.sqrt(np.trace(A) / 4 / (np.trace(B) / 4))
                inverses = [
                    np.linalg.inv(B + np.sqrt(damping) / pi * np.eye(4)),
                    np.linalg.inv(A + np.sqrt(damping) * pi * np.eye(4)),
                ]
        direction = inverses[0] @ gradient @ inverses[1]
        nu = min(1, np.sqrt(kappa / (lr**2 * (direction * gradient).sum())))
        clipped += nu < 1
        momentum = alpha * momentum + nu * direction
        w = (1 - lr * decay) * w - lr * momentum
        optimizer.zero_grad()
        F.cross_entropy(model(torch.from_numpy(x[:, :3].copy())), torch.from_numpy(y)).backward()
        optimizer.step()
    assert 0 < clipped < 10
    np.testing.assert_allclose(model.weight.detach().numpy(), w[:, :3], rtol=1e-5)
    np.testing.assert_allclose(model.bias.detach().numpy(), w[:, 3], rtol=1e-5)


def test_ekfac_averages_second_moments_in_its_basis():
    # One layer without bias, so the gradient of an example is g a^T. The basis changes at steps one and two of three.
    model = nn.Linear(3, 2, bias=False).double()
    optimizer = EKFAC(model.parameters(), **{**PLAIN, "refresh_every": 4}, damping=0.1, factor_decay=0.5)
    w, values, A, B = model.weight.detach().numpy().copy(), 0.0, 0.0, 0.0
    for count in range(1, 4):
        x, y = RNG.standard_normal((5, 3)), RNG.standard_normal((5, 2))
        gradient = (x @ w.T - y).T @ x * 2 / y.size
        new = x.T @ x / 5, np.eye(2) * 2 / y.size * 5
        weight = max(1 / count, 0.5)
        A, B = ((1 - weight) * old + weight * one for old, one in zip((A, B), new, strict=True))
        if count < 3:
            (a, right), (b, left) = np.linalg.eigh(A), np.linalg.eigh(B)
            values = np.outer(b, a)
        columns = [np.sqrt(2 / y.size) * left.T @ np.outer(e, each) @ right for e in np.eye(2) for each in x]
        values = (1 - weight) * values + weight * sum(each**2 for each in columns)
        step = left @ (left.T @ gradient @ right / (values + 0.1)) @ right.T
        (ours,) = step_of(
            optimizer, model, lambda x=x, y=y: F.mse_loss(model(torch.from_numpy(x)), torch.from_numpy(y))
        )
        np.testing.assert_allclose(ours.numpy(), step, rtol=1e-9)
        w = w - step


class Picture(nn.Module):
    """A model with convolution, normalization and a shared layer."""

    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(2, 4, 2, groups=2), nn.GroupNorm(2, 4)
        self.shared, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x):
        x = self.norm(self.convolution(x)).flatten(2).mT
        return self.head(self.shared(self.shared(x).tanh()).mean(1))


class Sentence(nn.Module):
    """A model of tokens, with logits (N, C, T)."""

    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(5, 3), nn.LayerNorm(3), nn.Linear(3, 4)

    def forward(self, x):
        x = self.norm(self.table(x))
        return self.head(x.cumsum(1).tanh()).mT


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("make", [KFAC, EKFAC])
@pytest.mark.parametrize("kind", [Picture, Sentence])
def test_first_steps_match_operators(make, kind, sharing):
    torch.manual_seed(0)
    model = kind().double()
    if kind is Picture:
        inputs, labels = torch.randn(5, 2, 3, 3, dtype=D), torch.tensor([0, 2, -100, 1, 1])
    else:
        inputs, labels = torch.randint(5, (4, 3)), torch.randint(4, (4, 3))
    of = {"fisher": "exact", "sharing": sharing, "norm": "diagonal"}
    operator = {KFAC: hodiff.KFACOperator, EKFAC: hodiff.EKFACOperator}[make]
    x = {name: p.detach().clone() for name, p in model.named_parameters()}
    matrix = operator(model, F.cross_entropy, x, inputs, labels, **of)
    gradient = torch.func.grad(lambda p: F.cross_entropy(torch.func.functional_call(model, p, (inputs,)), labels))(x)
    expected = matrix.inverse("heuristic" if make is KFAC else "exact", damping=0.1) @ gradient
    optimizer = make(model.parameters(), **PLAIN, damping=0.1, sharing=sharing)
    ours = step_of(optimizer, model, lambda: F.cross_entropy(model(inputs), labels))
    torch.testing.assert_close(ours, list(expected.values()), rtol=1e-8, atol=1e-12)


LOSSES = {
    "labels": (lambda z: F.cross_entropy(z, torch.tensor([1, 0, -100, 2])), (4, 3)),
    "labels, sum, scaled": (lambda z: 3 * F.cross_entropy(z, torch.tensor([1, 0, 2, 2]), reduction="sum"), (4, 3)),
    "labels of places": (lambda z: F.cross_entropy(z, torch.tensor([[1, 0], [2, -100]])), (2, 3, 2)),
    "squares": (lambda z: nn.MSELoss()(z.new_zeros(3, 2), z), (3, 2)),
    "squares, sum": (lambda z: F.mse_loss(z, torch.ones(3), reduction="sum"), (3,)),
    "bits": (lambda z: F.binary_cross_entropy_with_logits(z, (z > 0).to(z)), (3, 2)),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", LOSSES)
def test_columns_are_square_roots_of_the_loss_hessian(name):
    loss, shape = LOSSES[name]
    z = torch.randn(shape, generator=seeded(), dtype=D, requires_grad=True)
    value = loss(z)
    found = find_any("test", value)
    true = torch.func.hessian(lambda each: loss(each.reshape(shape)))(z.detach().reshape(-1))
    n = shape[0]

    def pulled(columns):
        rows = columns.chunk(0, len(columns))
        return torch.stack([torch.autograd.grad([found.edge], z, [row], retain_graph=True)[0] for row in rows])

    def blocks(rows):
        """Return the block-diagonal matrix of the examples' sums of outer products."""
        rows = rows.reshape(len(rows), n, -1)
        return torch.block_diag(*torch.einsum("cni,cnj->nij", rows, rows))

    torch.testing.assert_close(blocks(pulled(columns_of(found, value, "exact", seeded()))), true, rtol=1e-9, atol=1e-12)
    generator = seeded()
    draws = torch.cat([pulled(columns_of(found, value, "monte-carlo", generator)) for _ in range(1000)])
    drawn = blocks(draws) / 1000
    assert (drawn - true).norm() < 0.12 * true.norm()
    (given,) = pulled(columns_of(found, value, "empirical", generator))
    (gradient,) = torch.autograd.grad(value, z)
    terms = (true.diagonal() != 0).sum() / (shape[1] if "labels" in name else 1)  # terms that are not ignored
    weight = 3 * terms if "scaled" in name else terms if "sum" in name else 1
    torch.testing.assert_close(given, gradient * (terms / weight) ** 0.5)


@pytest.mark.parametrize("make", [KFAC, EKFAC])
def test_two_backward_passes_match_one(make):
    torch.manual_seed(0)
    whole = Sentence().double()
    halves = Sentence().double()
    halves.load_state_dict(whole.state_dict())
    inputs, labels = torch.randint(5, (6, 3)), torch.randint(4, (6, 3))
    options = {**PLAIN, "sharing": "reduce", "damping": 0.1}
    ours = step_of(make(whole.parameters(), **options), whole, lambda: F.cross_entropy(whole(inputs), labels))
    optimizer = make(halves.parameters(), **options)
    before = [p.detach().clone() for p in halves.parameters()]
    for part in (slice(0, 3), slice(3, 6)):
        (F.cross_entropy(halves(inputs[part]), labels[part]) / 2).backward()
    optimizer.step()
    theirs = [b - p.detach() for b, p in zip(before, halves.parameters(), strict=True)]
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_update_curvature_accepts_a_smaller_batch():
    model, other = (nn.Linear(3, 2).double() for _ in range(2))
    other.load_state_dict(model.state_dict())
    x, y = torch.randn(8, 3, dtype=D), torch.randn(8, 2, dtype=D)
    optimizer = KFAC(model.parameters(), **{**PLAIN, "update_every": None}, damping=0.1)
    optimizer.update_curvature(F.mse_loss(model(x[:4]), y[:4]))
    state = optimizer.state[model.weight]
    rows = torch.cat([x[:4], torch.ones(4, 1, dtype=D)], 1)
    torch.testing.assert_close(state["A"][0], rows.T @ rows / 4)
    ours = step_of(optimizer, model, lambda: F.mse_loss(model(x), y))
    optimizer = KFAC(other.parameters(), **PLAIN, damping=0.1)
    optimizer.update_curvature(F.mse_loss(other(x[:4]), y[:4]))
    torch.testing.assert_close(ours, step_of(optimizer, other, lambda: F.mse_loss(other(x), y)))


def test_update_curvature_evaluates_closures_on_any_step():
    model = nn.Linear(3, 2).double()
    x, y = torch.randn(8, 3, dtype=D), torch.randn(8, 2, dtype=D)
    optimizer = KFAC(model.parameters(), **{**PLAIN, "update_every": 10}, damping=0.1)
    step_of(optimizer, model, lambda: F.mse_loss(model(x), y))
    before = optimizer.state[model.weight]["A"].clone()
    optimizer.update_curvature(lambda: F.mse_loss(model(x[:4]), y[:4]))
    rows = torch.cat([x[:4], torch.ones(4, 1, dtype=D)], 1)
    torch.testing.assert_close(optimizer.state[model.weight]["A"][0], (before[0] + rows.T @ rows / 4) / 2)


def test_batch_norm_in_training_and_bfloat16_work():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(9, 3)).bfloat16()
    optimizer = KFAC(model.parameters(), 0.05, damping=0.1, update_every=1)
    inputs, labels = torch.randn(16, 2, 4).bfloat16(), torch.randint(3, (16,))
    losses = [optimizer.step(lambda: F.cross_entropy(model(inputs).float(), labels)).item() for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]
    assert optimizer.state[model[0].weight]["A"].dtype == torch.float32
    assert all(p.isfinite().all() for p in model.parameters())


class Tied(nn.Module):
    """A model that uses a weight outside of its layer or in two layers, or has a parameter outside of layers."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.first, self.second = kind, nn.Linear(3, 3), nn.Linear(3, 3)
        if kind == "two":
            self.second.weight = self.first.weight
        if kind == "bare":
            self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        x = self.second(self.first(x))
        return x @ self.first.weight if self.kind == "function" else x * self.scale if self.kind == "bare" else x


@pytest.mark.parametrize(
    ("kind", "words"),
    [("two", "two layers, Linear.* and Linear"), ("function", "calls of their layers"), ("bare", "other parameters")],
)
def test_rejects_parameters_of_several_layers(kind, words):
    model = Tied(kind)
    optimizer = KFAC(model.parameters())
    with pytest.raises(hodiff.InputError, match=words):
        F.mse_loss(model(torch.randn(4, 3)), torch.randn(4, 3)).backward()
    del optimizer


def test_options_of_embeddings_are_named_with_their_remedy():
    model = nn.Sequential(nn.Embedding(4, 3, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(6, 2))
    optimizer = KFAC(model.parameters())
    message = (
        r"changes its gradient, got Embedding.* with scale_grad_by_freq; set scale_grad_by_freq=False and max_norm="
    )
    with pytest.raises(hodiff.InputError, match=message):
        F.mse_loss(model(torch.tensor([[0, 1], [1, 2]])), torch.ones(2, 2)).backward()
    del optimizer


@pytest.mark.parametrize("kind", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.orthogonal])
def test_names_the_parameters_of_parametrized_weights(kind):
    model = kind(nn.Linear(3, 3))
    optimizer = KFAC(model.parameters())
    words = r"Linear\.parametrizations\.weight\.original.* \(3, .*, or make .* by .*remove_parametrizations"
    with pytest.raises(hodiff.InputError, match=words):
        F.mse_loss(model(torch.randn(4, 3)), torch.randn(4, 3)).backward()
    del optimizer


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda z: z.square().sum(), "with 0 of them"),
        (lambda z: F.mse_loss(z, z.detach()) + F.cross_entropy(z, torch.tensor([0, 1])), "with 2 of them .*torch.cat"),
        (lambda z: F.cross_entropy(z, torch.tensor([0, 1]), weight=torch.ones(2)), "class weights"),
        (lambda z: F.mse_loss(z, z.detach(), reduction="none").sum(), "reduction='none'"),
        (lambda z: F.mse_loss(z, 2 * z), "targets that have a graph"),
    ],
)
def test_rejects_unknown_losses(loss, words):
    model = nn.Linear(3, 2)
    optimizer = KFAC(model.parameters())
    with pytest.raises(hodiff.InputError, match=words):
        loss(model(torch.randn(2, 3))).backward()
    del optimizer


@pytest.mark.parametrize("make", [KFAC, SophiaG])
def test_a_reentrant_checkpoint_is_refused_with_its_remedy(make):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = make(model.parameters())
    outputs = checkpoint(model[1], model[0](torch.randn(2, 3)), use_reentrant=True)
    with pytest.raises(hodiff.RouteError, match=f"{make.__name__}: .*pass use_reentrant=False"):
        F.cross_entropy(outputs, torch.tensor([0, 1])).backward()
    del optimizer


def test_layer_calls_are_recorded_on_curvature_steps_only():
    from hodiff.optim.kfac import layer_calls

    model = nn.Linear(2, 2)
    optimizer = KFAC(model.parameters(), update_every=5)
    optimizer.step(lambda: F.mse_loss(model(torch.ones(3, 2)), torch.zeros(3, 2)))
    assert not layer_calls._waiting
    assert not layer_calls._hooks
    assert not model(torch.ones(3, 2)).grad_fn.metadata
    again = KFAC(model.parameters())
    assert layer_calls._hooks
    assert model(torch.ones(3, 2)).grad_fn.metadata
    assert not nn.Linear(2, 2)(torch.ones(3, 2)).grad_fn.metadata
    del again
    model(torch.ones(3, 2))
    assert not layer_calls._hooks
    del optimizer


def two_equal_models():
    torch.manual_seed(0)
    one, two = (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double() for _ in range(2))
    two.load_state_dict(one.state_dict())
    return one, two, torch.randn(6, 3, dtype=D), torch.tensor([0, 1, 1, 0, 1, 1])


@pytest.mark.parametrize("fisher", ["monte-carlo", "empirical", "exact"])
def test_maximize_matches_minimizing_the_negative(fisher):
    down, up, x, y = two_equal_models()
    options = {**PLAIN, "fisher": fisher, "lr": 0.1, "damping": 0.1, "kl_clip": 0.01}
    for _ in range(2):
        ours = step_of(EKFAC(down.parameters(), **options), down, lambda: F.cross_entropy(down(x), y))
        theirs = step_of(EKFAC(up.parameters(), **options, maximize=True), up, lambda: -F.cross_entropy(up(x), y))
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
        assert ours[0].norm() > 1e-4


def test_weight_and_bias_in_separate_groups_share_a_block():
    whole, parts, x, y = two_equal_models()
    options = {**PLAIN, "damping": 0.1}
    expected = step_of(KFAC(whole.parameters(), **options), whole, lambda: F.cross_entropy(whole(x), y))
    weights, biases = list(parts.parameters())[::2], list(parts.parameters())[1::2]
    groups = [{"params": weights}, {"params": biases, "lr": 0.25}]
    ours = step_of(KFAC(groups, **options), parts, lambda: F.cross_entropy(parts(x), y))
    for our, true, rate in zip(ours, expected, [1.0, 0.25] * 2, strict=True):
        torch.testing.assert_close(our, rate * true, rtol=1e-10, atol=1e-14)


def test_frozen_biases_are_in_no_block():
    model, _, x, y = two_equal_models()
    model[0].bias.requires_grad_(False)
    optimizer = KFAC(model.parameters(), **PLAIN, damping=0.1)
    ours = step_of(optimizer, model, lambda: F.cross_entropy(model(x), y))
    torch.testing.assert_close(optimizer.state[model[0].weight]["A"][0], x.T @ x / 6)
    assert ours[0].norm() > 0
    assert not ours[1].any()


@pytest.mark.parametrize("make", [KFAC, EKFAC])
def test_ignored_rows_and_chunked_calls_match_the_used_rows(make):
    """A step with ignored rows and calls on chunks equals a step on the other rows at once."""
    whole, chunked, x, y = two_equal_models()
    labels = y.clone()
    labels[[1, 4]] = -100
    options = {**PLAIN, "damping": 0.1, "sharing": "reduce"}
    used = labels >= 0
    ours = step_of(
        make(chunked.parameters(), **options),
        chunked,
        lambda: F.cross_entropy(torch.cat([chunked(part) for part in x.split([1, 2, 3])]), labels),
    )
    theirs = step_of(make(whole.parameters(), **options), whole, lambda: F.cross_entropy(whole(x[used]), y[used]))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert ours[0].norm() > 1e-3


@pytest.mark.parametrize("make", [KFAC, EKFAC])
@pytest.mark.parametrize("fisher", ["monte-carlo", "empirical"])
def test_outputs_selected_before_the_loss_match(make, fisher):
    x, y = torch.randn(12, 3, generator=seeded(1), dtype=D), torch.arange(12) % 4
    picked = torch.arange(12) % 3 == 1
    steps = []
    for rows in (picked, slice(None)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
        kept = picked[rows]
        optimizer = make(model.parameters(), **{**PLAIN, "fisher": fisher}, damping=0.01, generator=seeded())
        steps.append(step_of(optimizer, model, lambda: F.cross_entropy(model(x[rows])[kept], y[rows][kept])))
    for alone, among in zip(*steps, strict=True):
        torch.testing.assert_close(among, alone, rtol=1e-9, atol=1e-12)


def test_padded_blocks_match_dense_inverses():
    """Blocks whose rows are padded for speed match inverses of the averaged factors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 65), nn.Tanh(), nn.Linear(65, 3)).double()
    x, y = torch.randn(5, 70, dtype=D), torch.tensor([0, 1, 2, 1, 0])
    optimizer = KFAC(model.parameters(), **PLAIN, damping=0.04)
    (weight, bias, *_) = step_of(optimizer, model, lambda: F.cross_entropy(model(x), y))
    first, state = model[0], optimizer.state[model[0].weight]
    A, B = state["A"][0].numpy(), state["B"][0].numpy()
    pi = np.sqrt(np.trace(A) / 71 / (np.trace(B) / 65))
    gradient = torch.cat([first.weight.grad, first.bias.grad[:, None]], 1).numpy()
    expected = np.linalg.inv(B + 0.2 / pi * np.eye(65)) @ gradient @ np.linalg.inv(A + 0.2 * pi * np.eye(71))
    np.testing.assert_allclose(torch.cat([weight, bias[:, None]], 1).numpy(), expected, rtol=1e-8, atol=1e-12)
    operator = hodiff.KFACOperator(model, F.cross_entropy, dict(model.named_parameters()), x, y)
    block = operator.blocks[0]
    V = torch.randn(2, 1, 65, 71, dtype=D)
    torch.testing.assert_close(block.multiply(V), block.B @ V @ block.A)
    assert state["A_inverse"].shape[-1] == 80


def test_rejects_losses_that_mix_positions_and_examples():
    """The exact matrix requires the places of each example, so outputs without this structure raise."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x, labels = torch.randn(4, 2, 4), torch.randint(3, (4, 2))
    optimizer = KFAC(model.parameters(), fisher="exact")
    with pytest.raises(hodiff.InputError, match=r"KFAC: fisher='exact': .* the 8 examples .*outputs.transpose\(1, 2\)"):
        nn.functional.cross_entropy(model(x).reshape(-1, 3), labels.reshape(-1)).backward()
    nn.functional.cross_entropy(model(x).transpose(1, 2), labels).backward()
    optimizer.step()
    assert all(each.isfinite().all() for each in model.parameters())


@pytest.mark.parametrize("make", [KFAC, EKFAC])
def test_momentum_stores_the_steps_that_were_taken(make):
    """A step at a large rate does not depend on earlier steps at a small rate, which `kl_clip` does not shorten."""
    moves = []
    for warm_up in (1, 5):
        problem = Problem()
        optimizer = make(problem.model.parameters(), lr=1e-7, kl_clip=1e-3)
        problem.run(TABLE["KFAC"], optimizer, problem.batches[:1] * warm_up)
        optimizer.param_groups[0]["lr"] = 0.5
        before = problem.numbers()
        problem.run(TABLE["KFAC"], optimizer, problem.batches[:1])
        moves.append([a - b for a, b in zip(problem.numbers(), before, strict=True)])
    torch.testing.assert_close(*moves, rtol=1e-2, atol=1e-4)


class Positions(nn.Module):
    """A layer for positions of examples, before their mean and another layer."""

    def __init__(self, dim, between):
        super().__init__()
        torch.manual_seed(0)
        self.dim, self.first, self.between, self.last = dim, nn.Linear(3, 4), between, nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.between(self.first(x).tanh().mean(self.dim)))


@pytest.mark.parametrize(("make", "options"), [(EKFAC, {}), (KFAC, {"sharing": "reduce"})])
def test_exact_fisher_rejects_positions_in_place_of_examples(make, options):
    x, y = torch.randn(5, 5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 1, 1])
    # The statistics of a batch couple examples, too, and count as constants.
    for model in (Positions(1, nn.Identity()), Positions(1, nn.BatchNorm1d(4)), Positions(0, nn.Identity())):
        optimizer = make(model.parameters(), fisher="exact", **options)
        loss = F.cross_entropy(model(x), y)
        if model.dim:
            loss.backward()
            optimizer.step()
            continue
        with pytest.raises(hodiff.InputError, match="keep positions in separate dimensions, or pass fisher='monte"):
            loss.backward()


@pytest.mark.parametrize("make", [KFAC, EKFAC])
@pytest.mark.parametrize(
    "rows", [lambda layer, x: torch.stack([layer(row) for row in x]), lambda layer, x: layer(x[:0])]
)
def test_rejects_layers_without_examples(make, rows):
    layers, x = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]), torch.randn(4, 3)
    optimizer = make(layers.parameters())
    optimizer.zero_grad()
    with pytest.raises(hodiff.InputError, match=r"one or more examples .*together, or give it to another optimizer"):
        F.cross_entropy(layers[0](x) + rows(layers[1], x).sum(0), torch.zeros(4, dtype=torch.int64)).backward()


def test_chunks_of_no_examples_do_not_count():
    x, labels, weights = torch.randn(4, 3), torch.tensor([0, 1, 1, 0]), []
    for sizes in ([4], [1, 0, 3]):
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
        optimizer = KFAC(layer.parameters(), fisher="exact")
        F.cross_entropy(torch.cat([layer(part) for part in x.split(sizes)]), labels).backward()
        optimizer.step()
        weights.append(layer.weight.detach())
    torch.testing.assert_close(*weights)


DAMAGES = {
    "A": (lambda state: state["A"][:0], r"got 'A' of shape \(0, 4, 4\) for a parameter \(2, 3\), which needs \(1, 4"),
    "B": (lambda state: state["B"].flatten(), r"got 'B' of shape \(4,\)"),
    "A_inverse": (lambda state: state["A_inverse"][None], r"got 'A_inverse' of shape \(1, 1, 4, 4\)"),
    "B_inverse": (lambda state: state["B_inverse"][:, :1], r"got 'B_inverse' of shape \(1, 1, 2\)"),
    "left": (lambda state: state["left"].flatten(), r"got 'left' of shape \(4,\)"),
    "right": (lambda state: state["right"][:0], r"got 'right' of shape \(0, 4, 4\)"),
    "values": (lambda state: state["values"].mT, r"got 'values' of shape \(1, 4, 2\)"),
    "layout": (lambda state: (), r"same shapes, got the block \(\) for"),
    "layout of others": (
        lambda state: (-1, ((0, (1, 3, 3), False),)),
        r"got the block \(-1, \(\(0, \(1, 3, 3\), False",
    ),
    "everything": (None, r"expected a block for each parameter with curvature, got none for a parameter \(2,\)"),
}


@pytest.mark.parametrize("make", [KFAC, EKFAC])
def test_rejects_damaged_states(make):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = make(model.parameters(), fisher="exact")
    for _ in range(2):
        F.cross_entropy(model(torch.randn(5, 3)), torch.tensor([0, 1, 1, 0, 1])).backward()
        optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(before)
    for name, (damage, message) in DAMAGES.items():
        entry, damaged = name.partition(" ")[0], copy.deepcopy(before)
        if damage is None:
            damaged["state"][0] = {}
        elif entry not in before["state"][0]:
            continue
        else:
            damaged["state"][0][entry] = damage(before["state"][0])
        with pytest.raises(hodiff.InputError, match="load_state_dict: .*" + message):
            optimizer.load_state_dict(damaged)
        assert str(optimizer.state_dict()) == str(before)


def test_momentum_of_older_states_is_accepted():
    ours, theirs = Problem(), Problem()
    for problem in (ours, theirs):
        optimizer = KFAC(problem.model.parameters(), lr=0.25)
        problem.run(TABLE["KFAC"], optimizer, problem.batches[:3])
        if problem is theirs:
            for state in optimizer.state.values():
                state["momentum_buffer"] = state.pop("last_step") / 0.25
        problem.run(TABLE["KFAC"], optimizer, problem.batches[3:])
    assert same(ours.numbers(), theirs.numbers())


@pytest.mark.parametrize("failures", [1, 2])
def test_eigenvectors_are_retried_in_higher_precision(monkeypatch, failures):
    """EKFAC retries in float64, and then in NumPy, if LAPACK does not converge."""
    plain, other = Problem(), Problem()
    expected = plain.run(TABLE["EKFAC"], TABLE["EKFAC"](plain.model.parameters()))
    eigh, calls = torch.linalg.eigh, []

    def failing(matrix, *args):
        calls.append(matrix)
        if len(calls) % 3 < failures:
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return eigh(matrix, *args)

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    found = other.run(TABLE["EKFAC"], TABLE["EKFAC"](other.model.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    assert calls
