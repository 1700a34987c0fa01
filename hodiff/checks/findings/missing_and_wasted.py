"""Defects HD4xx (missing rules) and HD5xx (waste)."""

from __future__ import annotations

from hodiff.checks.findings.defect import Defect

MISSING = (
    Defect(
        "HD401",
        "error",
        "no jvp",
        "forward mode, and with it three of the four second-order routes, is missing.",
        "Add `@staticmethod def jvp(ctx, tangent)` of saved inputs (`ctx.save_for_forward(x)`) and torch operators.",
    ),
    Defect(
        "HD402",
        "error",
        "wrong batching rule",
        "vmap gives something else than a loop.",
        "Honour each entry of in_dims (None and negative ones, too), or set `generate_vmap_rule = True`.",
    ),
    Defect(
        "HD403",
        "error",
        "no batching rule",
        "vmap, and with it Jacobians and Hessians of torch.func, raises.",
        "Set `generate_vmap_rule = True` if all rules are torch operators, else write `vmap`.",
    ),
    Defect(
        "HD404",
        "error",
        "compiled code differs",
        "torch.compile gives something else than eager code; it ignores a custom jvp.",
        "Build on hodiff.authoring, which compiles, or keep it out of graphs: `torch.compiler.disable(f)`.",
    ),
    Defect(
        "HD405",
        "error",
        "forward takes ctx",
        "torch.func transforms need forward and setup_context apart.",
        "Split it: `def forward(x)` and `def setup_context(ctx, inputs, output)`; and add a jvp, which forward mode "
        "needs.",
    ),
    Defect(
        "HD406",
        "error",
        "an operator's derivative is missing or wrong",
        "a torch operator or torch.library.custom_op inside has no rule for this route, or a wrong one.",
        "Write it in elementary operators, or enter a rule by `hodiff.corrections.register`; those of hodiff are in "
        "force in its transforms and within `hodiff.corrected()`.",
    ),
    Defect(
        "HD407",
        "error",
        "data-dependent Python",
        "the function branches on, or writes in place, values that a transform does not have.",
        "Use `torch.where` and out-of-place operations.",
    ),
    Defect(
        "HD408",
        "error",
        "a rule raises",
        "a rule of the function raises where it is needed.",
        "Mend what the message says.",
    ),
    Defect(
        "HD409",
        "warning",
        "empty tensors fail",
        "forward accepts a tensor with a dimension of 0, and a rule raises there or returns another shape.",
        "Name every size, `g.reshape(len(x), x.shape[1])`, not -1; a maximum needs a branch for `x.numel() == 0`.",
    ),
    Defect(
        "HD410",
        "warning",
        "wrong or missing by torch alone",
        "hodiff's transforms mend what torch's own derivatives lack here.",
        "Take derivatives by hodiff's transforms, or within `with hodiff.corrected():`.",
    ),
    Defect(
        "HD411",
        "warning",
        "a gradient taken inside",
        "the function calls torch.autograd.grad itself, which finds no graph where forward mode alone differentiates.",
        "Nothing, if the reverse routes are enough; else take that gradient by `torch.func.grad`.",
    ),
    Defect(
        "HD412",
        "error",
        "an operator of torch.library has no forward mode",
        "its tangent is zero, in silence, and torch.func refuses its rule for reverse mode.",
        "Call it by `hodiff.authoring.from_custom_op(op)`, which gives it all routes by the same rule, or take the "
        "route reverse-over-reverse.",
    ),
)

WASTE = (
    Defect(
        "HD501",
        "warning",
        "gradients that nobody needs",
        "backward computes gradients of arguments that require none.",
        "Ask first: `g @ w if ctx.needs_input_grad[0] else None`.",
    ),
    Defect(
        "HD502",
        "warning",
        "more is saved than needed",
        "a saved tensor is not read by backward, or a smaller one would do, or it is a copy of what is kept anyway.",
        "Save what backward reads: `ctx.save_for_backward(x)`.",
    ),
)
