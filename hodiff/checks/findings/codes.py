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
        "backward computes something else than the derivative: a sign, a factor, a term or a transpose.",
        "Derive the formula again and compare the elements listed; that of x² is `g * 2 * x`, not `g * x`.",
        in_function=(
            "a hook on a tensor changes the gradient that passes it, which is no derivative of the values any more.",
            "Remove the hook, or say what is meant by a Function of its own: `hodiff.straight_through`.",
        ),
    ),
    Defect(
        "HD102",
        "wrong tangent",
        "jvp computes something else than the derivative, while backward is right.",
        "Make jvp the transpose of backward: where that returns `g * slope`, `return tangent * slope`.",
    ),
    Defect(
        "HD103",
        "an intermediate of forward is a constant at second order",
        "backward reads a tensor that forward computed and that is neither input nor output, so that its dependence "
        "on the inputs is lost.",
        "Recompute it in backward from `ctx.saved_tensors`, or return it as an output and add its incoming gradient.",
    ),
    Defect(
        "HD104",
        "the graph is cut",
        "backward detaches what it differentiates with: .data, .detach(), .item() or torch.no_grad().",
        "Remove it: write the slope in torch operators on what `ctx.saved_tensors` holds, `return g * slope(x)`; of a "
        "solver, differentiate its steps: `torchdiffeq.odeint`, not `odeint_adjoint`.",
        in_function=(
            "what is differentiated is taken out of the graph: .data, .detach(), .item(), torch.no_grad(), "
            "nn.Parameter, or a branch on requires_grad.",
            "Remove it, or leave what it cuts off out of what is differentiated.",
        ),
    ),
    Defect(
        "HD105",
        "the gradient of an auxiliary output is ignored",
        "an output that exists for backward's sake depends on the inputs, and backward ignores what comes in for it.",
        "Add it: `def backward(ctx, g, g_aux): return g * aux + g_aux * d_aux`.",
    ),
    Defect(
        "HD106",
        "a kernel loses the derivative",
        "backward calls NumPy, Triton, C++ or another thing that autograd cannot see into.",
        "Make that call a Function of its own, with backward and jvp: `return Kernel.apply(g, x)`.",
        in_function=(
            "the function calls NumPy, Triton, C++ or another thing that autograd cannot see into.",
            "Make that call a Function, with backward and jvp, or wrap it by `hodiff.functions.numpy_function`.",
        ),
    ),
    Defect(
        "HD107",
        "once_differentiable",
        "the mark makes the gradient a constant, in silence where the incoming gradient is one.",
        "Remove `@once_differentiable` and write backward with torch operators or other Functions.",
    ),
    Defect(
        "HD108",
        "the tangent's slope is a constant",
        "jvp multiplies the tangent by something that is not computed from the inputs in jvp, so that "
        "reverse-over-forward sees a constant.",
        "Save the inputs, `ctx.save_for_forward(x)`, and compute the slope in jvp: `return tangent * slope(x)`.",
    ),
    Defect(
        "HD109",
        "the gradient goes through unchanged",
        "backward returns the incoming gradient as it is, though the function is not the identity.",
        "Multiply by the derivative, or declare the surrogate: `hodiff.straight_through(forward, surrogate)`.",
    ),
    Defect(
        "HD110",
        "a mask is ignored",
        "the gradient passes where the function does not depend on its input.",
        "Save the mask and apply it: `return g * mask`.",
    ),
    Defect(
        "HD111",
        "unstable at large arguments",
        "the formula is right for small arguments, and loses its digits or overflows for large ones.",
        "Rearrange it: `torch.nn.functional.logsigmoid(x)`, not `torch.log(torch.sigmoid(x))`.",
        severity="warning",
    ),
    Defect(
        "HD112",
        "NaN or infinity at an edge",
        "a derivative is not finite where the function's own is, often 0 * inf in a branch that is not taken.",
        "Make the argument safe before the operation: `torch.where(x > 0, x, 1).log()`.",
    ),
    Defect(
        "HD113",
        "imprecise in low precision",
        "the derivative is right in float64, and loses more than half of its digits in the inputs' own dtype.",
        "Rearrange the formula against cancellation, or compute it in a wider dtype: `x.float()`.",
    ),
    Defect(
        "HD114",
        "forward mode does not nest",
        "torch alone runs jvp with forward mode off, so that an outer forward pass sees constants in it.",
        "Take such derivatives by hodiff's transforms or within `hodiff.corrected()`, which mend it, or put "
        "`@hodiff.functions.nestable_jvp` under `@staticmethod` of jvp.",
    ),
    Defect(
        "HD115",
        "wrong from some order on",
        "a rule is right to a lower order and made of something whose own derivative is wrong.",
        "Write every rule with torch operators that are themselves differentiable to this order.",
    ),
    Defect(
        "HD116",
        "the incoming gradient is taken for a constant",
        "backward detaches the incoming gradient, so that only losses whose gradient varies show it.",
        "Use it as it comes: `return g * slope`, not `g.detach() * slope`.",
    ),
    Defect(
        "HD117",
        "wrong rule of custom_jvp or custom_vjp",
        "the rule computes something else than the derivative of its function: a sign, a factor or a term.",
        "Derive the formula again: a rule of the sine returns `f(x), torch.cos(x) * x_dot`.",
    ),
    Defect(
        "HD118",
        "digits cancel",
        "numbers that are nearly equal are subtracted at these inputs, so that derivatives keep few of their digits, "
        "whatever rule computes them.",
        "Rearrange the formula: `2 * torch.sin(x / 2) ** 2`, not `1 - torch.cos(x)`; or check where it is used.",
    ),
    Defect(
        "HD201",
        "a gradient of the wrong shape",
        "backward returns a gradient whose shape is not that of the input.",
        "Return it in the input's shape: `g.reshape(x.shape)`.",
    ),
    Defect(
        "HD202",
        "a broadcast gradient is not reduced",
        "an input was broadcast in forward, and backward returns its gradient in the shape of the output.",
        "Sum over what was broadcast: `g.sum_to_size(x.shape)`.",
    ),
    Defect(
        "HD203",
        "too few or too many gradients",
        "backward must return one value for each argument of forward.",
        "Return None for what has no gradient: `return g_x, None`.",
    ),
    Defect(
        "HD204",
        "a gradient for what is no tensor",
        "backward returns a tensor for an argument that is a number, a string or None.",
        "Return None in its place: `return g_x, None`.",
    ),
    Defect(
        "HD301",
        "the incoming gradient is changed in place",
        "backward or jvp writes into the gradient it was given, which others read, too.",
        "Compute a new tensor: `g * 2`, not `g.mul_(2)`.",
    ),
    Defect(
        "HD302",
        "a saved tensor is changed in place",
        "backward or jvp writes into a saved tensor, so that a second pass gives another result.",
        "Compute a new tensor: `x = x.exp()`, not `x.exp_()`.",
    ),
    Defect(
        "HD303",
        "an input is changed in place without mark_dirty",
        "forward writes into its input and does not say so.",
        "Call `ctx.mark_dirty(x)` in setup_context and return x, or write `x = x.clone()` first.",
        in_function=(
            "the function changes what is differentiated in place and out of the graph, as an embedding with max_norm "
            "does, so that values follow the change and derivatives do not.",
            "Leave it out, and change parameters between steps: an embedding without max_norm, whose rows are rescaled "
            "under `torch.no_grad()`.",
        ),
    ),
    Defect(
        "HD304",
        "a tensor is kept as an attribute of ctx",
        "what is stored on ctx itself is not freed with the graph and not checked for changes, and its derivative "
        "is lost.",
        "Save it: `ctx.save_for_backward(x)`.",
    ),
    Defect(
        "HD305",
        "backward is not deterministic",
        "two backward passes from the same graph differ.",
        "Draw random numbers in forward and save them: `ctx.save_for_backward(x, noise)`; keep nothing on the class.",
    ),
    Defect(
        "HD306",
        "a buffer of a fixed dtype",
        "a tensor made inside is float32 whatever the inputs are.",
        "Make it like the input: `torch.zeros_like(x)` or `dtype=x.dtype`; a module: `module.double()`.",
    ),
    Defect(
        "HD307",
        "a buffer on a fixed device",
        "a tensor made inside, or closed over, is on one device whatever the inputs are.",
        "Make it like the input: `torch.zeros_like(x)` or `device=x.device`.",
        severity="warning",
    ),
    Defect(
        "HD308",
        "memory that was never written",
        "a result depends on what an uninitialised tensor happened to hold.",
        "Fill it: `torch.zeros_like(x)`, not `torch.empty_like(x)`.",
    ),
    Defect(
        "HD309",
        "strides matter",
        "the result changes with the memory layout of equal inputs or incoming gradients.",
        "Read through torch operators, or begin with `x = x.contiguous()`.",
    ),
    Defect(
        "HD310",
        "a result of an earlier call is kept",
        "a module computes something of its parameters or inputs once and keeps it, so that neither later calls nor "
        "derivatives follow them.",
        "Compute it in each call, or forget it before: `self.cache = None`.",
    ),
    Defect(
        "HD401",
        "no jvp",
        "forward mode, and with it three of the four second-order routes, is missing.",
        "Add `@staticmethod def jvp(ctx, tangent)` of saved inputs (`ctx.save_for_forward(x)`) and torch operators.",
    ),
    Defect(
        "HD402",
        "wrong batching rule",
        "vmap gives something else than a loop.",
        "Honour each entry of in_dims (None and negative ones, too), or set `generate_vmap_rule = True`.",
    ),
    Defect(
        "HD403",
        "no batching rule",
        "vmap, and with it Jacobians and Hessians of torch.func, raises.",
        "Set `generate_vmap_rule = True` if all rules are torch operators, else write `vmap`.",
    ),
    Defect(
        "HD404",
        "compiled code differs",
        "torch.compile gives something else than eager code; it ignores a custom jvp.",
        "Build on hodiff.authoring, which compiles, or keep it out of graphs: `torch.compiler.disable(f)`.",
    ),
    Defect(
        "HD405",
        "forward takes ctx",
        "torch.func transforms need forward and setup_context apart.",
        "Split it: `def forward(x)` and `def setup_context(ctx, inputs, output)`; and add a jvp, which forward mode "
        "needs.",
    ),
    Defect(
        "HD406",
        "an operator's derivative is missing or wrong",
        "a torch operator or torch.library.custom_op inside has no rule for this route, or a wrong one.",
        "Write it in elementary operators, or enter a rule by `hodiff.corrections.register`; those of hodiff are in "
        "force in its transforms and within `hodiff.corrected()`.",
    ),
    Defect(
        "HD407",
        "data-dependent Python",
        "the function branches on, or writes in place, values that a transform does not have.",
        "Use `torch.where` and out-of-place operations.",
    ),
    Defect(
        "HD408",
        "a rule raises",
        "a rule of the function raises where it is needed.",
        "Mend what the message says.",
    ),
    Defect(
        "HD409",
        "empty tensors fail",
        "forward accepts a tensor with a dimension of 0, and a rule raises there or returns another shape.",
        "Name every size, `g.reshape(len(x), x.shape[1])`, not -1; a maximum needs a branch for `x.numel() == 0`.",
        severity="warning",
    ),
    Defect(
        "HD410",
        "wrong or missing by torch alone",
        "hodiff's transforms mend what torch's own derivatives lack here.",
        "Take derivatives by hodiff's transforms, or within `with hodiff.corrected():`.",
        severity="warning",
    ),
    Defect(
        "HD411",
        "a gradient taken inside",
        "the function calls torch.autograd.grad itself, which finds no graph where forward mode alone differentiates.",
        "Nothing, if the reverse routes are enough; else take that gradient by `torch.func.grad`.",
        severity="warning",
    ),
    Defect(
        "HD412",
        "an operator of torch.library has no forward mode",
        "its tangent is zero, in silence, and torch.func refuses its rule for reverse mode.",
        "Call it by `hodiff.authoring.from_custom_op(op)`, which gives it all routes by the same rule, or take the "
        "route reverse-over-reverse.",
    ),
    Defect(
        "HD501",
        "gradients that nobody needs",
        "backward computes gradients of arguments that require none.",
        "Ask first: `g @ w if ctx.needs_input_grad[0] else None`.",
        severity="warning",
    ),
    Defect(
        "HD502",
        "more is saved than needed",
        "a saved tensor is not read by backward, or a smaller one would do, or it is a copy of what is kept anyway.",
        "Save what backward reads: `ctx.save_for_backward(x)`.",
        severity="warning",
    ),
    Defect(
        "HD901",
        "not smooth here",
        "the point is a kink, a jump or the edge of the domain, where derivatives depend on the side.",
        "Check at another point, or state which derivative is meant.",
    ),
    Defect(
        "HD902",
        "derivatives of a surrogate",
        "the function declares derivatives that are not its own; the gap is measured and no defect.",
        "Nothing to do: `approximate=True` says so.",
        severity="note",
    ),
    Defect(
        "HD903",
        "the function is not deterministic",
        "two calls with the same inputs differ.",
        "Call `module.eval()`, or pass random numbers as an input.",
    ),
)

CODES = {each.code: each for each in DEFECTS}
