"""Adapters to other programs: curvature during training, derivatives, and back ends; each module imports its program.

`hodiff.doors.lightning` (PyTorch Lightning), `hodiff.doors.transformers` (Hugging Face Trainer),
`hodiff.doors.laplace` (laplace-torch), `hodiff.doors.gpytorch`, `hodiff.doors.linear_operator` and `hodiff.doors.pina`
are imported by their full names.
"""

from hodiff.doors.curvature_measurements import CurvatureRecord as CurvatureRecord
from hodiff.doors.curvature_monitor import CurvatureMonitor as CurvatureMonitor
