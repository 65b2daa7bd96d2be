"""`parallelize`: lay a model out over a mesh, as its layout says."""

from torch import nn

from pipelines.training.batches import LossFunction
from pipelines.training.parallel.dropout import Dropout
from pipelines.training.parallel.mesh import Mesh
from pipelines.training.parallel.model import ParallelModel


def parallelize(model: nn.Module, mesh: Mesh, loss: LossFunction, dropout: Dropout) -> ParallelModel:
    """Return the model with its loss over the mesh; all its ranks call this at the same time. Raises ConfigError."""
    return _strategy(mesh)(model, mesh, loss, dropout)


def _strategy(mesh: Mesh) -> type[ParallelModel]:
    """Return the class of the layout. A single process imports no strategy of several."""
    if mesh.layout.pipeline > 1:
        from pipelines.training.parallel.pipeline import PipelineModel

        return PipelineModel
    if mesh.is_divided:
        from pipelines.training.parallel.fsdp_tp import FsdpTpModel

        return FsdpTpModel
    if mesh.world_size > 1:
        from pipelines.training.parallel.ddp import DdpModel

        return DdpModel
    return ParallelModel
