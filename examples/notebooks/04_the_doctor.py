# %% [markdown]
# # The doctor: find the defects of Functions
#
# This notebook examines three Functions. All of them train, and all pass `torch.autograd.gradcheck`. Each has a defect
# in the second derivative or in another route. We read every report, then fix the Function.

# %%
import math

import torch
import torch.nn.functional as F
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import hodiff
from hodiff import plot
from hodiff.functions import nestable_jvp

torch.manual_seed(0)
torch.set_num_threads(1)


def passes(function, *inputs):
    """What torch's check says at its defaults."""
    return torch.autograd.gradcheck(function, tuple(each.clone().requires_grad_() for each in inputs))


# %% [markdown]
# ## First patient: `once_differentiable`
#
# The function is $\log\cosh x$. Its author marked `backward` as `once_differentiable`, which promises that nobody
# differentiates it again.

# %%
x = torch.tensor([-2.0, 0.3, 1.1], dtype=torch.float64)


class LogCosh(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.cosh().log()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.tanh()

    @staticmethod
    @nestable_jvp
    def jvp(ctx, tangent):
        (x,) = ctx.saved_tensors
        return tangent * x.tanh()


print("gradcheck:", passes(LogCosh.apply, x))

# %% [markdown]
# If it is differentiated again, torch does not warn: the second derivative is zero instead of $1 - \tanh^2 x$.

# %%
print("by torch:", torch.func.vmap(torch.func.grad(torch.func.grad(LogCosh.apply)))(x).tolist())
print("truth:   ", [round(each, 4) for each in (1 - x.tanh() ** 2).tolist()])

# %%
report = hodiff.check(LogCosh, x)
assert "HD107" in report.codes
report

# %% [markdown]
# In the graph of a loss such nodes are red:

# %%
plot.graph(lambda x: LogCosh.apply(x).sum() + x.square().sum(), x)

# %% [markdown]
# The fix is to remove the decorator: `x.tanh()` can be differentiated. The report also has a warning: $\cosh x$
# overflows long before its logarithm does. $|x| + \log(1 + e^{-2|x|}) - \log 2$ is equal and does not overflow.


# %%
class MendedLogCosh(LogCosh):
    @staticmethod
    def forward(x):
        return x.abs() + F.softplus(-2 * x.abs()) - math.log(2)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.tanh()


report = hodiff.check(MendedLogCosh, x)
assert not report.findings
print(report.summary)

# %% [markdown]
# ## Second patient: an intermediate that is a constant
#
# The function is a weighted exponential, $w\,e^{x}$. `setup_context` computes $e^x$ and saves it, so that `backward`
# needs no exponential.

# %%
w = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)


class WeightedExp(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return w * x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w = inputs
        ctx.save_for_backward(x.exp(), w)
        ctx.save_for_forward(x, w)

    @staticmethod
    def backward(ctx, g):
        exp, w = ctx.saved_tensors
        return g * w * exp, g * exp

    @staticmethod
    @nestable_jvp
    def jvp(ctx, x_t, w_t):
        x, w = ctx.saved_tensors
        return x_t * w * x.exp() + w_t * x.exp()


print("gradcheck:", passes(WeightedExp.apply, x, w))
report = hodiff.check(WeightedExp, (x, w))
assert "HD103" in report.codes
report

# %% [markdown]
# The report names the line within the cell. `backward` has to compute $e^x$ from the saved *inputs*. The new version
# also fixes the warning: it skips gradients that are not needed.


# %%
class MendedWeightedExp(WeightedExp):
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        x_needed, w_needed = ctx.needs_input_grad
        return g * w * x.exp() if x_needed else None, g * x.exp() if w_needed else None


report = hodiff.check(MendedWeightedExp, (x, w))
assert not report.findings
print(report.summary)

# %% [markdown]
# ## Third patient: a tangent of half the size
#
# The function is $x^2 / 2$. `backward` is right, and `jvp` was never called, not even by `gradcheck` with its defaults.


# %%
class HalfSquare(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x / 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x

    @staticmethod
    @nestable_jvp
    def jvp(ctx, tangent):
        (x,) = ctx.saved_tensors
        return tangent * x / 2


print("gradcheck:", passes(HalfSquare.apply, x))
report = hodiff.check(HalfSquare, x)
assert "HD102" in report.codes
report

# %% [markdown]
# Only rows of the table with *forward* in them fail, so `jvp` is wrong and `backward` is right.


# %%
class MendedHalfSquare(HalfSquare):
    @staticmethod
    @nestable_jvp
    def jvp(ctx, tangent):
        (x,) = ctx.saved_tensors
        return tangent * x


report = hodiff.check(MendedHalfSquare, x, order=3)
assert not report.findings
print(report.summary)

# %% [markdown]
# In a test suite, one line checks a Function, and fails with the report as its message:

# %%
ok = hodiff.assert_differentiable(MendedHalfSquare, x).ok
try:
    hodiff.assert_differentiable(HalfSquare, x)
except hodiff.CheckError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# **Next.** [Curvature of a transformer](05_curvature_of_a_transformer.ipynb).
