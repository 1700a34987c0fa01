# %% [markdown]
# # MAML in a page
#
# Model-agnostic meta-learning finds weights from which *one gradient step* on a few points learns a new task. Its
# gradient goes through that step, so it contains a second derivative.

# %%
import math

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.func import functional_call

from hodiff.meta import MAML, SGD, adapt

torch.manual_seed(0)
torch.set_num_threads(1)
plt.rcParams["figure.dpi"] = 72

# %% [markdown]
# A task is a sine wave with random amplitude and phase, given at five points. Ten more points are for the outer loss.

# %%
generator = torch.Generator().manual_seed(0)


def uniform(low, high, *shape):
    return low + (high - low) * torch.rand(shape, generator=generator)


def waves(count, shots=5, queries=10):
    amplitude, phase = uniform(0.1, 5.0, count, 1, 1), uniform(0.0, math.pi, count, 1, 1)
    x = uniform(-5.0, 5.0, count, shots + queries, 1)
    y = amplitude * (x - phase).sin()
    return x[:, :shots], y[:, :shots], x[:, shots:], y[:, shots:]


network = nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))
mse = nn.functional.mse_loss

# %% [markdown] ## The meta-gradient by hand `adapt` takes inner steps as a differentiable function of the initial
# weights. MAML minimizes the outer loss of the adapted weights, by its gradient with respect to the initial weights:


# %%
def outer(start, task):
    support_x, support_y, query_x, query_y = task

    def inner(weights, batch):
        return mse(functional_call(network, weights, (batch[0],)), batch[1])

    adapted = adapt(inner, start, (support_x, support_y), SGD(0.01), steps=1)
    return mse(functional_call(network, adapted, (query_x,)), query_y)


start = {name: each.detach().double() for name, each in network.named_parameters()}
task = tuple(each[0].double() for each in waves(1))
meta_gradient = torch.func.grad(outer)(start, task)

# %% [markdown]
# Differences of the outer loss along a direction confirm the gradient:

# %%
direction = {name: torch.randn(each.shape, generator=generator).double() for name, each in start.items()}


def along(t):
    return outer({name: each + t * direction[name] for name, each in start.items()}, task).item()


def dot(a, b):
    return sum((a[name] * b[name]).sum() for name in a).item()


slope, difference = dot(meta_gradient, direction), (along(1e-6) - along(-1e-6)) / 2e-6
assert abs(slope - difference) < 1e-5 * abs(difference)
print(f"by adapt {slope:.5f}, by differences {difference:.5f}")

# %% [markdown]
# ## The learner
#
# `hodiff.meta.MAML` is a module that does this for many tasks at once. It is trained like any other module.

# %%
maml = MAML(network, mse, lr=0.01)
test = waves(200)


def errors(steps):
    """Mean squared errors on new waves after some inner steps."""
    with torch.no_grad():
        adapted = maml.adapt_all(test[:2], steps)
        return maml.losses(adapted.params, test[2:], {})[0].mean().item()


before = [errors(steps) for steps in range(6)]
optimizer = torch.optim.Adam(maml.parameters(), lr=1e-3)
history = []
for _ in range(1200):
    optimizer.zero_grad()
    loss = maml(waves(25))
    loss.backward()
    optimizer.step()
    history.append(loss.item())
after = [errors(steps) for steps in range(6)]

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
left.plot(history, linewidth=0.6)
left.set(title="outer loss", xlabel="meta-step", ylim=(0, None))
right.plot(before, "o--", label="before")
right.plot(after, "o-", label="after 1,200 meta-steps")
right.set(title="error on 200 new waves", xlabel="inner steps taken")
legend = right.legend()

# %%
assert after[1] < 0.7 * before[1]
assert after[1] < after[0]
print(f"after one inner step: {before[1]:.2f} untrained, {after[1]:.2f} trained")

# %% [markdown]
# ## One new wave
#
# The picture shows the network before and after one and five steps on five points of a new wave.

# %%
x, y, more_x, more_y = waves(1)
line = torch.linspace(-5, 5, 200)[:, None]
figure, ax = plt.subplots(figsize=(6, 3.4), layout="constrained")
for steps in (0, 1, 5):
    adapted = maml.adapt((x[0], y[0]), steps=steps)
    with torch.no_grad():
        ax.plot(line, functional_call(network, adapted, (line,)), label=f"{steps} steps")
ax.plot(x[0], y[0], "o", color="black", label="seen")
ax.plot(more_x[0], more_y[0], ".", color="gray", label="not seen")
legend = ax.legend(fontsize="small")

# %% [markdown]
# After 70,000 meta-steps, the error after one inner step falls to the paper's. `examples/maml_sinusoid.py` trains that
# long, and `papers/finn-2017-maml` compares the results.
#
# **Next.** [Hyperparameters by implicit differentiation](08_hyperparameters.ipynb), without unrolling.
