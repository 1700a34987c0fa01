# %% [markdown]
# # Taylor mode
#
# Taylor mode evaluates a function on a truncated power series, and gets all derivatives in one pass. We write a small
# version, and measure the cost of a derivative of order K. Then we use hodiff's Taylor mode for Laplacians, a network
# that solves Poisson's equation, random directions in a hundred thousand dimensions, and differential equations.

# %%
import math
import time

import matplotlib.pyplot as plt
import torch
from scipy.integrate import solve_ivp
from torch import nn

import hodiff
from hodiff.taylor import explain, jet, ode_coefficients, odeint_taylor

torch.manual_seed(0)
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
plt.rcParams["figure.dpi"] = 72

# %% [markdown]
# ## Jets in a page
#
# A jet is the list of a series' coefficients, $u(t) = u_0 + u_1 t + u_2 t^2 + \dots$ A product of two series is a
# convolution of their coefficients. A function that solves a differential equation has a recurrence: from
# $v' = (1 - v^2)\,u'$ follow the coefficients of $v = \tanh u$, one after another.


# %%
def product(u, v):
    return [sum(u[i] * v[k - i] for i in range(k + 1)) for k in range(len(u))]


def tanh(u):
    v = [math.tanh(u[0])]
    for k in range(1, len(u)):
        slope = [1 - v[0] ** 2, *(-each for each in product(v, v)[1:])]  # of order k - 1, all that is known
        v.append(sum(j * u[j] * slope[k - j] for j in range(1, k + 1)) / k)
    return v


mine = tanh([0.5, 1.0, 0.0, 0.0, 0.0])
mine

# %% [markdown]
# hodiff does the same for torch's functions of tensors. `jet` has the interface of `jax.experimental.jet`.

# %%
x, one, zero = torch.tensor(0.5), torch.tensor(1.0), torch.tensor(0.0)
value, coefficients = jet(torch.tanh, (x,), ([one, zero, zero, zero],), normalized=True)
torch.testing.assert_close(torch.stack([value, *coefficients]), torch.tensor(mine))
print([round(each.item(), 6) for each in (value, *coefficients)])

# %% [markdown]
# Thirty derivatives are easy. The series of $\tanh$ at 0.5 converges up to the distance of the nearest pole,
# $|t| < |0.5 - i\pi/2| = 1.65$:

# %%
value, coefficients = jet(torch.tanh, (x,), ([one, *[zero] * 29],), normalized=True)
series = torch.stack([value, *coefficients])
t = torch.linspace(-2.2, 2.2, 200)
figure, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
ax.plot(t, torch.tanh(0.5 + t), "black", label="tanh(0.5 + t)")
for order in (1, 3, 7, 29):
    ax.plot(t, sum(series[k] * t**k for k in range(order + 1)), linewidth=1, label=f"order {order}")
for side in (-1, 1):
    ax.axvline(side * abs(complex(0.5, -math.pi / 2)), color="gray", linestyle=":")
ax.set(ylim=(-2, 2), xlabel="t")
legend = ax.legend(fontsize="small", ncols=2)

# %% [markdown]
# ## The cost of order K
#
# Every level of nested differentiation doubles the work, so order K costs about $2^K$ evaluations. A series costs at
# most $K^2$. We measure both along a line through a network:

# %%
net = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).requires_grad_(False)
point, direction = torch.randn(2, 10)


def slope_of(f):
    return lambda t: torch.func.jvp(f, (t,), (torch.ones(()),))[1]


def nested(order):
    def f(t):
        return net(point + t * direction)

    for _ in range(order):
        f = slope_of(f)
    return f(torch.zeros(()))


def by_series(order):
    return jet(net, (point,), ([direction, *[torch.zeros(10)] * (order - 1)],))[1][-1]


def milliseconds(call, repeats=3):
    def once():
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return 1e3 * min(once() for _ in range(repeats))


orders = range(1, 8)
times = {"nested forward mode": [], "series": []}
for order in orders:
    torch.testing.assert_close(nested(order), by_series(order))
    times["nested forward mode"].append(milliseconds(lambda order=order: nested(order)))
    times["series"].append(milliseconds(lambda order=order: by_series(order)))

print(f"{'order':>20}" + "".join(f"{each:>8}" for each in orders))
for name, row in times.items():
    print(f"{name + ', ms':>20}" + "".join(f"{each:8.2f}" for each in row))

# %%
figure, ax = plt.subplots(figsize=(5, 3), layout="constrained")
for name, row in times.items():
    ax.semilogy(orders, row, "o-", label=name)
ax.set(xlabel="order of the derivative", ylabel="ms")
legend = ax.legend()

# %% [markdown]
# ## Laplacians
#
# For $\Delta f = \sum_i \partial_i^2 f$ a jet needs the first derivatives in every direction, but only the sum of the
# second derivatives: the jet is *collapsed*. In three dimensions, the Laplacian of $r^3$ is $12\,r$, and the
# bilaplacian of $r^5$ is $360\,r$.

# %%
x = torch.tensor([2.0, 1.0, 2.0])
print(hodiff.laplacian(lambda x: x.norm() ** 3)(x))
print(hodiff.bilaplacian(lambda x: x.norm() ** 5)(x))

# %% [markdown]
# Compare it with the trace of `torch.func.hessian`, for a network with fifty inputs:

# %%
wide = nn.Sequential(nn.Linear(50, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
points = torch.randn(16, 50)
hessian_trace = torch.func.vmap(lambda x: torch.func.hessian(lambda y: wide(y)[0])(x).trace())
collapsed = hodiff.laplacian(wide, batched=True)
with torch.no_grad():
    torch.testing.assert_close(collapsed(points)[:, 0], hessian_trace(points))
    print(f"trace of the Hessian {milliseconds(lambda: hessian_trace(points)):.0f} ms")
    print(f"hodiff.laplacian     {milliseconds(lambda: collapsed(points)):.0f} ms")

# %% [markdown]
# ## A network for Poisson's equation, in ten lines
#
# The equation is $-\Delta u = f$ on the unit square, with $u = 0$ on its edge and the solution
# $\sin \pi x \, \sin \pi y$. Gradients with respect to the parameters go through the Laplacian.

# %%
body = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))


def u(p):
    return (p * (1 - p)).prod(-1) * body(p)[:, 0]


def solution(p):
    return torch.sin(math.pi * p).prod(-1)


inside = torch.rand(300, 2)
optimizer = torch.optim.LBFGS(body.parameters(), max_iter=150, history_size=50, line_search_fn="strong_wolfe")


def closure():
    optimizer.zero_grad()
    residual = hodiff.laplacian(u, batched=True)(inside) + 2 * math.pi**2 * solution(inside)
    loss = residual.square().mean()
    loss.backward()
    return loss


optimizer.step(closure)
axis = torch.linspace(0, 1, 41)
grid = torch.cartesian_prod(axis, axis)
off = (u(grid) - solution(grid)).detach()
assert off.abs().max() < 1e-2
print(f"largest error {off.abs().max():.1e}")

# %%
figure, axes = plt.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
for ax, values, title in zip(axes, (u(grid).detach(), off), ("u of the network", "its error"), strict=True):
    shown = ax.imshow(values.reshape(41, 41).T, origin="lower", extent=(0, 1, 0, 1))
    ax.set_title(title)
    figure.colorbar(shown, ax=ax)

# %% [markdown] The same solution satisfies the plate equation $\Delta^2 u = 4 \pi^4 u$. The network was trained on
# second derivatives, but it also has fourth derivatives. They are less accurate:

# %%
plate = hodiff.bilaplacian(u, batched=True)(inside).detach()
expected = 4 * math.pi**4 * solution(inside)
print(f"relative error of the bilaplacian {(plate - expected).norm() / expected.norm():.1e}")

# %% [markdown]
# ## Random directions
#
# In a hundred thousand dimensions even a collapsed jet is too large. The expectation of $D^2 f[v, v]$ over random $v$
# with covariance I is the Laplacian, and the spread of samples estimates the error. For
# $f = \sum_i \sin(x_i)\, x_{i+1}$ the exact Laplacian is known.

# %%
many = torch.randn(100_000)
source = torch.Generator().manual_seed(0)


def chain(x):
    return (torch.sin(x[:-1]) * x[1:]).sum()


exact = -(torch.sin(many[:-1]) * many[1:]).sum()
for kind in ("rademacher", "gaussian", "coordinates"):
    found = hodiff.laplacian(chain, randomised=kind, samples=16, generator=source)(many)
    print(f"{kind:12} {found.value:10.1f} ± {found.standard_error:8.1f}, off by {found.value - exact:10.1f}")

# %% [markdown]
# Errors fall as one over the root of the number of directions. Coordinates begin higher, as every sample contains a
# single diagonal entry. Random signs are exact where the Hessian is diagonal.

# %%
few = many[:2_000]
exact = -(torch.sin(few[:-1]) * few[1:]).sum()
counts = (4, 16, 64, 256)
figure, ax = plt.subplots(figsize=(5, 3), layout="constrained")
for kind in ("rademacher", "gaussian", "coordinates"):
    errors = []
    for samples in counts:
        estimate = hodiff.laplacian(chain, randomised=kind, samples=samples, generator=source)
        errors.append(torch.stack([estimate(few).value - exact for _ in range(30)]).square().mean().sqrt())
    ax.loglog(counts, errors, "o-", label=kind)
ax.loglog(counts, [1000 / n**0.5 for n in counts], "k:", label="1 / √n")
ax.set(xlabel="directions", ylabel="error")
legend = ax.legend(fontsize="small")

# %% [markdown]
# ## Differential equations
#
# The solution of $y' = y^2$ with $y(0) = 1$ is $1 / (1 - t)$: all coefficients are 1, and their ratio indicates the
# pole at 1.

# %%
ode_coefficients(lambda t, y: y**2, 0.0, torch.tensor(1.0), 6)

# %% [markdown]
# Series of order 19 allow large steps. The next cell follows a planet for three orbits of eccentricity 0.8, after which
# it should be back at its start:


# %%
def kepler(t, y):
    position, velocity = y[:2], y[2:]
    return torch.cat([velocity, -position / position.square().sum() ** 1.5])


def by_numpy(t, y):
    return kepler(t, torch.from_numpy(y)).numpy()


start = torch.tensor([0.2, 0.0, 0.0, 3.0])
turns = torch.tensor([0.0, 2 * math.pi, 4 * math.pi, 6 * math.pi])
orbit = odeint_taylor(kepler, start, turns, rtol=1e-15, atol=1e-15, full_output=True)
back = (orbit.y[-1] - start).norm()
reference = solve_ivp(by_numpy, (0, turns[-1]), start.numpy(), "DOP853", rtol=1e-13, atol=1e-15)
print(f"Taylor series: {orbit.steps} steps of order {orbit.orders[0]}, off by {back:.0e}")
print(f"DOP853:        {len(reference.t) - 1} steps, off by {abs(reference.y[:, -1] - start.numpy()).max():.0e}")
assert back < 1e-9

# %%
fine = torch.linspace(0, float(turns[1]), 400)
figure, ax = plt.subplots(figsize=(5, 3), layout="constrained")
ax.plot(*orbit(fine)[:, :2].T, color="C0", linewidth=1)
ends = torch.tensor([0.0, *orbit.step_sizes]).cumsum(0)
ax.plot(*orbit(ends[ends < turns[1]])[:, :2].T, "o", color="C0", markersize=4, label="ends of steps")
ax.plot(0, 0, "o", color="C1")
ax.set_aspect("equal")
legend = ax.legend(fontsize="small")

# %% [markdown]
# ## Operators with a rule
#
# Most of torch's operators have a Taylor rule. Any other operator falls back to nested forward mode, for this operator
# only. `explain` lists such operators.

# %%
print(explain(wide, points))
print(explain(lambda x: torch.special.i1(x).sum(), points))

# %% [markdown]
# **Next.** [The guide](../../docs/guides/taylor.md), and `examples/variational_monte_carlo.py`: ground states of atoms,
# whose local energy is a Laplacian at every step.
