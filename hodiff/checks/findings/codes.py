"""Table of the defects that a check can name, by code, with their causes and remedies.

A code never changes its meaning. The hundreds are groups: 1 wrong numbers, 2 return values of a rule,
3 side effects of a rule, 4 missing rules, 5 waste, 9 results that are no defect of the function.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    """Kind of defect.

    Attributes:
        code: Its name, such as `HD101`.
        title: The defect, in a few words.
        cause: Why derivatives go wrong, in a sentence.
        remedy: What to change, with a line of code.
        severity: "error" (something is wrong or missing), "warning" (it works here, and wastes or fails elsewhere) or
            "note".
        in_function: Cause and remedy of this defect in a plain function instead of a rule, if they differ.
    """

    code: str
    title: str
    cause: str
    remedy: str
    severity: str = "error"
    in_function: tuple[str, str] | None = None


DEFECTS = (
    Defect(
        "HD101",
        "wrong gradient",
        "backward does not compute the derivative: a sign, a factor, a term or a transpose is wrong.",
        "Derive the formula again and compare the listed elements; the gradient of x² is `g * 2 * x`, not `g * x`.",
        in_function=(
            "a hook on a tensor changes its gradient, which is then not the derivative of the values.",
            "Remove the hook, or declare the intended gradient with a Function: `hodiff.straight_through`.",
        ),
    ),
    Defect(
        "HD102",
        "wrong tangent",
        "jvp does not compute the derivative, while backward is right.",
        "Make jvp the transpose of backward: if backward returns `g * slope`, `return tangent * slope`.",
    ),
    Defect(
        "HD103",
        "an intermediate of forward is a constant at second order",
        "backward reads a tensor that forward computed and that is neither input nor output, so its dependence on the "
        "inputs is lost.",
        "Recompute it in backward from `ctx.saved_tensors`, or return it as an output and add its incoming gradient.",
    ),
    Defect(
        "HD104",
        "the graph is cut",
        "backward detaches a tensor that the gradient depends on: .data, .detach(), .item() or torch.no_grad().",
        "Remove the detach: compute the slope with torch operators from `ctx.saved_tensors`, `return g * slope(x)`. "
        "Instead of `torchdiffeq.odeint_adjoint`, use `torchdiffeq.odeint` or `hodiff.odeint(memory='adjoint')`.",
        in_function=(
            "a tensor that depends on the inputs is taken out of the graph: .data, .detach(), .item(), "
            "torch.no_grad(), nn.Parameter, or a branch on requires_grad.",
            "Remove the call, or do not differentiate with respect to the tensors that it cuts off.",
        ),
    ),
    Defect(
        "HD105",
        "the gradient of an auxiliary output is ignored",
        "an output that exists only to be saved for backward depends on the inputs, and backward ignores its incoming "
        "gradient.",
        "Add the incoming gradient: `def backward(ctx, g, g_aux): return g * aux + g_aux * d_aux`.",
    ),
    Defect(
        "HD106",
        "a kernel loses the derivative",
        "backward calls NumPy, Triton, C++ or other code that autograd cannot differentiate.",
        "Move the call into a separate Function, with backward and jvp: `return Kernel.apply(g, x)`.",
        in_function=(
            "the function calls NumPy, Triton, C++ or other code that autograd cannot differentiate.",
            "Move the call into a Function, with backward and jvp, or wrap it with `hodiff.functions.numpy_function`.",
        ),
    ),
    Defect(
        "HD107",
        "once_differentiable",
        "the decorator makes the gradient a constant, without a warning if the incoming gradient is a constant.",
        "Remove `@once_differentiable` and write backward with torch operators or other Functions.",
    ),
    Defect(
        "HD108",
        "the tangent's slope is a constant",
        "jvp multiplies the tangent by a value that is not computed from the inputs in jvp, so reverse-over-forward "
        "sees a constant.",
        "Save the inputs, `ctx.save_for_forward(x)`, and compute the slope in jvp: `return tangent * slope(x)`.",
    ),
    Defect(
        "HD109",
        "the gradient goes through unchanged",
        "backward returns the incoming gradient unchanged, although the function is not the identity.",
        "Multiply by the derivative, or declare the surrogate: `hodiff.straight_through(forward, surrogate)`.",
    ),
    Defect(
        "HD110",
        "a mask is ignored",
        "backward returns a nonzero gradient where the function does not depend on its input.",
        "Save the mask and apply it: `return g * mask`.",
    ),
    Defect(
        "HD111",
        "unstable at large arguments",
        "the formula is right for small arguments, but loses digits or overflows for large ones.",
        "Rearrange the formula: `torch.nn.functional.logsigmoid(x)`, not `torch.log(torch.sigmoid(x))`.",
        severity="warning",
    ),
    Defect(
        "HD112",
        "NaN or infinity at an edge",
        "the computed derivative is not finite although the true derivative is, often because of 0 * inf in a branch "
        "that is not taken.",
        "Make the argument safe before the operation: `torch.where(x > 0, x, 1).log()`.",
    ),
    Defect(
        "HD113",
        "imprecise in low precision",
        "the derivative is right in float64, but loses more than half of its digits in the inputs' own dtype.",
        "Rearrange the formula against cancellation, or compute it in a wider dtype: `x.float()`.",
    ),
    Defect(
        "HD114",
        "forward mode does not nest",
        "torch alone runs jvp with forward mode off, so an outer forward pass sees constants in it.",
        "Compute such derivatives by hodiff's transforms or within `hodiff.corrected()`, or put "
        "`@hodiff.functions.nestable_jvp` under `@staticmethod` of jvp.",
    ),
    Defect(
        "HD115",
        "wrong from some order on",
        "a rule is right to a lower order, but calls a function whose own derivative is wrong.",
        "Write every rule with torch operators that are differentiable to this order.",
    ),
    Defect(
        "HD116",
        "the incoming gradient is taken for a constant",
        "backward detaches the incoming gradient, so only losses whose gradient varies show the error.",
        "Use the incoming gradient unchanged: `return g * slope`, not `g.detach() * slope`.",
    ),
    Defect(
        "HD117",
        "wrong rule of custom_jvp, custom_vjp or elementwise",
        "the rule does not compute the derivative or the value of its function: a sign, a factor or a term is wrong.",
        "Derive the formula again: a rule of the sine returns `f(x), torch.cos(x) * x_dot`.",
    ),
    Defect(
        "HD118",
        "digits cancel",
        "nearly equal numbers are subtracted at these inputs, so derivatives keep few digits by any rule.",
        "Rearrange the formula: `2 * torch.sin(x / 2) ** 2`, not `1 - torch.cos(x)`; or check at the inputs that you "
        "use.",
    ),
    Defect(
        "HD201",
        "a gradient of the wrong shape",
        "backward returns a gradient whose shape differs from the input's.",
        "Return the gradient in the input's shape: `g.reshape(x.shape)`.",
    ),
    Defect(
        "HD202",
        "a broadcast gradient is not reduced",
        "an input was broadcast in forward, and backward returns its gradient in the shape of the output.",
        "Sum over the broadcast dimensions: `g.sum_to_size(x.shape)`.",
    ),
    Defect(
        "HD203",
        "too few or too many gradients",
        "backward does not return one value for each argument of forward.",
        "Return None for an argument without a gradient: `return g_x, None`.",
    ),
    Defect(
        "HD204",
        "a gradient for what is no tensor",
        "backward returns a tensor for an argument that is a number, a string or None.",
        "Return None instead: `return g_x, None`.",
    ),
    Defect(
        "HD301",
        "the incoming gradient is changed in place",
        "backward or jvp writes into the gradient that it receives, which other code reads, too.",
        "Compute a new tensor: `g * 2`, not `g.mul_(2)`.",
    ),
    Defect(
        "HD302",
        "a saved tensor is changed in place",
        "backward or jvp writes into a saved tensor, so a second pass returns another result.",
        "Compute a new tensor: `x = x.exp()`, not `x.exp_()`.",
    ),
    Defect(
        "HD303",
        "an input is changed in place without mark_dirty",
        "forward writes into its input without `ctx.mark_dirty`.",
        "Call `ctx.mark_dirty(x)` in setup_context and return x, or write `x = x.clone()` first.",
        in_function=(
            "the function changes an input in place, outside of the graph (as an embedding with max_norm does), so "
            "values depend on the change and derivatives do not.",
            "Remove the in-place change, and change parameters between steps: use an embedding without max_norm, and "
            "rescale its rows under `torch.no_grad()`.",
        ),
    ),
    Defect(
        "HD304",
        "a tensor is kept as an attribute of ctx",
        "a tensor stored on ctx itself is not freed with the graph and not checked for changes, and its derivative is "
        "lost.",
        "Save the tensor: `ctx.save_for_backward(x)`.",
    ),
    Defect(
        "HD305",
        "backward is not deterministic",
        "two backward passes from the same graph differ.",
        "Draw random numbers in forward and save them: `ctx.save_for_backward(x, noise)`; store nothing on the class.",
    ),
    Defect(
        "HD306",
        "a buffer of a fixed dtype",
        "the function creates a float32 tensor for inputs of any dtype.",
        "Create the tensor like the input: `torch.zeros_like(x)` or `dtype=x.dtype`; for a module, call "
        "`module.double()`.",
    ),
    Defect(
        "HD307",
        "a buffer on a fixed device",
        "a tensor that the function creates or closes over is on a fixed device, for inputs on any device.",
        "Create the tensor like the input: `torch.zeros_like(x)` or `device=x.device`.",
        severity="warning",
    ),
    Defect(
        "HD308",
        "memory that was never written",
        "a result depends on the content of an uninitialised tensor.",
        "Initialise the tensor: `torch.zeros_like(x)`, not `torch.empty_like(x)`.",
    ),
    Defect(
        "HD309",
        "strides matter",
        "the result changes with the memory layout of equal inputs or incoming gradients.",
        "Read tensors through torch operators, or begin with `x = x.contiguous()`.",
    ),
    Defect(
        "HD310",
        "a result of an earlier call is kept",
        "a module computes a value from its parameters or inputs once and caches it, so later calls and derivatives "
        "ignore new parameters and inputs.",
        "Compute the value in each call, or clear the cache before: `self.cache = None`.",
    ),
    Defect(
        "HD401",
        "no jvp",
        "forward mode, and with it three of the four second-order routes, is missing.",
        "Add `@staticmethod def jvp(ctx, tangent)`, written with saved inputs (`ctx.save_for_forward(x)`) and torch "
        "operators.",
    ),
    Defect(
        "HD402",
        "wrong batching rule",
        "the result of vmap differs from that of a loop.",
        "Use each entry of in_dims (also None and negative ones), or set `generate_vmap_rule = True`.",
    ),
    Defect(
        "HD403",
        "no batching rule",
        "vmap raises an error, and so do Jacobians and Hessians of torch.func.",
        "Set `generate_vmap_rule = True` if all rules are torch operators, otherwise write `vmap`.",
    ),
    Defect(
        "HD404",
        "compiled code differs",
        "the result of torch.compile differs from that of eager code; torch.compile ignores a custom jvp.",
        "Use hodiff.authoring, which compiles, or keep the function out of graphs: `torch.compiler.disable(f)`.",
    ),
    Defect(
        "HD405",
        "forward takes ctx",
        "torch.func transforms need separate forward and setup_context.",
        "Split forward: `def forward(x)` and `def setup_context(ctx, inputs, output)`; and add a jvp, which forward "
        "mode needs.",
    ),
    Defect(
        "HD406",
        "an operator's derivative is missing or wrong",
        "a torch operator or torch.library.custom_op inside has no rule for this route, or a wrong one.",
        "Write the function with elementary operators, or add a rule by `hodiff.corrections.register`. hodiff's own "
        "rules are active in its transforms and within `hodiff.corrected()`.",
    ),
    Defect(
        "HD407",
        "data-dependent Python",
        "the function branches on values that a transform does not have, or writes such values in place.",
        "Use `torch.where` and out-of-place operations.",
    ),
    Defect(
        "HD408",
        "a rule raises",
        "a rule of the function raises an error when torch calls it.",
        "Fix the error that the message names.",
    ),
    Defect(
        "HD409",
        "empty tensors fail",
        "forward accepts a tensor with a dimension of 0, but a rule raises an error there or returns another shape.",
        "Name every size, `g.reshape(len(x), x.shape[1])`, not -1; a maximum needs a branch for `x.numel() == 0`.",
        severity="warning",
    ),
    Defect(
        "HD410",
        "wrong or missing by torch alone",
        "hodiff's transforms correct derivatives that are wrong or missing in torch.",
        "Compute derivatives by hodiff's transforms, or within `with hodiff.corrected():`.",
        severity="warning",
    ),
    Defect(
        "HD411",
        "a gradient taken inside",
        "the function calls torch.autograd.grad itself, which finds no graph if only forward mode differentiates.",
        "If you need only the reverse routes, change nothing; otherwise compute that gradient by `torch.func.grad`.",
        severity="warning",
    ),
    Defect(
        "HD412",
        "an operator of torch.library has no forward mode",
        "its tangent is silently zero, and torch.func raises an error for its reverse-mode rule.",
        "Call the operator by `hodiff.authoring.from_custom_op(op)`, which supports all routes by the same rule, or "
        "use the route reverse-over-reverse.",
    ),
    Defect(
        "HD501",
        "gradients that nobody needs",
        "backward computes gradients of arguments that do not require any.",
        "Test first: `g @ w if ctx.needs_input_grad[0] else None`.",
        severity="warning",
    ),
    Defect(
        "HD502",
        "more is saved than needed",
        "a saved tensor is not read by backward, or is larger than needed, or is a copy of a tensor that is kept "
        "anyway.",
        "Save only what backward reads: `ctx.save_for_backward(x)`.",
        severity="warning",
    ),
    Defect(
        "HD901",
        "not smooth here",
        "the point is a kink, a jump or the edge of the domain, where derivatives depend on the side.",
        "Check at another point, or state which derivative you mean.",
    ),
    Defect(
        "HD902",
        "derivatives of a surrogate",
        "the function declares derivatives that are not its own; the gap is measured and is not a defect.",
        "Do nothing: `approximate=True` declares the surrogate.",
        severity="note",
    ),
    Defect(
        "HD903",
        "the function is not deterministic",
        "two calls with the same inputs return different results.",
        "Call `module.eval()`, or pass random numbers as an input.",
    ),
)

CODES = {each.code: each for each in DEFECTS}
