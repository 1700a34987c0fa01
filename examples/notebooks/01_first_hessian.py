# %% [markdown]
# # Your first Hessian
#
# This notebook computes and draws the matrix of second derivatives of a function, its spectrum, and the landscape
# around a minimum. It takes ten minutes on one core.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.func import functional_call

import hodiff
from hodiff import estimators, plot

torch.manual_seed(0)
torch.set_num_threads(1)
plt.rcParams["figure.dpi"] = 72

# %% [markdown]
# ## A function of two numbers
#
# Rosenbrock's function $f(x) = 100\,(x_1 - x_0^2)^2 + (1 - x_0)^2$ has this Hessian:
#
# $$\nabla^2 f = \begin{pmatrix} 1200\,x_0^2 - 400\,x_1 + 2 & -400\,x_0 \\ -400\,x_0 & 200 \end{pmatrix}$$


# %%
def rosenbrock(x):
    return 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2


x = torch.tensor([-1.2, 1.0], dtype=torch.float64)
H = hodiff.hessian_matrix(rosenbrock, x)
by_hand = torch.tensor([[1200 * 1.44 - 400 + 2, 480.0], [480.0, 200.0]], dtype=torch.float64)
torch.testing.assert_close(H, by_hand)
H

# %% [markdown] The whole matrix is often too large, and a Hessian-vector product $\nabla^2 f\, v$ is enough.
# `hodiff.hvp` is called at once, like `torch.func.jvp`. A product costs two to three gradients, for any size of the
# matrix:

# %%
v = torch.tensor([1.0, 1.0], dtype=torch.float64)
torch.testing.assert_close(hodiff.hvp(rosenbrock, x, v), by_hand @ v)
hodiff.hvp(rosenbrock, x, v)

# %% [markdown]
# ## A network
#
# The same calls work for a network: its loss is a function of a dict of parameters. This network has one hidden layer
# of eight units and classifies handwritten digits.

# %%
pixels, labels = load_digits(return_X_y=True)
images, labels = torch.from_numpy(pixels[:400] / 16), torch.from_numpy(labels[:400])
network = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Tanh(), torch.nn.Linear(8, 10)).double()


def loss(parameters):
    return F.cross_entropy(functional_call(network, parameters, (images,)), labels)


optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
for _ in range(150):
    optimizer.zero_grad()
    F.cross_entropy(network(images), labels).backward()
    optimizer.step()
parameters = {name: each.detach().clone() for name, each in network.named_parameters()}
accuracy = (network(images).argmax(1) == labels).double().mean()
print(f"loss {loss(parameters):.3f}, {accuracy:.0%} of the images read")

# %% [markdown]
# An *operator* represents a matrix by its products with vectors. It is constructed at a point, and all products at
# this point share the work:

# %%
A = hodiff.HessianOperator(loss, parameters)
A

# %% [markdown]
# A matrix with 610 rows can still be drawn. Each row is a parameter. Colours show the square root of an entry, so that
# small entries are visible next to large ones.

# %%
figure, ax = plt.subplots(figsize=(5.5, 4.5), layout="constrained")
ax = plot.hessian(A, ax=ax, scale="root")

# %% [markdown] The squares along the diagonal are hidden units with 64 weights each: the weights of one unit interact
# most. To check the matrix, compare a product with central differences of the gradient, which need no second
# derivatives:

# %%
direction = torch.randn(610, dtype=torch.float64)
step = A.domain.unflatten(direction)


def gradient_at(t):
    moved = {name: parameters[name] + t * step[name] for name in parameters}
    return A.domain.flatten(torch.func.grad(loss)(moved))


differences = (gradient_at(1e-5) - gradient_at(-1e-5)) / 2e-5
error = ((A @ direction - differences).norm() / differences.norm()).item()
assert error < 1e-8
print(f"relative distance below 1e-8: {error < 1e-8}")

# %% [markdown]
# ## Its spectrum
#
# The eigenvalues of largest magnitude need a few dozen products, and no matrix:

# %%
top = estimators.eigsh(A, 3)
top

# %% [markdown]
# They equal the eigenvalues of the dense matrix:

# %%
dense = torch.linalg.eigvalsh(A.to_dense())
torch.testing.assert_close(top.eigenvalues, dense[-3:])
negative = int((dense < -1e-6).sum())
print(f"{negative} of {len(dense)} eigenvalues are below -1e-6: curved downwards there, this point is no minimum yet")

# %%
ax = plot.eigenvalues(A)

# %% [markdown]
# Most directions are nearly flat, and a few are steep. The *density* of eigenvalues shows the same. It is estimated
# from products alone, so it also works for a million parameters:

# %%
density = estimators.spectral_density(A, samples=4, steps=40)
density

# %%
ax = plot.spectral_density(density, of=A)

# %% [markdown]
# ## The landscape
#
# Along the steepest eigenvector the loss follows its quadratic model near the point, and departs from it farther away.
# In the plane of the two steepest eigenvectors, the contours are narrower in the direction of the larger eigenvalue.

# %%
steepest = estimators.eigsh(A, 1, which="LA")
pair = estimators.eigsh(A, 2, which="LA")
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
plot.loss_landscape(loss, parameters, steepest, span=2, ax=left)
ax = plot.loss_landscape(loss, parameters, pair, span=2, points=25, ax=right)

# %% [markdown]
# **Next.** [Routes and trust](02_routes_and_trust.ipynb): torch has four ways to compute a second derivative, and they
# do not always agree. [Curvature of a transformer](05_curvature_of_a_transformer.ipynb) applies the same tools to a
# model from a library.
