# %% [markdown]
# # Write a Function
#
# `torch.autograd.Function` lets you write a derivative yourself. Most Functions are written in the old form, and
# support a single gradient only. This notebook turns such a Function into one with a clean report: any order, any
# route, batches.

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
# `ctx`, and it is tempting to save intermediate results: here the sigmoid.


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
# The gradient is right. `hodiff.check` tests more:

# %%
report = hodiff.check(OldSwish, x)
assert not report.ok
report

# %% [markdown]
# There are two defects. First, transforms of `torch.func`, which include forward mode and batching, require
# `setup_context`. Second, `s` is neither input nor output, so a second derivative treats it as a constant.
#
# ## Step one: `setup_context`
#
# `forward` has no `ctx` and only computes. `setup_context` receives inputs and output, and saves the tensors that
# `backward` needs. `backward` recomputes the sigmoid from the input, which is cheap and can be differentiated.


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
# The second derivative is right now. Forward mode and a batching rule are still missing.
#
# ## Step two: `jvp`
#
# Forward mode multiplies the tangent by the same slope. `nestable_jvp` keeps the rule right when forward mode is nested
# in forward mode, which torch alone gets wrong.
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
# All compositions of reverse and forward passes to third order agree with differences. The picture shows them, with
# differences of the *values* as dots:

# %%
panels = plot.routes(CompleteSwish.apply, -6, 6, order=3)

# %% [markdown] The next picture shows the first version, which saves the sigmoid as a *constant*. From the second
# derivative on, the curves differ from the dots.


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
# ## One rule is enough
#
# All three rules follow from the slope. `hodiff.elementwise` derives them:

# %%
swish = hodiff.elementwise(lambda x: x * torch.sigmoid(x), derivative=lambda x, y: slope(x))
assert hodiff.check(swish, x, order=3).ok
torch.testing.assert_close(swish(x), torch.nn.functional.silu(x))

# %% [markdown]
# In a live notebook, `from hodiff.plot import widgets; widgets.FunctionBuilder()` draws such pictures while you type
# the rules.
#
# **Next.** [The doctor](04_the_doctor.ipynb) shows how to read reports.
