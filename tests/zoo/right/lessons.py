"""The lessons that teach right Functions."""

import importlib.util
from pathlib import Path

from zoo.specimen import Right

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "functions"
# The file of a lesson, and what it checks
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
}


def _specimen(stem, name):
    spec = importlib.util.spec_from_file_location(f"lesson_{stem}", FOLDER / f"{stem}.py")
    lesson = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lesson)
    return Right(f"lesson.{stem}", getattr(lesson, name), lesson.INPUTS)


SPECIMENS = [_specimen(stem, name) for stem, name in LESSONS.items()]
