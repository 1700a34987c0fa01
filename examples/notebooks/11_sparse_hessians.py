# %% [markdown]
# # Sparse Hessians
#
# A dense Hessian takes n products, and most of its entries may be zero. We recover a sparse Hessian from three products
# by hand, and let hodiff choose the products. Then we measure when this is faster, and solve an equation with it.

# %%
import time

import matplotlib.pyplot as plt
import numpy as np
import scipy.sparse
import torch
from scipy.sparse.linalg import spsolve

import hodiff

torch.manual_seed(0)
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
plt.rcParams["figure.dpi"] = 72

# %% [markdown]
# ## Three products are enough
#
# In a chain each unknown interacts only with its neighbours: the Hessian has three diagonals. Columns 0, 3, 6, ... have
# no row in common, so one product with the sum of their unit vectors contains all of their entries.


# %%
def chain(x):
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


x = torch.rand(12)
colors = torch.arange(12) % 3
seeds = torch.nn.functional.one_hot(colors).to(x)
products = hodiff.HessianOperator(chain, x) @ seeds
dense = hodiff.hessian_matrix(chain, x)
for i in range(12):
    for j in range(max(i - 1, 0), min(i + 2, 12)):
        assert torch.isclose(products[i, colors[j]], dense[i, j])

figure, axes = plt.subplots(1, 3, figsize=(8, 2.8), layout="constrained", width_ratios=(4, 1, 1))
shown = np.where(dense != 0, np.broadcast_to(colors, (12, 12)), np.nan)
for ax, each, title in zip(
    axes,
    (shown, np.where(seeds > 0, colors[:, None], np.nan), products.abs().log1p()),
    ("H", "seeds", "products"),
    strict=True,
):
    ax.imshow(each)
    ax.set(title=title, xticks=[], yticks=[])

# %% [markdown]
# ## Pattern, coloring, entries
#
# hodiff traces which unknowns each number depends on, through `f` and its gradient. This gives the *pattern*, which is
# valid for all x. Then it *colors* the columns, multiplies, and reads the entries. One more product with a random
# vector detects missing entries.

# %%
pattern = hodiff.sparse.hessian_pattern(chain, x)
coloring = hodiff.sparse.color(pattern)
H = hodiff.sparse.hessian(chain, coloring=coloring, format="scipy")(x)
assert np.allclose(H.toarray(), dense)
coloring

# %% [markdown]
# A pattern with missing entries would give wrong numbers, so hodiff raises an error:

# %%
try:
    hodiff.sparse.hessian(chain, pattern=np.eye(12, dtype=bool))(x)
except hodiff.InputError as error:
    print(str(error).partition(", as a product")[0])

# %% [markdown]
# ## When it is faster
#
# We time Hessians of the chain by n. The first call also finds the pattern.


# %%
def milliseconds(call, repeats=3):
    def once():
        start = time.process_time()
        call()
        return time.process_time() - start

    return 1e3 * min(once() for _ in range(repeats))


sizes = (10, 100, 1_000, 2_000, 10_000, 100_000)
rows = {"dense": {}, "sparse, first call": {}, "sparse, later calls": {}}
for n in sizes:
    point = torch.rand(n)
    hessian = hodiff.sparse.hessian(chain)
    rows["sparse, first call"][n] = milliseconds(lambda: hodiff.sparse.hessian(chain)(point))
    hessian(point)
    rows["sparse, later calls"][n] = milliseconds(lambda: hessian(point))
    if n <= 2_000:
        rows["dense"][n] = milliseconds(lambda: hodiff.hessian_matrix(chain, point))

print(f"{'ms, n =':>20}" + "".join(f"{n:>10,}" for n in sizes))
for name, row in rows.items():
    print(f"{name:>20}" + "".join(f"{row[n]:10.2f}" if n in row else " " * 10 for n in sizes))
assert rows["sparse, later calls"][2_000] < rows["dense"][2_000] / 5

figure, ax = plt.subplots(figsize=(5, 3), layout="constrained")
for name, row in rows.items():
    ax.loglog(list(row), list(row.values()), "o-", label=name)
ax.set(xlabel="n", ylabel="ms")
legend = ax.legend()

# %% [markdown] The cost depends on the number of colors. In a random pattern each unknown interacts with a few others
# anywhere; the gain shrinks as their number grows. *Star* colorings read an entry from one product. *Acyclic* colorings
# subtract entries that are already known, and need fewer colors.

# %%
n, random = 400, np.random.default_rng(0)
meetings = (1, 2, 4, 8, 16, 32)
found = {"star": [], "acyclic": [], "columns": []}
for each in meetings:
    half = scipy.sparse.random_array((n, n), density=each / (2 * n), rng=random) != 0
    symmetric = half + half.T + scipy.sparse.eye_array(n, dtype=bool)
    for method, counts in found.items():
        counts.append(hodiff.sparse.color(symmetric, method).num_colors)

figure, ax = plt.subplots(figsize=(5, 3), layout="constrained")
for method, counts in found.items():
    ax.loglog(meetings, counts, "o-", label=method)
ax.axhline(n, color="gray", linestyle=":", label="n products, dense")
ax.set(xlabel="others that an unknown meets, on average", ylabel="colors")
legend = ax.legend()
assert all(a <= s <= c for s, a, c in zip(*found.values(), strict=True))

# %% [markdown]
# Symmetry helps most where one unknown interacts with all others: an arrow-shaped matrix has a full row and a full
# column, and takes two products.

# %%
arrow = scipy.sparse.eye_array(1000, format="lil", dtype=bool)
arrow[0], arrow[:, 0] = True, True
print({method: hodiff.sparse.color(arrow, method).num_colors for method in ("star", "columns")})

# %% [markdown]
# ## When a pattern is valid
#
# A pattern is valid for all x and for all values of floating-point constants. If the control flow of a function depends
# on x, hodiff raises an error, or finds the pattern for this x alone with `at_point=True`.


# %%
def bent(x):
    return x[0] * x[1] if x[0] > 0 else x[1] * x[2]


try:
    hodiff.sparse.hessian_pattern(bent, torch.ones(3))
except hodiff.InputError as error:
    print(str(error).partition("(")[0])
print(hodiff.sparse.hessian_pattern(bent, torch.ones(3), at_point=True).toarray().astype(int))

# %% [markdown]
# ## Newton's method on a grid
#
# We minimize $\int \frac{1}{2}|\nabla u|^2 + \frac{1}{4} u^4 - 50\,u$ on the unit square with $u = 0$ at its edge,
# which solves the equation $-\Delta u + u^3 = 50$. There are 10,000 unknowns, and SciPy solves a sparse system at each
# step.

# %%
side, mesh = 100, 1 / 101


def energy(u):
    whole = torch.nn.functional.pad(u.view(side, side), (1, 1, 1, 1))
    gradients = (whole.diff(dim=0) ** 2).sum() + (whole.diff(dim=1) ** 2).sum()
    return gradients / 2 + mesh**2 * (u**4 / 4 - 50 * u).sum()


hessian = hodiff.sparse.hessian(energy, format="scipy")
u, residuals = torch.zeros(side**2), []
while True:
    slopes = torch.func.grad(energy)(u)
    residuals.append(slopes.abs().max().item() / mesh**2)
    if residuals[-1] < 1e-8:
        break
    u = u - torch.from_numpy(spsolve(hessian(u).tocsc(), slopes.numpy()))
print([f"{each:.0e}" for each in residuals])
assert len(residuals) < 10

# %% [markdown]
# The five-point formula checks the solution without hodiff.

# %%
whole = torch.nn.functional.pad(u.view(side, side), (1, 1, 1, 1))
laplacian = (whole[2:, 1:-1] + whole[:-2, 1:-1] + whole[1:-1, 2:] + whole[1:-1, :-2] - 4 * whole[1:-1, 1:-1]) / mesh**2
assert (-laplacian + whole[1:-1, 1:-1] ** 3 - 50).abs().max() < 1e-7
figure, ax = plt.subplots(figsize=(4, 3), layout="constrained")
shown = ax.imshow(whole, extent=(0, 1, 0, 1))
bar = figure.colorbar(shown)

# %% [markdown]
# **Next.** [The guide](../../docs/guides/sparse.md), and three examples: `examples/minimal_surface.py`,
# `examples/vibrational_modes.py` and `examples/trajectory.py`.
