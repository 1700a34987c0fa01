# %% [markdown]
# # Curvature of a transformer
#
# This notebook studies the Hessian of a language model from Hugging Face's `transformers`. The model is built from a
# configuration, and nothing is downloaded. The notebook checks its second derivatives, and computes the largest
# eigenvalues, the density of all eigenvalues, and their change during training.

# %%
import matplotlib.pyplot as plt
import torch
from torch.func import functional_call
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import hodiff
from hodiff import estimators, plot

torch.manual_seed(0)
logging.set_verbosity_error()
torch.set_num_threads(1)
plt.rcParams["figure.dpi"] = 72

# %% [markdown]
# The model has two layers, 32 channels and two heads. It learns to count modulo ten: `3 4 5 6 ...`.

# %%
config = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=10, n_positions=12, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config).double().eval()
starts = torch.arange(10)[:, None]
tokens = (starts + torch.arange(12)) % 10
parameters = {name: each.detach().clone() for name, each in model.named_parameters()}
print(f"{sum(each.numel() for each in parameters.values()):,} parameters")

# %% [markdown]
# ## Preflight
#
# Which operators does the model call, and which of their second derivatives exist? First with torch alone, then with
# hodiff:

# %%
hodiff.preflight(model, input_ids=tokens, labels=tokens, correct=False)

# %%
report = hodiff.preflight(model, input_ids=tokens, labels=tokens)
assert report.ok
report

# %% [markdown] Torch's attention kernel has no second derivative, and the second derivative of its layer norm is wrong
# by two routes. With hodiff's transforms and operators all four routes are right.
#
# ## The top of the spectrum


# %%
def loss(parameters):
    return functional_call(model, parameters, kwargs={"input_ids": tokens, "labels": tokens}).loss


A = hodiff.HessianOperator(loss, parameters)
A

# %%
top = estimators.eigsh(A, 4, which="LA", tol=1e-3)
assert top.converged
top

# %% [markdown]
# A difference of gradients along the eigenvector confirms the largest eigenvalue:

# %%
vector = A.domain.unflatten(top.eigenvectors[:, -1])


def slope(t):
    moved = {name: each + t * vector[name] for name, each in parameters.items()}
    gradient = torch.func.grad(loss)(moved)
    return sum((gradient[name] * vector[name]).sum() for name in vector)


difference = ((slope(1e-4) - slope(-1e-4)) / 2e-4).item()
assert abs(difference / top.eigenvalues[-1].item() - 1) < 1e-3
print("agrees to a thousandth")

# %% [markdown]
# ## The density of all eigenvalues
#
# The matrix would have some 700 million entries. Its density takes a hundred products. The point is the start of
# training, not a minimum: some negative eigenvalues are larger in magnitude than all positive ones.

# %%
density = estimators.spectral_density(A, samples=2, steps=50)
ax = plot.spectral_density(density, of=A)

# %% [markdown]
# ## During training
#
# We run gradient descent, and compute the *sharpness*, the largest eigenvalue, at every fifth step. `A.at(x)` is the
# operator at another point. The last eigenvector is a good start for the next.

# %%
rate = 0.3
x, losses, found, start = dict(parameters), [], {}, None
for step in range(61):
    if step % 5 == 0:
        sharpness = estimators.sharpness(A.at(x), start=start, tol=1e-2)
        found[step], start = sharpness.value, sharpness.vector
    gradient, value = torch.func.grad_and_value(loss)(x)
    losses.append(value.item())
    x = {name: each - rate * gradient[name] for name, each in x.items()}

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
left.plot(losses)
left.set(title="loss", xlabel="step")
right.plot(list(found), list(found.values()), "o-", label="sharpness")
right.axhline(2 / rate, color="gray", linestyle="--", label="2 / rate")
right.set(title="largest eigenvalue", xlabel="step")
legend = right.legend()

# %% [markdown]
# Where the sharpness is above $2 / \text{rate}$, a step of gradient descent along its eigenvector overshoots and
# increases the loss. During this phase the loss oscillates. Once the sharpness stays below, the loss only falls.

# %%
rises = [step for step in range(1, 61) if losses[step] > losses[step - 1]]
above = [step for step, each in found.items() if each > 2 / rate]
print(f"loss {losses[0]:.2f} at first and {losses[-1]:.2f} at the end")
print(f"sharpness above 2 / rate in {len(above)} of {len(found)} measurements")
print(f"the loss rose in {len(rises)} of 60 steps, the last of them step {max(rises)}")
assert max(rises) <= max(above) + 5

# %% [markdown]
# **Next.** [Write an optimizer](06_write_an_optimizer.ipynb) that uses the curvature.
