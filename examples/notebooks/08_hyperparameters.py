# %% [markdown] # Hyperparameters by implicit differentiation This notebook tunes one penalty per feature. The
# validation loss after training depends on the penalties. Its gradient with respect to them needs no unrolled training:
# at a minimum, the implicit function theorem takes one linear system.

# %%
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from hodiff import optimize
from hodiff.implicit import argmin
from hodiff.meta import hypergradient

torch.manual_seed(0)
torch.set_num_threads(1)
plt.rcParams["figure.dpi"] = 72

# %% [markdown]
# The data have twenty features, of which only five matter. There are 60 points for training, 200 for validation, and
# the labels are noisy.

# %%
generator = torch.Generator().manual_seed(0)
truth = torch.zeros(20, dtype=torch.float64)
truth[:5] = torch.tensor([2.0, -1.5, 1.0, -2.0, 1.5])


def sample(n):
    points = torch.randn(n, 20, dtype=torch.float64, generator=generator)
    chances = torch.sigmoid(points @ truth)
    return points, (torch.rand(n, dtype=torch.float64, generator=generator) < chances).double()


training, validation, test = sample(60), sample(200), sample(5000)


def cross_entropy(weights, data):
    points, labels = data
    return F.binary_cross_entropy_with_logits(points @ weights, labels)


# %% [markdown]
# ## The inner problem
#
# The inner problem is logistic regression with a penalty $e^{\lambda_i}$ on the square of each weight. `argmin` makes
# its solution a differentiable function of $\lambda$. The solver is SciPy's, through `hodiff.optimize.minimize`, and is
# not differentiated.


# %%
def penalized(weights, log_penalties):
    return cross_entropy(weights, training) + (log_penalties.exp() * weights**2).sum()


trained = argmin(penalized, partial(optimize.minimize, tol=1e-9))
start = torch.zeros(20, dtype=torch.float64)


def outer(log_penalties):
    return cross_entropy(trained(start, log_penalties), validation)


log_penalties = torch.full((20,), -3.0, dtype=torch.float64)
gradient = torch.func.grad(outer)(log_penalties)

# %% [markdown]
# ## Check the hypergradient
#
# To check three entries, change one penalty at a time and train again:

# %%
for i in (0, 4, 11):
    step = torch.zeros(20, dtype=torch.float64)
    step[i] = 1e-2
    difference = ((outer(log_penalties + step) - outer(log_penalties - step)) / 2e-2).item()
    assert abs(gradient[i].item() - difference) < 1e-5
    print(f"penalty {i:2}: implicit {gradient[i].item():+.5f}, trained again {difference:+.5f}")

# %% [markdown] Second derivatives exist, too: the Hessian of the validation loss with respect to the penalties, by any
# route.

# %%
H = torch.func.hessian(outer)(log_penalties)
torch.testing.assert_close(H, H.T, rtol=1e-6, atol=1e-9)
print("the Hessian of the outer loss is symmetric:", tuple(H.shape))

# %% [markdown]
# ## Gradient descent on the penalties
#
# We run gradient descent on the 20 penalties. Each step trains once; the linear system is the only extra cost.

# %%
history, x = [], log_penalties
for _ in range(60):
    gradient, value = torch.func.grad_and_value(outer)(x)
    history.append((value.item(), cross_entropy(trained(start, x), test).item()))
    x = x - 20 * gradient
first, last = history[0], history[-1]
assert last[0] < first[0]
assert last[1] < first[1]

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
left.plot(history, label=["validation", "test, never used"])
left.set(title="loss", xlabel="outer step")
left.legend()
right.bar(range(20), x.exp(), color=["C0" if each else "C1" for each in truth])
right.set(title="penalties learned (blue: features that matter)", xlabel="feature", yscale="log")
figure.align_labels()

# %%
matter, noise = x[:5].max().item(), x[5:].mean().item()
assert matter < noise
print(f"loss on the test set: {first[1]:.3f} with equal penalties, {last[1]:.3f} with those learned")
print("every feature that matters is penalised less than the others on average:", matter < noise)

# %% [markdown]
# ## Products instead of a dense solve
#
# `hypergradient` takes a known minimum and needs only products. It solves by conjugate gradients, by a Neumann series,
# or by random columns, and estimates its own error.

# %%
weights = trained(start, log_penalties)
found = hypergradient(lambda w, _: cross_entropy(w, validation), penalized, weights, log_penalties)
torch.testing.assert_close(found.value, torch.func.grad(outer)(log_penalties), rtol=1e-4, atol=1e-6)
found

# %% [markdown]
# **Next.** [Influence of examples](09_influence_of_examples.ipynb): the same theorem, applied to data.
