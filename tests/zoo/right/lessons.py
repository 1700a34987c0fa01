"""Right Functions from the lessons."""

import lesson_tools
from zoo.specimen import Right

# File of a lesson, and the function that it checks
LESSONS = {
    "01_square": "Square",
    "02_cube": "Cube",
    "03_exp": "Exp",
    "04_sinh": "sinh",
    "05_two_outputs": "SquaresAndProduct",
    "06_sigmoid": "Sigmoid",
    "07_tanh": "Tanh",
    "08_relu": "Relu",
    "09_matmul": "MatMul",
    "10_bias_add": "BiasAdd",
    "11_broadcasting": "Multiply",
    "12_linear": "Linear",
    "13_sum": "Sum",
    "14_mean": "Mean",
    "15_max": "Max",
    "16_conv1d": "Conv1d",
    "17_non_tensor_arguments": "Power",
    "18_optional_bias": "with_and_without",
    "19_attention": "Attention",
    "27_legacy_functions": "Hypotenuse",
    "29_gumbel_softmax": "PerturbedSoftmax",
    "31_masks_and_memory": "leaky_relu",
    "32_logsumexp": "LogSumExp",
    "33_swish": "Swish",
    "36_in_place": "leaky_relu",
    "37_dim_and_keepdim": "root_mean_square",
    "38_stride_and_padding": "Conv1d",
}


def _specimen(stem, name):
    lesson = lesson_tools.load(lesson_tools.LESSONS[stem])
    return Right(f"lesson.{stem}", getattr(lesson, name), lesson.INPUTS)


SPECIMENS = [_specimen(stem, name) for stem, name in LESSONS.items()]
