"""`PINNKFAC` against its equations written with dense matrices, and against the exact Gauss-Newton matrix."""

import copy
import itertools

import pytest
import torch
from torch import nn

import hodiff

D = torch.float64


def network(sizes=(2, 5, 4, 1), bias=True, seed=0):
    torch.manual_seed(seed)
    layers = [[nn.Linear(a, b, bias=bias), nn.Tanh()] for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*itertools.chain(*layers)).double()[:-1]


def points(count, dims=2, seed=1):
    return torch.rand(count, dims, generator=torch.Generator().manual_seed(seed), dtype=D)


def source(x):
    return torch.sin(3 * x[0]) * x[1]


def terms(model):
    def u(x):
        return model(x)[0]

    def equation(x):
        return hodiff.laplacian(u)(x) + source(x)

    return (equation, points(7)), (u, points(6, seed=2).round())


class Dense:
    """The method's equations for a network of linear layers and tanh, with loops, and no code of hodiff."""

    def __init__(self, model, damping, decay):
        self.matrices = [torch.cat([m.weight, m.bias[:, None]], 1).detach() for m in model if isinstance(m, nn.Linear)]
        self.damping, self.decay, self.averages, self.count, self.last = damping, decay, {}, 0, None

    def forward(self, matrices, x):
        """Propagate value, slopes and Laplacian; return the vectors that the layers map, and their images."""
        one, zero = torch.ones(1, dtype=D), torch.zeros(1, dtype=D)
        vectors = [
            torch.cat([x, one]),
            *(torch.cat([e, zero]) for e in torch.eye(len(x), dtype=D)),
            torch.zeros(len(x) + 1, dtype=D),
        ]
        given, found = [], []
        for W in matrices:
            given.append(vectors)
            images = [W @ each for each in vectors]
            found.append(images)
            value, *slopes, bend = images
            t = value.tanh()
            first, second = 1 - t**2, -2 * t * (1 - t**2)
            bent = first * bend + second * sum(s**2 for s in slopes)
            vectors = [torch.cat([t, one]), *(torch.cat([first * s, zero]) for s in slopes), torch.cat([bent, zero])]
        return given, found, images

    def residual(self, kind, matrices, x):
        given, found, images = self.forward(matrices, x)
        return given, found, (images[-1][0] + source(x) if kind == "equation" else images[0][0])

    def step(self, inside, edge):
        rows, residuals, factors = [], [], {}
        for kind, place in (("equation", inside), ("value", edge)):
            for x in place:
                leaves = [W.clone().requires_grad_() for W in self.matrices]
                given, found, r = self.residual(kind, leaves, x)
                flat = [v for images in found for v in images]
                g = iter(torch.autograd.grad(r, flat, retain_graph=True, allow_unused=True))
                for i, (vectors, images) in enumerate(zip(given, found, strict=True)):
                    pairs = [(a, b) for a, b in zip(vectors, [next(g) for _ in images], strict=True) if b is not None]
                    # In the first layer, the Laplacian of the input is zero, and no jet holds it.
                    pairs = pairs[:-1] if i == 0 and kind == "equation" else pairs
                    A, B = factors.setdefault((kind, i), (0, 0))
                    A = A + sum(torch.outer(a, a) for a, _ in pairs) / (len(place) * len(pairs))
                    B = B + sum(torch.outer(b, b) for _, b in pairs) / len(place)
                    factors[kind, i] = (A.detach(), B.detach())
                gradients = torch.autograd.grad(r, leaves, allow_unused=True)
                rows.append(torch.cat([e.reshape(-1) for e in gradients]) / len(place) ** 0.5)
                residuals.append(r.detach() / len(place) ** 0.5)
        J, r = torch.stack(rows), torch.stack(residuals)
        self.count += 1
        weight = max(1 / self.count, 1 - self.decay)
        for key, (A, B) in factors.items():
            old = self.averages.get(key, (A, B))
            self.averages[key] = tuple((1 - weight) * o + weight * n for o, n in zip(old, (A, B), strict=True))
        gradient, blocks = J.T @ r, []
        sizes = [W.numel() for W in self.matrices]
        for i, part in enumerate(gradient.split(sizes)):
            G = 0
            for kind in ("equation", "value"):
                A, B = (m + self.damping * torch.eye(len(m), dtype=D) for m in self.averages[kind, i])
                G = G + torch.kron(B, A)
            blocks.append(-torch.linalg.solve(G, part))
        return J, r, gradient, torch.cat(blocks), sizes

    def by_quadratic_model(self, inside, edge):
        J, _, gradient, step, sizes = self.step(inside, edge)
        ways = torch.stack([step] if self.last is None else [step, self.last])
        model = ways @ (J.T @ J + self.damping * torch.eye(len(step), dtype=D)) @ ways.T
        step, start = -torch.linalg.solve(model, ways @ gradient) @ ways, self.matrices
        losses = []
        for k in range(12):
            self.matrices = start
            self.move(0.5**k * step, sizes)
            losses.append(self.loss(inside, edge).item())
        self.matrices, self.last = start, 0.5 ** losses.index(min(losses)) * step
        self.move(self.last, sizes)

    def loss(self, inside, edge):
        terms = (("equation", inside), ("value", edge))
        return sum(sum(self.residual(k, self.matrices, x)[2] ** 2 for x in xs) / len(xs) / 2 for k, xs in terms)

    def with_momentum(self, inside, edge, lr, momentum):
        *_, step, sizes = self.step(inside, edge)
        self.last = lr * (step + (0 if self.last is None else momentum * self.last))
        self.move(self.last, sizes)

    def move(self, step, sizes):
        self.matrices = [W + s.view_as(W) for W, s in zip(self.matrices, step.split(sizes), strict=True)]

    def require_equal(self, model):
        found = [torch.cat([m.weight, m.bias[:, None]], 1) for m in model if isinstance(m, nn.Linear)]
        for W, expected in zip(found, self.matrices, strict=True):
            torch.testing.assert_close(W.detach(), expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("line_search_fn", ["quadratic", None])
def test_first_steps_are_those_of_dense_equations(line_search_fn):
    model = network()
    dense = Dense(model, damping=1e-2, decay=0.6)
    optimizer = hodiff.optim.PINNKFAC(
        model,
        lr=1.0 if line_search_fn else 0.3,
        damping=1e-2,
        momentum=0.7,
        factor_decay=0.6,
        line_search_fn=line_search_fn,
    )
    pairs = terms(model)
    (_, inside), (_, edge) = pairs
    for _ in range(3):
        optimizer.step(*pairs)
        if line_search_fn:
            dense.by_quadratic_model(inside, edge)
        else:
            dense.with_momentum(inside, edge, 0.3, 0.7)
        dense.require_equal(model)


def blocks_of(optimizer, layer, kind):
    state = optimizer.state[layer.weight]
    return torch.kron(state[f"B_{kind}"], state[f"A_{kind}"])


def exact_block(function, place, layer):
    """Compute the Gauss-Newton matrix of a layer by torch's reverse mode."""
    rows = []
    for x in place:
        W, b = torch.autograd.grad(function(x), [layer.weight, layer.bias], allow_unused=True)
        b = torch.zeros_like(layer.bias) if b is None else b
        rows.append(torch.cat([W, b[:, None]], 1).reshape(-1) / len(place) ** 0.5)
    J = torch.stack(rows)
    return J.T @ J


def test_last_layer_is_exact():
    model = network()
    (equation, inside), (u, edge) = terms(model)
    expected = [exact_block(f, place, model[-1]) for f, place in ((equation, inside), (u, edge))]
    optimizer = hodiff.optim.PINNKFAC(model)
    optimizer.step((equation, inside), (u, edge))
    for kind, G in zip(("derivatives", "values"), expected, strict=True):
        torch.testing.assert_close(blocks_of(optimizer, model[-1], kind), G, rtol=1e-10, atol=1e-12)


def test_all_layers_are_exact_for_one_sample_without_derivatives():
    model = network()
    (_, _), (u, edge) = terms(model)
    layers = [m for m in model if isinstance(m, nn.Linear)]
    expected = [exact_block(u, edge[:1], layer) for layer in layers]
    optimizer = hodiff.optim.PINNKFAC(model)
    optimizer.step((u, edge[:1]))
    for layer, G in zip(layers, expected, strict=True):
        torch.testing.assert_close(blocks_of(optimizer, layer, "values"), G, rtol=1e-10, atol=1e-12)


def test_gradients_and_loss_are_those_of_the_loss():
    model = network()
    pairs = terms(model)
    loss = sum(torch.stack([f(x) for x in place]).square().mean() / 2 for f, place in pairs)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    found = hodiff.optim.PINNKFAC(model).step(*pairs)
    torch.testing.assert_close(found, loss.detach())
    for p, g in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 6, 1), (2, 6, 3)], ids=["one output", "three outputs"])
def test_chunks_and_a_restored_state_take_the_same_steps(sizes):
    model = network(sizes)

    def system(model):
        def equation(x):
            return hodiff.laplacian(model)(x) * model(x) + source(x)

        return (equation, points(9)), (model, points(5, seed=3))

    others = [copy.deepcopy(model) for _ in range(2)]
    plain = hodiff.optim.PINNKFAC(model, damping=1e-3)
    chunked = hodiff.optim.PINNKFAC(others[0], damping=1e-3, chunk_size=4)
    for _ in range(3):
        plain.step(*system(model))
        chunked.step(*system(others[0]))
    others[1].load_state_dict(model.state_dict())
    again = hodiff.optim.PINNKFAC(others[1], damping=0.5)
    again.load_state_dict(plain.state_dict())
    for optimizer, net in ((plain, model), (chunked, others[0]), (again, others[1])):
        optimizer.step(*system(net))
    for p, q, r in zip(model.parameters(), others[0].parameters(), others[1].parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(r, p, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", [{}, {"line_search_fn": "grid", "momentum": 0.5}], ids=["quadratic", "grid"])
@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_training_lowers_the_loss(bias, options, dtype):
    model = network((2, 10, 1), bias=bias).to(dtype)
    pairs = [(f, place.to(dtype)) for f, place in terms(model)]
    optimizer = hodiff.optim.PINNKFAC(model, damping=1e-4, **options)
    losses = [optimizer.step(*pairs).item() for _ in range(25)]
    assert losses[-1] < 0.1 * losses[0]


def by_nested_gradients(model):
    def laplacian(x):
        return torch.func.hessian(lambda y: model(y)[0])(x).diagonal().sum()

    return laplacian


def by_functional(model):
    def value(x):
        (first, bias), *_ = ((m.weight, m.bias) for m in model if isinstance(m, nn.Linear))
        return torch.nn.functional.linear(x, first, bias).sum() + model(x)[0]

    return value


@pytest.mark.parametrize(
    ("function", "remedy"),
    [
        (by_nested_gradients, r"replace torch\.func\.grad"),
        (by_functional, r"got another use of 0\.weight .* call the layer instead of torch\.nn\.functional\.linear"),
    ],
)
def test_uses_outside_of_layers_and_taylor_mode_are_refused(function, remedy):
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(
        hodiff.InputError, match=rf"PINNKFAC: step: function: expected .* Taylor mode, .*{remedy}.* hodiff\.optim\.ENGD"
    ):
        hodiff.optim.PINNKFAC(model).step((function(model), points(5)))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_errors_name_the_argument():
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1)).double()
    with pytest.raises(
        hodiff.InputError, match=r"PINNKFAC: model: expected trained weights of torch\.nn\.Linear .* got 1\.weight"
    ):
        hodiff.optim.PINNKFAC(model)
    model[1].requires_grad_(False)
    hodiff.optim.PINNKFAC(model)
    model[0].bias.requires_grad_(False)
    with pytest.raises(hodiff.InputError, match="weight and bias of each layer trained together"):
        hodiff.optim.PINNKFAC(model)
    net = network()
    optimizer = hodiff.optim.PINNKFAC(net)
    with pytest.raises(hodiff.InputError, match=r"PINNKFAC: step: expected pairs \(function, points\), got None"):
        optimizer.step()
    with pytest.raises(hodiff.InputError, match=r"without random numbers"):
        optimizer.step((lambda x: nn.functional.dropout(net(x)), points(4)))
    with pytest.raises(hodiff.InputError, match="depend on the model's parameters"):
        optimizer.step((lambda x: net(x).detach() + 1, points(4)))
    with pytest.raises(hodiff.InputError, match="finite"):
        optimizer.step((lambda x: net(x) / 0, points(4)))
    with pytest.raises(hodiff.InputError, match="damping with which the factors are positive definite"):
        hodiff.optim.PINNKFAC(net, damping=0.0).step((lambda x: net(x) * 0 + x[0], points(1)))
    with pytest.raises(hodiff.InputError, match="line_search_fn"):
        hodiff.optim.PINNKFAC(net, line_search_fn="strong_wolfe")
