# %% [markdown]
# # Routes and trust: second derivatives that PyTorch gets wrong
#
# A second derivative takes two passes, each in reverse or forward mode: four *routes* to the same numbers. In PyTorch
# the four results are not always equal. This notebook finds an error of torch in an ordinary layer, shows how far it
# spreads, and corrects it.

# %%
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, jvp

import hodiff
from hodiff.checks import scipy_hessian

torch.manual_seed(0)
torch.set_num_threads(1)

# %% [markdown]
# ## One layer norm
#
# The first output $y_0$ of a layer norm of three numbers is smooth. For a direction $v$, forward-over-reverse computes
# the Hessian-vector product as the tangent of a gradient. Reverse-over-forward computes it as the gradient of a
# tangent.

# %%
x = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
v = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)


def first(x):
    return F.layer_norm(x, (3,))[0]


tangent_of_gradient = jvp(grad(first), (x,), (v,))[1]
gradient_of_tangent = grad(lambda x: jvp(first, (x,), (v,))[1])(x)
print("forward-over-reverse", [round(each, 4) for each in tangent_of_gradient.tolist()])
print("reverse-over-forward", [round(each, 4) for each in gradient_of_tangent.tolist()])

# %% [markdown] The results differ, without a warning. SciPy's finite differences use function values only, so they are
# an independent reference:

# %%
truth = scipy_hessian(first, x).matrix @ v
print("SciPy's differences ", [round(each, 4) for each in truth.tolist()])
torch.testing.assert_close(tangent_of_gradient, truth, rtol=1e-6, atol=1e-7)
assert (gradient_of_tangent - truth).norm() > 0.1 * truth.norm()

# %% [markdown]
# When the forward rule of torch's layer norm is differentiated again, it treats the mean and the deviation as
# constants. With torch alone the two routes with forward mode inside are therefore wrong:

# %%
for route in hodiff.ROUTES:
    product = hodiff.hvp(first, x, v, route=route, correct=False)
    print(f"{route:22} {((product - truth).norm() / truth.norm()).item():8.0e}")

# %% [markdown]
# hodiff's transforms use their own rule instead of torch's, and all four routes agree:

# %%
for route in hodiff.ROUTES:
    product = hodiff.hvp(first, x, v, route=route)
    distance = ((product - truth).norm() / truth.norm()).item()
    assert distance < 1e-6
    print(f"{route:22} right to 1e-6: {distance < 1e-6}")

# %% [markdown]
# ## The effect in a transformer
#
# The next cell takes an encoder layer of an ordinary transformer in float64. It computes one product with the Hessian
# of a loss by torch's own reverse-over-forward.

# %%
model = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).double()
tokens, target = torch.randn(4, 6, 16, dtype=torch.float64), torch.randn(4, 6, 16, dtype=torch.float64)
parameters = {name: each.detach() for name, each in model.named_parameters()}
direction = {name: torch.randn_like(each) for name, each in parameters.items()}


def loss(parameters):
    return F.mse_loss(functional_call(model, parameters, (tokens,)), target)


def by_torch():
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return grad(lambda p: jvp(loss, (p,), (direction,))[1])(parameters)


def flat(tree):
    return torch.cat([each.flatten() for each in tree.values()])


exact = flat(hodiff.hvp(loss, parameters, direction))
wrong = flat(by_torch())
with hodiff.corrected():
    mended = flat(by_torch())
off = ((wrong - exact).norm() / exact.norm()).item()
assert off > 1e-3
assert (mended - exact).norm() < 1e-12 * exact.norm()
print(f"by torch alone off by {off:.1%}, in float64")
print("the same code within hodiff.corrected(): equal to 1e-12")

# %% [markdown] An optimizer or an eigenvalue solver with the first product would compute wrong results. No test of the
# loss or the gradient would detect this.
# ## Preflight: check a model first
#
# `preflight` runs a model once, and looks up the operators that it calls in hodiff's audit of torch and in the table of
# corrections. With torch alone:

# %%
hodiff.preflight(model, tokens, correct=False)

# %% [markdown]
# With hodiff's transforms:

# %%
report = hodiff.preflight(model, tokens)
assert report.ok
report

# %% [markdown]
# ## Check your own code
#
# No audit covers your own code. `hodiff.check` computes all routes to all orders, and compares them with differences,
# with SciPy's Hessian and with each other. For our function it finds no error, and warns about torch alone:

# %%
report = hodiff.check(first, x)
assert report.ok
assert report.codes == ("HD410",)
report

# %% [markdown]
# **Next.** [Write a Function](03_write_a_function.ipynb) whose routes all agree, and find defects with [the
# doctor](04_the_doctor.ipynb).
