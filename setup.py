"""The packages, and the fused CPU kernels where there is a C++ compiler; everything else stands in pyproject.toml."""

from setuptools import Extension, find_packages, setup

setup(
    # kernels/ stands at the top level and is installed inside hodiff.
    packages=[
        *find_packages(include=["hodiff", "hodiff.*"]),
        "hodiff.kernels",
        *(f"hodiff.kernels.{name}" for name in find_packages("kernels")),
    ],
    ext_modules=[
        Extension(
            "hodiff.kernels._fused",
            ["kernels/fused.cpp"],
            language="c++",
            # OpenMP is left unresolved, for torch to bring: a second copy would start threads of its own.
            extra_compile_args=[
                "-O3",
                "-std=c++17",
                "-fopenmp",
                "-fno-exceptions",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-ffp-contract=fast",
                "-fvisibility=hidden",
            ],
            # Without it hodiff computes the same from torch's operators.
            optional=True,
        )
    ],
)
