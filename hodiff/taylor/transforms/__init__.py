"""`torch.func` transforms inside of a function of jets, applied to the tensors of the jets."""

from hodiff.taylor.running import is_running
from hodiff.taylor.transforms import control_flow
from hodiff.taylor.transforms.pullbacks import grad_and_value, vjp
from hodiff.taylor.transforms.pushforwards import jvp
from hodiff.taylor.transforms.vmap import swap_member, vmap
from hodiff.torch_internals.autograd.func_calls import (
    look_at_arguments_of_functional,
    look_at_trees_of_scan,
    stand_in_front,
    stand_in_front_of_control_flow,
)

stand_in_front(
    is_running,
    {"vmap": vmap, "jvp": jvp, "vjp": vjp, "grad_and_value": grad_and_value, "swap_member": swap_member},
)
stand_in_front_of_control_flow(
    is_running,
    {
        "cond": control_flow.cond,
        "while_loop": control_flow.while_loop,
        "scan": control_flow.scan,
        "associative_scan": control_flow.associative_scan,
        "map": control_flow.map,
        "linearize": control_flow.linearize,
    },
)
look_at_arguments_of_functional(control_flow.refuse_jets)
look_at_trees_of_scan(control_flow.refuse_jets)
