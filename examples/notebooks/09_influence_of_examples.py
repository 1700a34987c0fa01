# %% [markdown] # Influence of examples How would the model change without a training example? At a minimum of the
# training loss, one solve with the Hessian answers this to first order for all examples at once. We compare the
# prediction with retraining, and use it to find wrong labels.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from sklearn.datasets import load_digits

import hodiff
from hodiff import estimators, optimize

torch.manual_seed(0)
torch.set_num_threads(1)
plt.rcParams["figure.dpi"] = 72

# %% [markdown]
# The task is to distinguish threes from eights. 12 of 200 labels are flipped.

# %%
pixels, digits = load_digits(return_X_y=True)
chosen = (digits == 3) | (digits == 8)
images = torch.from_numpy(pixels[chosen] / 16)
labels = torch.from_numpy((digits[chosen] == 8).astype(float))
order = torch.randperm(len(images))
images, labels = images[order], labels[order]
train_x, train_y, test_x, test_y = images[:200], labels[:200].clone(), images[200:], labels[200:]
turned = torch.randperm(200)[:12]
train_y[turned] = 1 - train_y[turned]


def losses(x, images, labels):
    return F.binary_cross_entropy_with_logits(images @ x, labels, reduction="none")


def objective(x, weights):
    """Every example has a weight; 0 leaves it out."""
    return weights @ losses(x, train_x, train_y) / 200 + 5e-3 * (x @ x)


def train(weights):
    return optimize.minimize(objective, torch.zeros(64, dtype=torch.float64), weights, tol=1e-9).x


ones = torch.ones(200, dtype=torch.float64)
x = train(ones)
correct = ((test_x @ x > 0) == (test_y > 0.5)).double().mean().item()
print(f"{correct:.0%} of {len(test_x)} test images are read")

# %% [markdown]
# ## The influence function
#
# With weights $w_i$ the minimum moves by $\partial x^* / \partial w_i = -H^{-1} \nabla \ell_i / n$, so that leaving
# out example $i$ changes the mean loss on the test set, to first order, by
#
# $$ \Delta_i = \frac1n\, \nabla L_\text{test}^\top\, H^{-1}\, \nabla \ell_i .$$
#
# One solve with the gradient of the test loss is enough for all examples:

# %%
A = hodiff.HessianOperator(objective, x, ones)
test_gradient = torch.func.grad(lambda x: losses(x, test_x, test_y).mean())(x)
solution = estimators.solve(A, test_gradient)
solution

# %%
gradients = hodiff.JacobianOperator(lambda x: losses(x, train_x, train_y), x)
predicted = (gradients @ solution.value) / 200

# %% [markdown]
# ## Retraining
#
# Each of 60 examples is left out in turn, and the model is trained again from zero.

# %%
before = losses(x, test_x, test_y).mean()
some = torch.cat([turned, torch.tensor([i for i in range(200) if i not in set(turned.tolist())][:48])])
actual = []
for i in some.tolist():
    weights = ones.clone()
    weights[i] = 0
    actual.append((losses(train(weights), test_x, test_y).mean() - before).item())
actual = torch.tensor(actual)
rank = spearmanr(predicted[some], actual).statistic
assert rank > 0.95
print(f"rank correlation {rank:.3f}")

# %%
figure, ax = plt.subplots(figsize=(5, 4), layout="constrained")
is_turned = torch.arange(len(some)) < 12
for mask, colour, label in ((~is_turned, "C0", "right label"), (is_turned, "C3", "turned label")):
    ax.plot(predicted[some][mask], actual[mask], "o", color=colour, markersize=4, label=label)
ax.axline((0, 0), slope=1, color="gray", linewidth=0.8)
ax.set(xlabel="predicted change of the test loss", ylabel="trained again")
legend = ax.legend()

# %% [markdown] Leaving out a flipped label lowers the test loss, so these examples are at the lower left. The predicted
# order agrees with retraining. Large effects are underestimated, because the prediction is of first order.
#
# ## Finding wrong labels
#
# Rank all examples by how much the test loss falls without them, and find the flipped labels:

# %%
worst = predicted.argsort()
hits = torch.isin(worst, turned).cumsum(0)
found = int(hits[19])
assert found >= 8
print(f"{found} of the 12 turned labels are among the 20 most harmful examples of 200")

# %%
figure, axes = plt.subplots(1, 10, figsize=(10, 1.5), layout="constrained")
for ax, i in zip(axes, worst[:10].tolist(), strict=True):
    ax.imshow(train_x[i].view(8, 8), cmap="gray_r")
    ax.set_title(f"{'8' if train_y[i] else '3'}{'*' if i in set(turned.tolist()) else ''}", fontsize="medium")
    ax.axis("off")
suptitle = figure.suptitle("the ten most harmful, with the label they were given (* turned)", fontsize="medium")

# %% [markdown]
# For a network that is not at its minimum this prediction is worse, and the derivative *through training* is better:
# `examples/influence_compared.py` measures both.
