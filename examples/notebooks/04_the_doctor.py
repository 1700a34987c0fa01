# %% [markdown]
# # The doctor
#
# Three Functions come in. All of them train; all of them pass `torch.autograd.gradcheck`. Each has a defect that
# shows at the second derivative, or by another route. For each: read the report, then mend it.

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
# ## First patient: hides from the second derivative
#
# $\log\cosh x$. Its author marked the backward `once_differentiable`, which promises that nobody differentiates it
# again.

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
# Somebody does differentiate it again, and torch keeps silent: the second derivative $1 - \tanh^2 x$ comes out as
# zero.

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
# The cure is to take the mark away; `x.tanh()` can be differentiated as it stands. The report has a warning besides:
# $\cosh x$ overflows long before its logarithm does. $|x| + \log(1 + e^{-2|x|}) - \log 2$ is the same and does not.


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
# A weighted exponential, $w\,e^{x}$. To save an exponential, `setup_context` keeps $e^x$ from a computation of its
# own.

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
# The report names the line, counted within its cell. `backward` has to compute $e^x$ from what was saved of the
# *inputs*. The warning is mended on the way: work for a gradient that nobody asked for is spared.


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
# $x^2 / 2$; backward is right, and nobody ever called `jvp`. Neither does `gradcheck` at its defaults.


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
# In the table only rows with *forward* in them fail, so `jvp` is at fault and `backward` is not.


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
# In a test suite one line does it, and fails with the report as its message:

# %%
ok = hodiff.assert_differentiable(MendedHalfSquare, x).ok
try:
    hodiff.assert_differentiable(HalfSquare, x)
except hodiff.CheckError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# **Next.** [Curvature of a transformer](05_curvature_of_a_transformer.ipynb).
