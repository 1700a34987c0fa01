# %% [markdown]
# # Write an optimizer
#
# This notebook writes Newton's method without the matrix: a step solves $\nabla^2 f\, s = -\nabla f$ with products
# alone. It takes some thirty lines. Then we use the ready-made optimizers of `hodiff.optim`.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import hodiff
from hodiff import optim, optimize

torch.manual_seed(0)
torch.set_num_threads(1)
plt.rcParams["figure.dpi"] = 72


# %% [markdown]
# ## The step
#
# Conjugate gradients need products with the Hessian. They stop at a direction of negative curvature, along which the
# quadratic model has no minimum. `HessianOperator` records the graph once for all products at a point. For a single
# product, `grad_and_hvp` also returns the gradient at little extra cost.


# %%
def newton_direction(A, gradient, most=50):
    """Solve A s = -gradient by conjugate gradients; stop where the curvature is negative."""
    s, residual = torch.zeros_like(gradient), -gradient
    p = residual
    for _ in range(most):
        product = A @ p
        curvature = p @ product
        if curvature <= 0:
            return s if s.any() else p
        length = (residual @ residual) / curvature
        s = s + length * p
        new = residual - length * product
        if new.norm() < 1e-3 * gradient.norm():
            break
        p = new + (new @ new) / (residual @ residual) * p
        residual = new
    return s


def newton(f, x, steps):
    """Minimise by Newton's method, with steps halved until the value falls enough."""
    A, values, way = hodiff.HessianOperator(f, x), [], [x]
    for _ in range(steps):
        gradient, value = torch.func.grad_and_value(f)(x)
        values.append(value.item())
        direction, t = newton_direction(A.at(x), gradient), 1.0
        while f(x + t * direction) > value + 1e-4 * t * gradient @ direction and t > 1e-10:
            t /= 2
        x = x + t * direction
        way.append(x)
    return x, values, torch.stack(way)


# %% [markdown]
# ## In the plane
#
# The valley of Rosenbrock's function is curved and narrow, and gradient descent follows it slowly.


# %%
def rosenbrock(x):
    return 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2


start = torch.tensor([-1.2, 1.0], dtype=torch.float64)
x, values, way = newton(rosenbrock, start, 25)
torch.testing.assert_close(x, torch.ones(2, dtype=torch.float64))

descent, crept = start, [start]
for _ in range(2000):
    descent = descent - 1e-3 * torch.func.grad(rosenbrock)(descent)
    crept.append(descent)
crept = torch.stack(crept)
print(f"Newton, 25 steps:              value below 1e-12: {rosenbrock(x).item() < 1e-12}")
print(f"gradient descent, 2,000 steps: value {rosenbrock(descent).item():.3f}")

# %%
figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
a, b = torch.linspace(-1.6, 1.4, 200), torch.linspace(-0.6, 1.6, 200)
surface = 100 * (b[:, None] - a**2) ** 2 + (1 - a) ** 2
contours = ax.contour(a, b, surface.log1p(), levels=20, linewidths=0.6)
ax.plot(*crept.T, color="C1", label="gradient descent, 2,000 steps")
ax.plot(*way.T, "o-", color="C3", markersize=4, label="ours, 25 steps")
legend = ax.legend(loc="lower left")

# %% [markdown]
# ## On data
#
# The same code fits a softmax regression on digits, with 650 unknowns and a small penalty. No line depends on their
# number.

# %%
pixels, labels = load_digits(return_X_y=True)
images, labels = torch.from_numpy(pixels / 16), torch.from_numpy(labels)


def regression(x):
    weight, bias = x[:640].view(10, 64), x[640:]
    return F.cross_entropy(images @ weight.T + bias, labels) + 1e-3 * (x @ x)


zeros = torch.zeros(650, dtype=torch.float64)
x, values, _ = newton(regression, zeros, 12)
gradient = torch.func.grad(regression)(x)
assert gradient.norm() < 1e-6
adam, history = zeros.clone().requires_grad_(), []
optimizer = torch.optim.Adam([adam], lr=0.05)
for _ in range(200):
    optimizer.zero_grad()
    value = regression(adam)
    value.backward()
    history.append(value.item())
    optimizer.step()

figure, ax = plt.subplots(figsize=(6, 3.4), layout="constrained")
best = regression(x).item()
ax.semilogy([each - best + 1e-16 for each in values], "o-", color="C3", label="ours")
ax.semilogy([each - best for each in history], color="C0", label="Adam")
ax.set(xlabel="step", ylabel="value above the minimum", xlim=(-1, 60), ylim=(1e-13, 10))
legend = ax.legend()

# %% [markdown] A Newton step costs a few dozen products, and a step of Adam one gradient. Newton's method reaches many
# more digits. ## Ready-made optimizers
#
# `hodiff.optimize.minimize` has SciPy's interface for tensors and pytrees, with exact derivatives. Its "trust-ncg" is
# the method above with a trust region instead of halved steps.

# %%
result = optimize.minimize(regression, zeros, tol=1e-8)
assert result.success
torch.testing.assert_close(result.x, x, atol=1e-5, rtol=1e-5)
result

# %% [markdown]
# For training loops there are optimizers with the interface of `torch.optim`. They compute the curvature of a batch
# during `loss.backward()`. In a script with Adam, one line changes:

# %%
network = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Tanh(), torch.nn.Linear(16, 10)).double()
optimizer = optim.KFAC(network.parameters(), lr=0.05)
losses = []
for _ in range(30):
    optimizer.zero_grad()
    loss = F.cross_entropy(network(images), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < 0.1 * losses[0]
print(f"K-FAC, 30 steps: from {losses[0]:.2f} to {losses[-1]:.3f}")

# %% [markdown]
# **Next.** [MAML in a page](07_maml_in_a_page.ipynb): differentiate through an optimizer.
