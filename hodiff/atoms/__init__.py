"""Second derivatives of the energies of atoms: Hessians, vibrations, elastic constants; doors to ASE and phonopy."""

from hodiff.atoms.elastic import ElasticConstants as ElasticConstants
from hodiff.atoms.elastic import elastic_constants as elastic_constants
from hodiff.atoms.forces import check_forces as check_forces
from hodiff.atoms.forces import forces as forces
from hodiff.atoms.gruneisen import Gruneisen as Gruneisen
from hodiff.atoms.gruneisen import gruneisen as gruneisen
from hodiff.atoms.hessian import hessian as hessian
from hodiff.atoms.hessian import hvp as hvp
from hodiff.atoms.sparse_hessian import sparse_hessian as sparse_hessian
from hodiff.atoms.vibrations import Vibrations as Vibrations
from hodiff.atoms.vibrations import vibrations as vibrations
