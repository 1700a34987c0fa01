"""A call of every function that has a correction, with all arguments; tests rewrite it in equivalent forms."""

import torch
import torch.nn.functional as F
from drawing import normals
from torch import nn
from torch.overrides import resolve_name

from hodiff.corrections.rules.special.polynomials import FAMILIES as POLYNOMIALS
from hodiff.torch_internals.autograd.grad_mode import set_recording
from hodiff.torch_internals.compilers.scripts import call_script
from hodiff.torch_internals.interception import torch_flex_attention
from hodiff.torch_internals.operators import (
    batch_norm_with_update,
    glu,
    grouped_mm,
    hardsigmoid,
    native_batch_norm,
    pack_padded_sequence,
    pad_packed_sequence,
    safe_softmax,
    weight_norm,
    weight_norm_kernel,
)

D = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
AFTER = torch.__version__ >= "2.14"

randn = normals(GENERATOR)

X, Y, VECTOR = randn(3, 4), randn(3, 4), randn(4)
SQUARE = randn(3, 3) + 3 * torch.eye(3, dtype=D)
SYMMETRIC = SQUARE @ SQUARE.mT
RIGHT = randn(3, 2)
IMAGE, GRID, VOLUME, POINTS = randn(2, 3, 5, 5), randn(2, 3, 3, 2) / 3, randn(1, 2, 3, 3, 3), randn(1, 2, 2, 2, 3) / 3
CHANNELS = randn(5, 3, 4)
SCALE, SHIFT = randn(3), randn(3)
INDICES, ROWS = torch.tensor([0, 2, 2, 1]), 5 * randn(4, 3)
PLACES = torch.tensor([[0, 1, 1, 0], [2, 2, 0, 0], [1, 1, 1, 1]])
TWICE = torch.tensor([0, 2, 2])
OVERLAPPING = PLACES.expand(5, 3, 4)
MASK = torch.rand(3, 4, generator=GENERATOR) > 0.5
MASKED = X * MASK
QUERY, KEY, VALUE = randn(1, 3, 2), randn(1, 4, 2), randn(1, 4, 2)
LABELS = torch.tensor([1, 0, 3])
SETS = torch.tensor([[1, 2, -1, 0], [3, -1, 0, 0], [0, 1, 2, 3]])
LOG_PROBS, TARGETS = randn(6, 2, 4).log_softmax(-1), torch.tensor([[1, 2], [3, 1]])
LENGTHS = torch.tensor([6, 5]), torch.tensor([2, 1])
RUNNING = torch.zeros(3, dtype=D), torch.ones(3, dtype=D)
WEIGHT = VECTOR.exp()
# Torch has no derivative with respect to these arguments.
NUMBERS = torch.rand((3, 4), generator=GENERATOR, dtype=D) * 2 + 0.3
LARGE = NUMBERS + 1
CONSTANTS = (*RUNNING, WEIGHT, NUMBERS, LARGE)


def network(kind):
    module = kind(2, 3, dtype=D)
    state = torch.zeros(1, 2, 3, dtype=D)
    hidden = (state, state) if kind is nn.LSTM else state
    parameters = [randn(*each.shape) for each in module.parameters()]
    return randn(4, 2, 2), hidden, parameters, True, 1, 0.0, True, False, False


# The function, its arguments with differentiated tensors first, and its keyword-only arguments
CALLS = [
    (torch.relu, (X,), {}),
    (F.celu, (X, 0.375, False), {}),
    *((f, (X, VECTOR[0]), {}) for f in (torch.fill_, torch.Tensor.fill_)),
    *((f, (X,), {}) for f in (torch.corrcoef, torch.Tensor.corrcoef)),
    *((f, (X, 0.375), {}) for f in (torch.celu, torch.celu_)),
    (torch.Tensor.relu, (X,), {}),
    (F.relu, (X, False), {}),
    (F.hardsigmoid, (X, False), {}),
    (hardsigmoid, (X,), {}),
    *((f, (X, 0.0), {}) for f in (F.softshrink, torch.hardshrink, torch.Tensor.hardshrink)),
    *((f, (X, VECTOR), {}) for f in (torch.prelu, torch.Tensor.prelu, F.prelu)),
    *((f, (X, 0.1, 0.3, False), {}) for f in (torch.rrelu, torch.rrelu_)),
    (F.rrelu, (X, 0.1, 0.3, False, False), {}),
    (F.glu, (X, 1), {}),
    (glu, (X, 1), {}),
    (F.scaled_dot_product_attention, (QUERY, KEY, VALUE, None, 0.0, False), {"scale": 1.0, "enable_gqa": False}),
    (safe_softmax, (X.masked_fill(MASK, -torch.inf), 1), {"dtype": D}),
    (F.conv1d, (IMAGE[0], randn(2, 5, 3), randn(2), 1, 0, 1, 1), {}),
    (F.conv2d, (IMAGE, randn(2, 3, 3, 3), randn(2), 1, 0, 1, 1), {}),
    (F.conv_transpose1d, (IMAGE[0], randn(5, 2, 3), randn(2), 2, 1, 1, 1, 1), {}),
    (F.conv_transpose2d, (IMAGE, randn(3, 2, 3, 3), randn(2), 2, 1, 1, 1, 1), {}),
    (F.conv_transpose3d, (VOLUME, randn(2, 1, 2, 2, 2), randn(1), 2, 1, 1, 1, 1), {}),
    *((f, (20 * X.abs() + 40,), {}) for f in (torch.sigmoid, torch.Tensor.sigmoid, torch.special.expit, F.sigmoid)),
    *((f, (20 * X.abs() + 40,), {}) for f in (torch.tanh, torch.Tensor.tanh, F.tanh, F.tanhshrink)),
    *((f, (20j * X.abs() + 40j,), {}) for f in (torch.tan, torch.Tensor.tan)),
    (F.logsigmoid, (20 * X.abs() + 40,), {}),
    *((f, (X,), {}) for f in (torch.expm1, torch.Tensor.expm1, torch.special.expm1, F.softsign)),
    *((f, (X,), {}) for f in (torch.asinh, torch.Tensor.asinh, torch.arcsinh, torch.Tensor.arcsinh)),
    *((f, (X.abs() + 1.5,), {}) for f in (torch.acosh, torch.Tensor.acosh, torch.arccosh, torch.Tensor.arccosh)),
    *((f, (X,), {}) for f in (torch.atan, torch.Tensor.atan, torch.arctan, torch.Tensor.arctan)),
    (F.multilabel_soft_margin_loss, (X, Y.sign(), None, None, None, "sum"), {}),
    (F.gelu, (X,), {"approximate": "tanh"}),
    (F.silu, (X, False), {}),
    (F.mish, (X, False), {}),
    (F.softplus, (20 * X.abs() + 40, 2.0, 1000.0), {}),
    *((f, (100 * X, 1), {"dtype": D}) for f in (torch.log_softmax, torch.Tensor.log_softmax)),
    *((f, (100 * X, 1), {"dtype": D}) for f in (torch.special.log_softmax, F.log_softmax)),
    *((f, (100 * X, 1), {"dtype": D}) for f in (torch.softmax, torch.Tensor.softmax)),
    *((f, (100 * X, 1), {"dtype": D}) for f in (torch.special.softmax, F.softmax)),
    *((f, (100 * X, 1, True), {}) for f in (torch.logsumexp, torch.Tensor.logsumexp, torch.special.logsumexp)),
    *((f, (X, Y), {}) for f in (torch.logaddexp2, torch.Tensor.logaddexp2)),
    (torch.logaddexp, (X, Y), {}),
    (torch.Tensor.logaddexp, (X, Y), {}),
    (torch.logcumsumexp, (X, 1), {}),
    (torch.Tensor.logcumsumexp, (X, 1), {}),
    *((f, (X, Y - 1, Y), {}) for f in (torch.clamp, torch.clip, torch.Tensor.clamp, torch.Tensor.clip)),
    *((f, (X, Y - 1, Y), {}) for f in (torch.clamp_, torch.clip_, torch.Tensor.clamp_, torch.Tensor.clip_)),
    *((f, (X, Y), {}) for f in (torch.clamp_min, torch.clamp_min_, torch.Tensor.clamp_min, torch.Tensor.clamp_min_)),
    *((f, (X, Y), {}) for f in (torch.clamp_max, torch.clamp_max_, torch.Tensor.clamp_max, torch.Tensor.clamp_max_)),
    *((f, (X, Y), {}) for f in (torch.fmax, torch.Tensor.fmax)),
    *((f, (X, Y), {}) for f in (torch.copysign, torch.Tensor.copysign, torch.Tensor.copysign_)),
    (torch.alias_copy, (X,), {}),
    (torch.as_strided_copy, (X, (2, 3), (1, 2), 0), {}),
    (torch.diagonal_copy, (X, 0, 0, 1), {}),
    (torch.expand_copy, (X, (2, 3, 4)), {"implicit": False}),
    (torch.permute_copy, (X, (1, 0)), {}),
    (torch.select_copy, (X, 0, 1), {}),
    (torch.slice_copy, (X, 0, 1, 3, 1), {}),
    (torch.split_copy, (X, 2, 1), {}),
    (torch.split_with_sizes_copy, (X, [1, 3], 1), {}),
    (torch.squeeze_copy, (X[None], 0), {}),
    (torch.t_copy, (X,), {}),
    (torch.transpose_copy, (X, 0, 1), {}),
    (torch.unbind_copy, (X, 1), {}),
    (torch.unfold_copy, (X, 1, 2, 2), {}),
    (torch.unsqueeze_copy, (X, 1), {}),
    (torch.view_copy, (X, (4, 3)), {}),
    (torch.view_as_real_copy, (torch.complex(X, Y),), {}),
    *((f, (X,), {}) for f in (torch.frac, torch.Tensor.frac)),
    *((f, (X, 0.75), {}) for f in (torch.fmod, torch.Tensor.fmod, torch.remainder, torch.Tensor.remainder)),
    (torch.ldexp, (X, PLACES), {}),
    (torch.Tensor.ldexp, (X, PLACES), {}),
    (torch.Tensor.ldexp_, (X, PLACES), {}),
    (torch.pow, (X.exp(), Y), {}),
    (torch.Tensor.pow, (X.exp(), Y), {}),
    (torch.Tensor.pow_, (X.exp(), Y), {}),
    (torch.float_power, (X.exp(), Y), {}),
    (torch.Tensor.float_power, (X.exp(), Y), {}),
    (torch.Tensor.float_power_, (X.exp(), Y), {}),
    *((f, (X, Y), {}) for f in (torch.atan2, torch.arctan2, torch.Tensor.atan2, torch.Tensor.arctan2)),
    *((f, (X, Y), {}) for f in (torch.Tensor.atan2_, torch.Tensor.arctan2_)),
    *((f, (X, Y), {}) for f in (torch.hypot, torch.Tensor.hypot, torch.Tensor.hypot_)),
    (torch.sinc, (X,), {}),
    (torch.Tensor.sinc, (X,), {}),
    (torch.special.sinc, (X,), {}),
    (torch.prod, (MASKED, 1, True), {"dtype": D}),
    (torch.Tensor.prod, (MASKED, 1, True), {"dtype": D}),
    (torch.linalg.vander, (VECTOR,), {"N": 3}),
    (torch.vander, (VECTOR, 3, True), {}),
    (torch.scatter_add, (X, 1, PLACES[:2], Y), {}),
    (torch.Tensor.scatter_add, (X, 1, PLACES[:2], Y), {}),
    (torch.Tensor.scatter_add_, (X, 1, PLACES[:2], Y), {}),
    (torch.scatter, (X, 0, PLACES[:1], Y), {}),
    (torch.Tensor.scatter, (X, 0, PLACES[:1], Y), {}),
    (torch.Tensor.scatter_, (X, 0, PLACES[:1], Y), {}),
    *((f, (X, 0, TWICE, Y), {}) for f in (torch.index_copy, torch.Tensor.index_copy, torch.Tensor.index_copy_)),
    *((f, (X, (TWICE,), Y, False), {}) for f in (torch.index_put, torch.Tensor.index_put, torch.Tensor.index_put_)),
    *((f, (X, PLACES, Y, False), {}) for f in (torch.put, torch.Tensor.put, torch.Tensor.put_)),
    *((f, (X, 0, TWICE, X[0, 0]), {}) for f in (torch.index_fill, torch.Tensor.index_fill, torch.Tensor.index_fill_)),
    *((f, (X[0], MASK), {}) for f in (torch.masked_select, torch.Tensor.masked_select)),
    (torch.masked_scatter, (X, MASK, Y), {}),
    (torch.Tensor.masked_scatter, (X, MASK, Y), {}),
    (torch.Tensor.masked_scatter_, (X, MASK, Y), {}),
    (torch.cholesky_solve, (RIGHT, SQUARE, True), {}),
    (torch.Tensor.cholesky_solve, (RIGHT, SQUARE, True), {}),
    (F.triplet_margin_with_distance_loss, (X, Y, X + Y), {"margin": 1.0, "swap": True, "reduction": "sum"}),
    (torch.rms_norm, (X, [4], VECTOR, 1.0), {}),
    (F.rms_norm, (X, [4], VECTOR, 1.0), {}),
    (torch.layer_norm, (X, [4], VECTOR, VECTOR + 1, 1.0, True), {}),
    (F.layer_norm, (X, [4], VECTOR, VECTOR + 1, 1.0), {}),
    (torch.native_layer_norm, (X, [4], VECTOR, VECTOR + 1, 1.0), {}),
    (F.group_norm, (CHANNELS, 3, SCALE, SHIFT, 1.0), {}),
    (torch.group_norm, (CHANNELS, 3, SCALE, SHIFT, 1.0, False), {}),
    (torch.native_group_norm, (CHANNELS, SCALE, SHIFT, 5, 3, 4, 3, 1.0), {}),
    (F.batch_norm, (CHANNELS, *RUNNING, SCALE, SHIFT, True, 1.0, 1.0), {}),
    (F.batch_norm, (CHANNELS, *RUNNING, SCALE, SHIFT, False, 1.0, 1.0), {}),
    (F.instance_norm, (CHANNELS, *RUNNING, SCALE, SHIFT, True, 1.0, 1.0), {}),
    (torch.Tensor.add_, (torch.tensor(3), 2), {"alpha": 1}),
    (torch.batch_norm, (CHANNELS, SCALE, SHIFT, *RUNNING, True, 1.0, 1.0, False), {}),
    (torch.instance_norm, (CHANNELS, SCALE, SHIFT, *RUNNING, True, 1.0, 1.0, False), {}),
    (torch.native_group_norm, (CHANNELS, SCALE, SHIFT, 5, 3, 4, 1, 1.0), {}),
    *((torch.linalg.lstsq, (X.mT, Y.mT, 1e-9), {"driver": driver}) for driver in ("gelsd", "gelss")),
    (torch.native_batch_norm, (CHANNELS, SCALE, SHIFT, *RUNNING, True, 1.0, 1.0), {}),
    (native_batch_norm, (CHANNELS, SCALE, SHIFT, *RUNNING, True, 1.0, 1.0), {}),
    (native_batch_norm, (CHANNELS, SCALE, SHIFT, True, 1.0, 1.0), {}),
    (batch_norm_with_update, (CHANNELS, SCALE, SHIFT, *RUNNING, 1.0, 1.0), {}),
    (torch.max_pool2d, (IMAGE, [2, 2], [1, 1], [0, 0], [1, 1], False), {}),
    (F.max_pool2d, (IMAGE, [2, 2], [1, 1], [0, 0], [1, 1], False, False), {}),
    (F.max_unpool1d, (X, PLACES, 1, 1, 0, [4]), {}),
    (F.max_unpool2d, (CHANNELS, OVERLAPPING, [1, 1], [1, 1], [0, 0], [3, 4]), {}),
    (F.max_unpool3d, (CHANNELS[None], OVERLAPPING[None], [1, 1, 1], [1, 1, 1], [0, 0, 0], [5, 3, 4]), {}),
    (torch.cdist, (X, Y, 3.0, "use_mm_for_euclid_dist_if_necessary"), {}),
    (torch.cdist, (X, Y, 2.0), {}),
    (F.pdist, (X, 3.0), {}),
    (torch.linalg.vector_norm, (X, 3.0, [1], True), {"dtype": D}),
    (torch.linalg.vector_norm, (X, 2.0, [0, 1], False), {"dtype": D}),
    (torch.norm, (X, 2.0, [1], True, None), {"dtype": D}),
    (torch.Tensor.norm, (X, 3.0, [1], True), {"dtype": D}),
    *((torch.ops.aten.norm.ScalarOpt_dim, (X, 3.0, [1], True), {}), (torch.ops.aten.norm.Scalar, (X, 2.0), {})),
    (torch.ops.aten.norm.ScalarOpt_dim_dtype, (X, 3.0, [1], True), {"dtype": D}),
    *((torch.ops.aten.norm.ScalarOpt_dtype, (X, 3.0), {"dtype": D}), (torch.ops.aten.norm, (X, 3.0), {})),
    (torch.linalg.norm, (X, "fro", [0, 1], True), {"dtype": D}),
    (torch.linalg.norm, (X, 2.0, 1, True), {"dtype": D}),
    (torch.linalg.matrix_norm, (X, "fro", [0, 1], True), {"dtype": D}),
    *((torch.dist, (X, Y, 3.0), {}), (torch.Tensor.dist, (X, Y, 2.0), {})),
    *((torch.pairwise_distance, (X, Y, 2.0, 0.5, True), {}), (F.pairwise_distance, (X, Y, 3.0, 0.5, True), {})),
    *((torch.cosine_similarity, (X, Y, 0, 0.5), {}), (F.cosine_similarity, (X, Y, 0, 0.5), {})),
    (F.normalize, (X, 3.0, 0, 0.5), {}),
    *((torch.renorm, (X, 2.0, 0, 0.5), {}), (torch.Tensor.renorm, (X, 3.0, 0, 0.5), {})),
    *((f, (X, []), {"correction": 2, "keepdim": True}) for f in (torch.var, torch.Tensor.var, torch.var_mean)),
    (torch.std, (X, [1]), {"correction": 2, "keepdim": True}),
    (torch.Tensor.std, (X, [1]), {"correction": 2, "keepdim": True}),
    (torch.std_mean, (X, [1]), {"correction": 2, "keepdim": True}),
    (torch.cumprod, (X, 1), {"dtype": D}),
    (torch.Tensor.cumprod, (X, 1), {"dtype": D}),
    (torch.Tensor.cumprod_, (X, 1), {"dtype": D}),
    (F.embedding_bag, (INDICES, ROWS, torch.tensor([0, 2]), None, 2.0, False, "sum", False, ROWS[:, 0], False, 1), {}),
    (torch.embedding_bag, (ROWS, INDICES, torch.tensor([0, 2]), False, 0, False, ROWS[:, 0], False, 1), {}),
    (F.embedding, (INDICES, ROWS, 1, None, 2.0, False, False), {}),
    (torch.embedding, (ROWS, INDICES, 1, False, False), {}),
    (torch.scatter_reduce, (X, 1, PLACES, Y, "prod"), {"include_self": True}),
    (torch.Tensor.scatter_reduce, (X, 1, PLACES, Y, "prod"), {"include_self": True}),
    (torch.Tensor.scatter_reduce_, (X, 1, PLACES, Y, "prod"), {"include_self": True}),
    (torch.index_reduce, (X, 0, torch.tensor([0, 2, 2]), Y, "prod"), {"include_self": True}),
    (torch.Tensor.index_reduce, (X, 0, torch.tensor([0, 2, 2]), Y, "prod"), {"include_self": True}),
    (torch.Tensor.index_reduce_, (X, 0, torch.tensor([0, 2, 2]), Y, "prod"), {"include_self": True}),
    (
        torch.segment_reduce,
        (X, "prod"),
        {"lengths": torch.tensor([1, 2]), "axis": 0, "unsafe": False, "initial": 1.0},
    ),
    (torch.segment_reduce, (X, "sum"), {"offsets": torch.tensor([0, 1, 3]), "axis": 0, "initial": 1.0}),
    (torch.tensor_split, (X, torch.tensor([1, 2]), 1), {}),
    (torch.Tensor.tensor_split, (X, torch.tensor([1, 2]), 1), {}),
    (torch.flip, (X, [0, 1]), {}),
    (torch.Tensor.flip, (X, [0, 1]), {}),
    (torch.roll, (X, 1, 0), {}),
    (torch.Tensor.roll, (X, 1, 0), {}),
    (torch.as_strided_scatter, (X, Y[0], [4], [3], 1), {}),
    (torch.Tensor.as_strided_scatter, (X, Y[0], [4], [3], 1), {}),
    (torch.det, (SQUARE,), {}),
    (torch.Tensor.det, (SQUARE,), {}),
    (torch.linalg.det, (SQUARE,), {}),
    (torch.linalg.slogdet, (SQUARE,), {}),
    (torch.slogdet, (SQUARE,), {}),
    (torch.Tensor.slogdet, (SQUARE,), {}),
    (torch.logdet, (SYMMETRIC,), {}),
    (torch.Tensor.logdet, (SYMMETRIC,), {}),
    (torch.linalg.pinv, (SYMMETRIC, 1e-15, True), {}),
    (torch.linalg.cholesky, (SYMMETRIC,), {"upper": True}),
    (torch.linalg.cholesky_ex, (SYMMETRIC,), {"upper": True, "check_errors": False}),
    (torch.linalg.eigh, (SYMMETRIC, "L"), {}),
    (torch.linalg.eig, (SYMMETRIC,), {}),
    (torch.linalg.eigvalsh, (SYMMETRIC, "L"), {}),
    (torch.linalg.eigvals, (SYMMETRIC,), {}),
    *((f, (SQUARE,), {}) for f in (torch.matrix_exp, torch.Tensor.matrix_exp, torch.linalg.matrix_exp)),
    *((each, (NUMBERS / 4, 0.2), {}) for each in (torch.logit, torch.Tensor.logit, torch.special.logit)),
    (torch.polar, (X, Y), {}),
    (F.nll_loss, (X, LABELS, WEIGHT + 0, None, 1, None, "sum"), {}),
    (F.binary_cross_entropy, (NUMBERS / 4, NUMBERS / 5, NUMBERS + 0, None, None, "sum"), {}),
    (torch.linspace, (X[0, 0], X[1, 1], 4), {"dtype": D}),
    (torch.logspace, (X[0, 0], X[1, 1], 4, 2.0), {"dtype": D}),
    (F.poisson_nll_loss, (X, NUMBERS, True, True, None, 0.1, None, "sum"), {}),
    (torch.poisson_nll_loss, (X, NUMBERS, True, True, 0.1, 1), {}),
    (F.gaussian_nll_loss, (X, Y, NUMBERS, True, 0.9, "sum"), {}),
    (F.cosine_embedding_loss, (X, Y, PLACES[:, 0] - 1, 0.1, None, None, "sum"), {}),
    (torch.cosine_embedding_loss, (X, Y, PLACES[:, 0] - 1, 0.1, 1), {}),
    (F.triplet_margin_loss, (X, Y, X.flip(0), 2.0, 2.0, 0.1, True, None, None, "sum"), {}),
    (torch.triplet_margin_loss, (X, Y, X.flip(0), 2.0, 2.0, 0.1, False, 1), {}),
    (torch.linalg.householder_product, (SQUARE, SCALE), {}),
    (torch.orgqr, (SQUARE, SCALE), {}),
    (torch.Tensor.orgqr, (SQUARE, SCALE), {}),
    (torch.ormqr, (SQUARE, SCALE, RIGHT, True, False), {}),
    (torch.Tensor.ormqr, (SQUARE, SCALE, RIGHT, True, False), {}),
    (torch.linalg.solve, (SQUARE, RIGHT), {"left": True}),
    (torch.linalg.solve_ex, (SQUARE, RIGHT), {"left": True, "check_errors": False}),
    (torch.linalg.tensorsolve, (SQUARE, SCALE, [1]), {}),
    (torch.triangular_solve, (RIGHT, SQUARE, True, False, False), {}),
    (torch.Tensor.triangular_solve, (RIGHT, SQUARE, True, False, False), {}),
    (torch.cholesky_inverse, (SQUARE, True), {}),
    (torch.Tensor.cholesky_inverse, (SQUARE, True), {}),
    (F.mse_loss, (X, Y, None, None, "sum"), {}),
    (F.smooth_l1_loss, (X, PLACES, None, None, "sum", 0.5), {}),
    (F.binary_cross_entropy_with_logits, (X, Y.sigmoid(), WEIGHT, None, None, "sum", WEIGHT), {}),
    (F.cross_entropy, (X, LABELS, None, None, 0, None, "sum", 0.0), {}),
    (F.ctc_loss, (LOG_PROBS, TARGETS, *LENGTHS, 0, "sum", False), {}),
    (F.ctc_loss, (LOG_PROBS, TARGETS, [6, 5], [2, 1], 0, "sum", False), {}),
    (torch.ctc_loss, (LOG_PROBS, TARGETS, *LENGTHS, 0, 2, False), {}),
    (F.huber_loss, (X, Y, "sum", 1.0, None), {}),
    (F.soft_margin_loss, (X, Y.sign(), None, None, "sum"), {}),
    (F.multi_margin_loss, (X, LABELS, 1, 1.0, WEIGHT, None, None, "sum"), {}),
    (F.multilabel_margin_loss, (X, SETS, None, None, "sum"), {}),
    (torch.lstm, network(nn.LSTM), {}),
    (torch.gru, network(nn.GRU), {}),
    (torch.rnn_tanh, network(nn.RNN), {}),
    (torch.rnn_relu, network(nn.RNN), {}),
    (pack_padded_sequence, (CHANNELS, torch.tensor([5, 4, 4]), False), {}),
    (pad_packed_sequence, (ROWS, torch.tensor([2, 1, 1]), False, 1.0, 0), {}),
    (torch.ops.aten.native_dropout_backward, (X, MASK, 2.0), {}),
    (torch.ops.aten.native_dropout_backward.default, (X, MASK, 2.0), {}),
    (F.grid_sample, (IMAGE, GRID, "bilinear", "zeros", True), {}),
    (torch.grid_sampler, (IMAGE, GRID, 0, 0, True), {}),
    (torch.grid_sampler_2d, (IMAGE, GRID, 0, 0, True), {}),
    (torch.grid_sampler_3d, (VOLUME, POINTS, 0, 0, True), {}),
    (F.affine_grid, (randn(2, 2, 3), [2, 3, 4, 5], True), {}),
]

if not AFTER:
    CALLS += [(torch.cholesky, (SYMMETRIC, False), {}), (torch.Tensor.cholesky, (SYMMETRIC, False), {})]

OF_ONE = (
    "airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 erfcx i0 i0e i1 i1e log_ndtr modified_bessel_i0 "
    "modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 "
    "scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0"
)
CALLS += [(getattr(torch.special, name), (NUMBERS + 0,), {}) for name in OF_ONE.split()]
CALLS += [(f, (NUMBERS + 0,), {}) for f in (torch.lgamma, torch.Tensor.lgamma, torch.special.gammaln)]
CALLS += [
    (f, (NUMBERS + 0,), {}) for f in (torch.digamma, torch.Tensor.digamma, torch.special.digamma, torch.special.psi)
]
CALLS += [(torch.i0, (NUMBERS + 0,), {}), (torch.Tensor.i0, (NUMBERS + 0,), {})]
CALLS += [
    (each, (NUMBERS, NUMBERS + 1), {})
    for each in (
        torch.special.gammainc,
        torch.igamma,
        torch.Tensor.igamma,
        torch.special.gammaincc,
        torch.igammac,
        torch.Tensor.igammac,
    )
]
CALLS += [(f, (NUMBERS + 1, 2), {}) for f in (torch.mvlgamma, torch.Tensor.mvlgamma, torch.special.multigammaln)]
CALLS += [(torch.special.zeta, (LARGE, NUMBERS + 0), {})]
CALLS += [(getattr(torch.special, name), (NUMBERS + 0, 3), {}) for name in POLYNOMIALS]
CALLS += [
    (weight_norm, (X, SCALE[:, None], 0), {}),
    (weight_norm_kernel, (X, SCALE[:, None], 0), {}),
    (torch.norm_except_dim, (X, 2, 0), {}),
]

CALLS += [(f, (X,), {}) for f in (torch.abs, torch.absolute, torch.Tensor.abs, torch.Tensor.absolute)]
CALLS += [(f, (X.exp(),), {}) for f in (torch.sqrt, torch.Tensor.sqrt)]
CALLS += [
    (pool, (torch.rand(1, 2, *[4] * n, dtype=D) + 1, 2.0, 2), {})
    for n, pool in enumerate((F.lp_pool1d, F.lp_pool2d, F.lp_pool3d), 1)
]
CALLS += [(F.softmin, (X,), {"dim": -1}), (F.l1_loss, (X, Y), {"reduction": "none"}), (torch.rsub, (X, 2.0), {})]

# Random functions, functions with a given gradient, and functions whose calling forms have separate tests
ELSEWHERE = {
    torch.native_dropout,
    F.dropout,
    torch.dropout,
    F.alpha_dropout,
    F.gumbel_softmax,
    torch.alpha_dropout,
    F.feature_alpha_dropout,
    torch.feature_alpha_dropout,
    torch.autograd.grad,
    torch.Tensor.backward,
    F.multi_head_attention_forward,
    grouped_mm,
    torch_flex_attention,
    getattr(F, "linear_cross_entropy", None),
    call_script,
    torch.pca_lowrank,
    set_recording,
    torch.Tensor.__rpow__,
    torch.ops.aten.add.Scalar,
    torch.ops.aten.sub.Scalar,
    torch.ops.aten.rsub.Scalar,
}
# Sparse tensors, lists of tensors, and functions of functions have separate tests.
FAMILIES_ELSEWHERE = (
    "torch._foreach_",
    "torch.sparse",
    "torch.Tensor.",
    "torch.cond",
    "torch.ops.higher_order.",
    "torch.autograd.Function",
)


def name_of(function):
    """Name of a function that is equal in every process, unlike its repr."""
    return resolve_name(function) or function.__name__
