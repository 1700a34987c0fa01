"""Differentiable inner loops: functional optimizers, adaptation, meta-learners and hypergradients."""

from hodiff.meta.adam import Adam as Adam
from hodiff.meta.adam import Adamax as Adamax
from hodiff.meta.adam import AdamW as AdamW
from hodiff.meta.adam import NAdam as NAdam
from hodiff.meta.adaptation import Adaptation as Adaptation
from hodiff.meta.adaptation import adapt as adapt
from hodiff.meta.adaptive import Adadelta as Adadelta
from hodiff.meta.adaptive import Adagrad as Adagrad
from hodiff.meta.adaptive import RMSprop as RMSprop
from hodiff.meta.from_torch import from_torch as from_torch
from hodiff.meta.hypergradient import Hypergradient as Hypergradient
from hodiff.meta.hypergradient import hypergradient as hypergradient
from hodiff.meta.imaml import IMAML as IMAML
from hodiff.meta.learner import MetaLearner as MetaLearner
from hodiff.meta.maml import ANIL as ANIL
from hodiff.meta.maml import FOMAML as FOMAML
from hodiff.meta.maml import MAML as MAML
from hodiff.meta.maml import MetaSGD as MetaSGD
from hodiff.meta.nonfinite import NonFiniteError as NonFiniteError
from hodiff.meta.optimizer import Optimizer as Optimizer
from hodiff.meta.optimizer import OptimizerState as OptimizerState
from hodiff.meta.reptile import Reptile as Reptile
from hodiff.meta.sgd import SGD as SGD
from hodiff.meta.sgd import Lion as Lion
