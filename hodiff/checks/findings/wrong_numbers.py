"""Defects HD1xx: wrong numbers."""

from __future__ import annotations

from hodiff.checks.findings.defect import Defect

NUMBERS = (
    Defect(
        "HD101",
        "error",
        "wrong gradient",
        "backward computes something else than the derivative: a sign, a factor, a term or a transpose.",
        "Derive the formula again and compare the elements listed; that of x² is `g * 2 * x`, not `g * x`.",
    ),
    Defect(
        "HD102",
        "error",
        "wrong tangent",
        "jvp computes something else than the derivative, while backward is right.",
        "Make jvp the transpose of backward: where that returns `g * slope`, `return tangent * slope`.",
    ),
    Defect(
        "HD103",
        "error",
        "an intermediate of forward is a constant at second order",
        "backward reads a tensor that forward computed and that is neither input nor output, so that its dependence "
        "on the inputs is lost.",
        "Recompute it in backward from `ctx.saved_tensors`, or return it as an output and add its incoming gradient.",
    ),
    Defect(
        "HD104",
        "error",
        "the graph is cut",
        "backward detaches what it differentiates with: .data, .detach(), .item() or torch.no_grad().",
        "Remove it: write the slope in torch operators on what `ctx.saved_tensors` holds, `return g * slope(x)`; of a "
        "solver, differentiate its steps: `torchdiffeq.odeint`, not `odeint_adjoint`.",
    ),
    Defect(
        "HD105",
        "error",
        "the gradient of an auxiliary output is ignored",
        "an output that exists for backward's sake depends on the inputs, and backward ignores what comes in for it.",
        "Add it: `def backward(ctx, g, g_aux): return g * aux + g_aux * d_aux`.",
    ),
    Defect(
        "HD106",
        "error",
        "a kernel loses the derivative",
        "backward calls NumPy, Triton, C++ or another thing that autograd cannot see into.",
        "Make that call a Function of its own, with backward and jvp: `return Kernel.apply(g, x)`.",
    ),
    Defect(
        "HD107",
        "error",
        "once_differentiable",
        "the mark makes the gradient a constant, in silence where the incoming gradient is one.",
        "Remove `@once_differentiable` and write backward with torch operators or other Functions.",
    ),
    Defect(
        "HD108",
        "error",
        "the tangent's slope is a constant",
        "jvp multiplies the tangent by something that is not computed from the inputs in jvp, so that "
        "reverse-over-forward sees a constant.",
        "Save the inputs, `ctx.save_for_forward(x)`, and compute the slope in jvp: `return tangent * slope(x)`.",
    ),
    Defect(
        "HD109",
        "error",
        "the gradient goes through unchanged",
        "backward returns the incoming gradient as it is, though the function is not the identity.",
        "Multiply by the derivative, or declare the surrogate: `hodiff.straight_through(forward, surrogate)`.",
    ),
    Defect(
        "HD110",
        "error",
        "a mask is ignored",
        "the gradient passes where the function does not depend on its input.",
        "Save the mask and apply it: `return g * mask`.",
    ),
    Defect(
        "HD111",
        "warning",
        "unstable at large arguments",
        "the formula is right for small arguments, and loses its digits or overflows for large ones.",
        "Rearrange it: `torch.nn.functional.logsigmoid(x)`, not `torch.log(torch.sigmoid(x))`.",
    ),
    Defect(
        "HD112",
        "error",
        "NaN or infinity at an edge",
        "a derivative is not finite where the function's own is, often 0 * inf in a branch that is not taken.",
        "Make the argument safe before the operation: `torch.where(x > 0, x, 1).log()`.",
    ),
    Defect(
        "HD113",
        "error",
        "imprecise in low precision",
        "the derivative is right in float64, and loses more than half of its digits in the inputs' own dtype.",
        "Rearrange the formula against cancellation, or compute it in a wider dtype: `x.float()`.",
    ),
    Defect(
        "HD114",
        "error",
        "forward mode does not nest",
        "torch alone runs jvp with forward mode off, so that an outer forward pass sees constants in it.",
        "Take such derivatives by hodiff's transforms or within `hodiff.corrected()`, which mend it, or put "
        "`@hodiff.functions.nestable_jvp` under `@staticmethod` of jvp.",
    ),
    Defect(
        "HD115",
        "error",
        "wrong from some order on",
        "a rule is right to a lower order and made of something whose own derivative is wrong.",
        "Write every rule with torch operators that are themselves differentiable to this order.",
    ),
    Defect(
        "HD116",
        "error",
        "the incoming gradient is taken for a constant",
        "backward detaches the incoming gradient, so that only losses whose gradient varies show it.",
        "Use it as it comes: `return g * slope`, not `g.detach() * slope`.",
    ),
    Defect(
        "HD117",
        "error",
        "wrong rule of custom_jvp or custom_vjp",
        "the rule computes something else than the derivative of its function: a sign, a factor or a term.",
        "Derive the formula again: a rule of the sine returns `f(x), torch.cos(x) * x_dot`.",
    ),
    Defect(
        "HD118",
        "error",
        "digits cancel",
        "numbers that are nearly equal are subtracted at these inputs, so that derivatives keep few of their digits, "
        "whatever rule computes them.",
        "Rearrange the formula: `2 * torch.sin(x / 2) ** 2`, not `1 - torch.cos(x)`; or check where it is used.",
    ),
)
