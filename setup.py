"""The fused CPU kernels, compiled where there is a C++ compiler; everything else stands in pyproject.toml."""

from setuptools import Extension, setup

setup(
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
    ]
)
