# %% [markdown]
# # Write a Function
#
# `torch.autograd.Function` lets you write a derivative yourself. Most of those one meets are written in the old form,
# and are good for a gradient, once. This notebook takes one from there to a clean report: any order, any route,
# batches.

# %%
import matplotlib.pyplot as plt
import torch
from torch.autograd import Function

import hodiff
from hodiff import plot
from hodiff.functions import nestable_jvp

torch.manual_seed(0)
torch.set_num_threads(1)
plt.rcParams["figure.dpi"] = 72
x = torch.tensor([-1.5, -0.2, 0.7, 2.0], dtype=torch.float64)

# %% [markdown]
# ## The old form
#
# Swish, $x\,\sigma(x)$, has the derivative $\sigma(x) + x\,\sigma(x)(1 - \sigma(x))$. In the old form `forward` takes
# `ctx`, and it is tempting to keep there whatever is at hand: here the sigmoid.


# %%
class OldSwish(Function):
    @staticmethod
    def forward(ctx, x):
        s = torch.sigmoid(x)
        ctx.save_for_backward(x, s)
        return x * s

    @staticmethod
    def backward(ctx, g):
        x, s = ctx.saved_tensors
        return g * (s + x * s * (1 - s))


print("gradcheck:", torch.autograd.gradcheck(OldSwish.apply, x.clone().requires_grad_()))

# %% [markdown]
# The gradient is right. What else there is to ask of it:

# %%
report = hodiff.check(OldSwish, x)
assert not report.ok
report

# %% [markdown]
# Two things are amiss. The form: transforms of `torch.func`, and so forward mode and batching, want `setup_context`.
# And the numbers: `s` is neither input nor output, so that a second derivative takes it for a constant.
#
# ## Step one: `setup_context`
#
# `forward` loses its `ctx` and does nothing but compute; `setup_context` sees inputs and output, and keeps what
# backward reads. `backward` computes the sigmoid from the input again, which is cheap and can be differentiated.


# %%
class Swish(Function):
    @staticmethod
    def forward(x):
        return x * torch.sigmoid(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * (s + x * s * (1 - s))


report = hodiff.check(Swish, x)
print("\n".join(f"{each.code} {each.severity}: {each.title}" for each in report.findings))

# %% [markdown]
# The second derivative is right now; what is left is missing: forward mode, and a rule for batches.
#
# ## Step two: `jvp`
#
# Forward mode pushes a tangent through: the same slope, times the tangent. `nestable_jvp` keeps the rule right where
# forward mode is nested in forward mode, which torch alone gets wrong.
#
# ## Step three: `vmap`
#
# An elementwise function needs no rule of its own: `generate_vmap_rule` lets torch derive it.


# %%
def slope(x):
    s = torch.sigmoid(x)
    return s + x * s * (1 - s)


class CompleteSwish(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * torch.sigmoid(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * slope(x)

    @staticmethod
    @nestable_jvp
    def jvp(ctx, tangent):
        (x,) = ctx.saved_tensors
        return tangent * slope(x)


report = hodiff.check(CompleteSwish, x, order=3)
assert report.ok
assert not report.findings
report

# %% [markdown]
# All compositions of reverse and forward passes to third order agree with differences. Drawn, with differences of the
# *values* as dots:

# %%
panels = plot.routes(CompleteSwish.apply, -6, 6, order=3)

# %% [markdown]
# And what the report meant by *constant*: the same picture of a Function that keeps the sigmoid from forward. The
# curves leave the dots from the second derivative on.


# %%
class KeepsTheSigmoid(CompleteSwish):
    @staticmethod
    def setup_context(ctx, inputs, output):
        (x,) = inputs
        ctx.save_for_backward(x, torch.sigmoid(x))
        ctx.save_for_forward(x, torch.sigmoid(x))

    @staticmethod
    def backward(ctx, g):
        x, s = ctx.saved_tensors
        return g * (s + x * s * (1 - s))

    @staticmethod
    @nestable_jvp
    def jvp(ctx, tangent):
        x, _ = ctx.saved_tensors
        return tangent * slope(x)


panels = plot.routes(KeepsTheSigmoid.apply, -6, 6, order=2)

# %% [markdown]
# ## Or say it once
#
# The three rules say one thing, the slope. `hodiff.elementwise` makes all of them of it:

# %%
swish = hodiff.elementwise(lambda x: x * torch.sigmoid(x), derivative=lambda x, y: slope(x))
assert hodiff.check(swish, x, order=3).ok
torch.testing.assert_close(swish(x), torch.nn.functional.silu(x))

# %% [markdown]
# In a live notebook `from hodiff.plot import widgets; widgets.FunctionBuilder()` draws such pictures while you type
# the rules.
#
# **Next.** [The doctor](04_the_doctor.ipynb) reads reports.
