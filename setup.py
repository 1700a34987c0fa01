"""The fused CPU kernels, where there is a C++ compiler; everything else stands in pyproject.toml."""

import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Through the link, since an sdist has the folder itself in its place.
KERNELS = "hodiff/kernels"
BUILD = runpy.run_path(f"{KERNELS}/fused_build.py")
flaw, record_of, write_record, flags_of = (BUILD[name] for name in ("flaw", "record_of", "write_record", "flags_of"))


class BuildWithRecord(build_ext):
    """Writes beside the library what it was built from, which hodiff compares before it loads one."""

    def build_extension(self, ext: Extension) -> None:
        """Build from today's sources, even where an older library has a later date."""
        library = Path(self.get_ext_fullpath(ext.name))
        if flaw(library):
            library.unlink(missing_ok=True)
        ext.extra_compile_args = flags_of(getattr(self.compiler, "compiler_so_cxx", ()))
        super().build_extension(ext)
        write_record(library)

    def copy_extensions_to_source(self) -> None:
        """For an editable install, the record goes where the library goes."""
        super().copy_extensions_to_source()
        for built, beside_source in self._records().items():
            if Path(built).exists():
                self.copy_file(built, beside_source, level=self.verbose)

    def get_outputs(self) -> list[str]:
        """The libraries and their records."""
        if self.inplace:
            return list(self.get_output_mapping())
        libraries = super().get_outputs()
        return [*libraries, *(str(record_of(Path(library))) for library in libraries)]

    def get_output_mapping(self) -> dict[str, str]:
        """Where each of them goes in an editable install."""
        return {**super().get_output_mapping(), **self._records()}

    def _records(self) -> dict[str, str]:
        libraries = super().get_output_mapping()
        return {str(record_of(Path(built))): str(record_of(Path(goal))) for built, goal in libraries.items()}


setup(
    cmdclass={"build_ext": BuildWithRecord},
    ext_modules=[
        Extension(
            "hodiff.kernels._fused",
            [f"{KERNELS}/{name}" for name in BUILD["SOURCES"] if name.endswith(".cpp")],
            depends=[f"{KERNELS}/{name}" for name in ("fused_build.py", *BUILD["SOURCES"])],
            language="c++",
            # Without it hodiff computes the same from torch's operators.
            optional=True,
        )
    ],
)
