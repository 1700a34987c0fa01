"""Rules for the supports of torch's operators, a file for each kind."""

from hodiff.sparse.detection.rules import contractions as contractions
from hodiff.sparse.detection.rules import elementwise as elementwise
from hodiff.sparse.detection.rules import movement as movement
from hodiff.sparse.detection.rules import reductions as reductions
from hodiff.sparse.detection.rules import sums as sums
from hodiff.sparse.detection.rules import windows as windows
