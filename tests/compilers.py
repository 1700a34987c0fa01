"""Whether this machine has a C++ compiler, which tests of the kernels and of the wheel need."""

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

TRIVIAL = """
extern "C" int count(int n) {
  int c = 0;
#pragma omp parallel for reduction(+ : c)
  for (int i = 0; i < n; ++i) c += 1;
  return c;
}
"""


def compiler_works(folder: Path) -> bool:
    """Whether the compiler that an installation would use can build a shared library with OpenMP."""
    (folder / "trivial.cpp").write_text(TRIVIAL)
    command = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")
    if shutil.which(command[0]) is None:
        return False
    options = ["-std=c++17", "-fopenmp", "-fPIC", "-shared", "trivial.cpp", "-o", "trivial.so"]
    return subprocess.run([*command, *options], cwd=folder, capture_output=True, check=False).returncode == 0
