"""The wrong examples, read from the page of findings."""

from zoo.page import wrong_example
from zoo.specimen import Wrong

# Code of the section, and name of the specimen
NAMES = {
    "HD101": "factor_two",
    "HD102": "doubled_tangent",
    "HD103": "saved_slope",
    "HD104": "detached_input",
    "HD105": "ignored_cosh",
    "HD107": "once_differentiable",
    "HD108": "saved_tangent_slope",
    "HD111": "overflowing_softplus",
    "HD114": "plain_tangent",
    "HD115": "wrong_inner_gradient",
    "HD116": "detached_cotangent",
    "HD117": "wrong_sign_of_a_rule",
    "HD118": "cancelling_cosine",
    "HD201": "flat_gradient",
    "HD204": "gradient_of_exponent",
    "HD301": "scaled_in_place",
    "HD302": "saved_input_in_place",
    "HD304": "input_on_context",
    "HD305": "noise_in_backward",
    "HD306": "float_in_backward",
    "HD307": "host_buffer",
    "HD310": "kept_result",
    "HD401": "no_tangent",
    "HD403": "no_batching",
    "HD405": "context_in_forward",
    "HD407": "branches",
    "HD408": "backward_raises",
    "HD410": "gate",
    "HD411": "inner_gradient",
    "HD412": "operator_with_a_rule",
    "HD501": "both_gradients",
    "HD502": "unread_output",
    "HD901": "step",
    "HD903": "noisy",
}


def _specimen(code, name):
    function, inputs, options = wrong_example(code)
    return Wrong(name, function, inputs, (code,), options)


SPECIMENS = [_specimen(code, name) for code, name in NAMES.items()]
