"""The defects that a check can name: a code each, what causes it, and what to do about it.

A code never changes its meaning. Hundreds group what belongs together: 1 numbers that are wrong, 2 what a rule returns,
3 what a rule does to its surroundings, 4 what is missing, 5 waste, 9 what is no defect of the function.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """A kind of defect.

    Attributes:
        code: Its name, as `HD101`.
        severity: "error" (something is wrong or missing), "warning" (it works here, and wastes or fails elsewhere) or
            "note".
        title: What it is, in a few words.
        cause: Why derivatives go wrong, in a sentence.
        remedy: What to change, with a line of code.
    """

    code: str
    severity: str
    title: str
    cause: str
    remedy: str


_CODES = (
    Code(
        "HD101",
        "error",
        "wrong gradient",
        "backward computes something else than the derivative: a sign, a factor, a term or a transpose.",
        "Derive the formula again and compare the elements listed: `return g * 2 * x`, not `return g * x`.",
    ),
    Code(
        "HD102",
        "error",
        "wrong tangent",
        "jvp computes something else than the derivative, while backward is right.",
        "Make jvp the transpose of backward: where that returns `g * slope`, `return tangent * slope`.",
    ),
    Code(
        "HD103",
        "error",
        "an intermediate of forward is a constant at second order",
        "backward reads a tensor that forward computed and that is neither input nor output, so that its dependence "
        "on the inputs is lost.",
        "Recompute it in backward from `ctx.saved_tensors`, or return it as an output and add its incoming gradient.",
    ),
    Code(
        "HD104",
        "error",
        "the graph is cut in backward",
        "backward detaches what it differentiates with: .data, .detach(), .item() or torch.no_grad().",
        "Remove it: `(x,) = ctx.saved_tensors` and `return g * 2 * x`.",
    ),
    Code(
        "HD105",
        "error",
        "the gradient of an auxiliary output is ignored",
        "an output that exists for backward's sake depends on the inputs, and backward ignores what comes in for it.",
        "Add it: `def backward(ctx, g, g_aux): return g * aux + g_aux * d_aux`.",
    ),
    Code(
        "HD106",
        "error",
        "a kernel in backward loses the second derivative",
        "backward calls NumPy, Triton, C++ or another thing that autograd cannot see into.",
        "Make that call a Function of its own, with backward and jvp: `return Kernel.apply(g, x)`.",
    ),
    Code(
        "HD107",
        "error",
        "once_differentiable",
        "the mark makes the gradient a constant, in silence where the incoming gradient is one.",
        "Remove `@once_differentiable` and write backward with torch operators or other Functions.",
    ),
    Code(
        "HD108",
        "error",
        "the tangent's slope is a constant",
        "jvp multiplies the tangent by something that is not computed from the inputs in jvp, so that "
        "reverse-over-forward sees a constant.",
        "Save the inputs, `ctx.save_for_forward(x)`, and compute the slope in jvp: `return tangent * 2 * x`.",
    ),
    Code(
        "HD109",
        "error",
        "the gradient goes through unchanged",
        "backward returns the incoming gradient as it is, though the function is not the identity.",
        "Multiply by the derivative, or declare the surrogate: `hodiff.straight_through(forward, surrogate)`.",
    ),
    Code(
        "HD110",
        "error",
        "a mask is ignored",
        "the gradient passes where the function does not depend on its input.",
        "Save the mask and apply it: `return g * mask`.",
    ),
    Code(
        "HD111",
        "warning",
        "unstable at large arguments",
        "the formula is right where it was checked, and loses its digits or overflows for large arguments.",
        "Rearrange it: `torch.nn.functional.logsigmoid(x)`, not `torch.log(torch.sigmoid(x))`.",
    ),
    Code(
        "HD112",
        "error",
        "NaN or infinity at an edge",
        "a derivative is not finite where the function's own is, often 0 * inf in a branch that is not taken.",
        "Make the argument safe before the operation: `torch.where(x > 0, x, 1).log()`.",
    ),
    Code(
        "HD113",
        "error",
        "imprecise in low precision",
        "the derivative is right in float64, and loses more than half of its digits in the inputs' own dtype.",
        "Rearrange the formula against cancellation, or compute it in a wider dtype: `x.float()`.",
    ),
    Code(
        "HD114",
        "error",
        "forward mode does not nest",
        "torch runs jvp with forward mode off, so that an outer forward pass sees constants in it.",
        "Put `@hodiff.functions.nestable_jvp` under `@staticmethod` of jvp.",
    ),
    Code(
        "HD115",
        "error",
        "wrong from some order on",
        "a rule is right to a lower order and made of something whose own derivative is wrong.",
        "Write every rule with torch operators that are themselves differentiable to this order.",
    ),
    Code(
        "HD116",
        "error",
        "the incoming gradient is taken for a constant",
        "backward detaches the incoming gradient, so that only losses whose gradient varies show it.",
        "Use it as it comes: `return g * slope`, not `g.detach() * slope`.",
    ),
    Code(
        "HD201",
        "error",
        "a gradient of the wrong shape",
        "backward returns a gradient whose shape is not that of the input.",
        "Return it in the input's shape: `g.reshape(x.shape)`.",
    ),
    Code(
        "HD202",
        "error",
        "a broadcast gradient is not reduced",
        "an input was broadcast in forward, and backward returns its gradient in the shape of the output.",
        "Sum over what was broadcast: `g.sum_to_size(x.shape)`.",
    ),
    Code(
        "HD203",
        "error",
        "too few or too many gradients",
        "backward must return one value for each argument of forward.",
        "Return None for what has no gradient: `return g_x, None`.",
    ),
    Code(
        "HD204",
        "error",
        "a gradient for what is no tensor",
        "backward returns a tensor for an argument that is a number, a string or None.",
        "Return None in its place: `return g_x, None`.",
    ),
    Code(
        "HD301",
        "error",
        "the incoming gradient is changed in place",
        "backward or jvp writes into the gradient it was given, which others read, too.",
        "Compute a new tensor: `g * 2`, not `g.mul_(2)`.",
    ),
    Code(
        "HD302",
        "error",
        "a saved tensor is changed in place",
        "backward or jvp writes into a saved tensor, so that a second pass gives another result.",
        "Compute a new tensor: `x = x.exp()`, not `x.exp_()`.",
    ),
    Code(
        "HD303",
        "error",
        "an input is changed in place without mark_dirty",
        "forward writes into its input and does not say so.",
        "Call `ctx.mark_dirty(x)` in setup_context and return x, or write `x = x.clone()` first.",
    ),
    Code(
        "HD304",
        "error",
        "a tensor is kept as an attribute of ctx",
        "what is stored on ctx itself is not freed with the graph and not checked for changes, and its derivative "
        "is lost.",
        "Save it: `ctx.save_for_backward(x)`.",
    ),
    Code(
        "HD305",
        "error",
        "backward is not deterministic",
        "two backward passes from the same graph differ.",
        "Draw random numbers in forward and save them: `ctx.save_for_backward(x, noise)`.",
    ),
    Code(
        "HD306",
        "error",
        "a buffer of a fixed dtype",
        "a tensor made inside is float32 whatever the inputs are.",
        "Make it like the input: `torch.zeros_like(x)` or `dtype=x.dtype`; a module: `module.double()`.",
    ),
    Code(
        "HD307",
        "warning",
        "a buffer on a fixed device",
        "a tensor made inside, or closed over, is on one device whatever the inputs are.",
        "Make it like the input: `torch.zeros_like(x)` or `device=x.device`.",
    ),
    Code(
        "HD308",
        "error",
        "memory that was never written",
        "a result depends on what an uninitialised tensor happened to hold.",
        "Fill it: `torch.zeros_like(x)`, not `torch.empty_like(x)`.",
    ),
    Code(
        "HD309",
        "error",
        "strides matter",
        "the result changes with the memory layout of equal inputs.",
        "Read through torch operators, or begin with `x = x.contiguous()`.",
    ),
    Code(
        "HD401",
        "error",
        "no jvp",
        "forward mode, and with it three of the four second-order routes, is missing.",
        "Add `@staticmethod def jvp(ctx, tangent)` of saved inputs (`ctx.save_for_forward(x)`) and torch operators.",
    ),
    Code(
        "HD402",
        "error",
        "wrong batching rule",
        "vmap gives something else than a loop.",
        "Honour each entry of in_dims (None and negative ones, too), or set `generate_vmap_rule = True`.",
    ),
    Code(
        "HD403",
        "error",
        "no batching rule",
        "vmap, and with it Jacobians and Hessians of torch.func, raises.",
        "Set `generate_vmap_rule = True` if all rules are torch operators, else write `vmap`.",
    ),
    Code(
        "HD404",
        "error",
        "compiled code differs",
        "torch.compile gives something else than eager code; it ignores a custom jvp.",
        "Build on hodiff.authoring, which compiles, or keep it out of graphs: `torch.compiler.disable(f)`.",
    ),
    Code(
        "HD405",
        "error",
        "forward takes ctx",
        "torch.func transforms need forward and setup_context apart.",
        "Split it: `def forward(x)` and `def setup_context(ctx, inputs, output)`.",
    ),
    Code(
        "HD406",
        "error",
        "an operator has no such derivative",
        "a torch operator or torch.library.custom_op inside lacks a rule.",
        "Write it in elementary operators, or call it within `hodiff.corrected()`.",
    ),
    Code(
        "HD407",
        "error",
        "data-dependent Python",
        "the function branches on, or writes in place, values that a transform does not have.",
        "Use `torch.where` and out-of-place operations.",
    ),
    Code(
        "HD408",
        "error",
        "a rule raises",
        "a rule of the function raises where it is needed.",
        "Mend what the message says.",
    ),
    Code(
        "HD501",
        "warning",
        "gradients that nobody needs",
        "backward computes gradients of arguments that require none.",
        "Ask first: `g @ w if ctx.needs_input_grad[0] else None`.",
    ),
    Code(
        "HD502",
        "warning",
        "more is saved than needed",
        "a saved tensor is not read by backward, or a smaller one would do.",
        "Save what backward reads: `ctx.save_for_backward(x)`.",
    ),
    Code(
        "HD901",
        "error",
        "not smooth here",
        "the point is a kink, a jump or the edge of the domain, where derivatives depend on the side.",
        "Check at another point, or state which derivative is meant.",
    ),
    Code(
        "HD902",
        "note",
        "derivatives of a surrogate",
        "the function declares derivatives that are not its own; the gap is measured and no defect.",
        "Nothing to do: `approximate=True` says so.",
    ),
    Code(
        "HD903",
        "error",
        "the function is not deterministic",
        "two calls with the same inputs differ.",
        "Call `module.eval()`, or pass random numbers as an input.",
    ),
)

CODES = {each.code: each for each in _CODES}
