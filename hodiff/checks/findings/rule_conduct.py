"""Defects HD2xx (return values of rules) and HD3xx (side effects of rules)."""

from __future__ import annotations

from hodiff.checks.findings.defect import Defect

RETURNS = (
    Defect(
        "HD201",
        "error",
        "a gradient of the wrong shape",
        "backward returns a gradient whose shape is not that of the input.",
        "Return it in the input's shape: `g.reshape(x.shape)`.",
    ),
    Defect(
        "HD202",
        "error",
        "a broadcast gradient is not reduced",
        "an input was broadcast in forward, and backward returns its gradient in the shape of the output.",
        "Sum over what was broadcast: `g.sum_to_size(x.shape)`.",
    ),
    Defect(
        "HD203",
        "error",
        "too few or too many gradients",
        "backward must return one value for each argument of forward.",
        "Return None for what has no gradient: `return g_x, None`.",
    ),
    Defect(
        "HD204",
        "error",
        "a gradient for what is no tensor",
        "backward returns a tensor for an argument that is a number, a string or None.",
        "Return None in its place: `return g_x, None`.",
    ),
)

SURROUNDINGS = (
    Defect(
        "HD301",
        "error",
        "the incoming gradient is changed in place",
        "backward or jvp writes into the gradient it was given, which others read, too.",
        "Compute a new tensor: `g * 2`, not `g.mul_(2)`.",
    ),
    Defect(
        "HD302",
        "error",
        "a saved tensor is changed in place",
        "backward or jvp writes into a saved tensor, so that a second pass gives another result.",
        "Compute a new tensor: `x = x.exp()`, not `x.exp_()`.",
    ),
    Defect(
        "HD303",
        "error",
        "an input is changed in place without mark_dirty",
        "forward writes into its input and does not say so.",
        "Call `ctx.mark_dirty(x)` in setup_context and return x, or write `x = x.clone()` first.",
    ),
    Defect(
        "HD304",
        "error",
        "a tensor is kept as an attribute of ctx",
        "what is stored on ctx itself is not freed with the graph and not checked for changes, and its derivative "
        "is lost.",
        "Save it: `ctx.save_for_backward(x)`.",
    ),
    Defect(
        "HD305",
        "error",
        "backward is not deterministic",
        "two backward passes from the same graph differ.",
        "Draw random numbers in forward and save them: `ctx.save_for_backward(x, noise)`; keep nothing on the class.",
    ),
    Defect(
        "HD306",
        "error",
        "a buffer of a fixed dtype",
        "a tensor made inside is float32 whatever the inputs are.",
        "Make it like the input: `torch.zeros_like(x)` or `dtype=x.dtype`; a module: `module.double()`.",
    ),
    Defect(
        "HD307",
        "warning",
        "a buffer on a fixed device",
        "a tensor made inside, or closed over, is on one device whatever the inputs are.",
        "Make it like the input: `torch.zeros_like(x)` or `device=x.device`.",
    ),
    Defect(
        "HD308",
        "error",
        "memory that was never written",
        "a result depends on what an uninitialised tensor happened to hold.",
        "Fill it: `torch.zeros_like(x)`, not `torch.empty_like(x)`.",
    ),
    Defect(
        "HD309",
        "error",
        "strides matter",
        "the result changes with the memory layout of equal inputs or incoming gradients.",
        "Read through torch operators, or begin with `x = x.contiguous()`.",
    ),
    Defect(
        "HD310",
        "error",
        "a result of an earlier call is kept",
        "a module computes something of its parameters or inputs once and keeps it, so that neither later calls nor "
        "derivatives follow them.",
        "Compute it in each call, or forget it before: `self.cache = None`.",
    ),
)
