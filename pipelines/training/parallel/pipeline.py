"""Pipeline parallelism: each rank holds a run of a decoder's layers, scheduled by torch's 1F1B.

With more ranks than stages, DDP replicates each stage. A part of a batch passes through the stages in micro-batches, up
to four per stage; a rank keeps the activations of at most as many as there are stages from it to the last. The loss
runs unchanged on the last stage: the decoder that it calls continues from the previous stage's output. Tied rows of
input and output embeddings exist on the first and the last stage, and their gradients are summed. Dropout and samples
are drawn for the whole part, so losses equal a single process's.

Knows no loss.

Shape suffixes: B rows of a part, R rows of this rank, T tokens of a micro-batch, D hidden, N numbers of a row.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from models.catalogue import BOS_TOKEN
from models.decoder.decoder import Attend, Decoder
from models.decoder.rope import rotary_angles
from pipelines.planner.mesh import MICRO_BATCHES
from pipelines.scoring.dense import hidden_states
from pipelines.training.batches import IGNORED, Batch, Loss, LossFunction, split_batch
from pipelines.training.parallel.ddp import averaged_by_ddp
from pipelines.training.parallel.dropout import Dropout, own_rows
from pipelines.training.parallel.mesh import Mesh
from pipelines.training.parallel.model import DividedModel
from services.errors import ConfigError


class DecoderStage(Decoder):
    """One stage's layers of a decoder, named as in the whole decoder.

    The first stage has the embedding; the last stage has the final norm and the head's rows.
    """

    def __init__(self, whole: Decoder, stage: int, num_stages: int) -> None:
        nn.Module.__init__(self)
        self.config, self.is_first, self.is_last = whole.config, stage == 0, stage == num_stages - 1
        self.entering_TD: Tensor | None = None
        if self.is_first or (self.is_last and whole.config.tie_word_embeddings):
            self.embedding = whole.embedding
        own = layers_of(whole.config.num_hidden_layers, stage, num_stages)
        self.layers = nn.ModuleList(
            layer if index in own else nn.Identity() for index, layer in enumerate(whole.layers)
        )
        self._own = own
        if self.is_last:
            self.norm = whole.norm
            if not whole.config.tie_word_embeddings:
                self.head = whole.head

    def forward(self, token_ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Return the input of the next stage, (T, D); on the last stage the hidden states.

        Raises ConfigError if a loss runs the decoder on anything but its batch.
        """
        x_TD = self.embedding(token_ids_T) if self.is_first else self._entered(token_ids_T)
        cos_TK, sin_TK = rotary_angles(positions_T, self.config.head_dim, self.config.rope, x_TD.dtype)
        for index in self._own:
            x_TD = self.layers[index](x_TD, cos_TK, sin_TK, attend)
        left_TD: Tensor = self.norm(x_TD) if self.is_last else x_TD
        return left_TD

    def _entered(self, token_ids_T: Tensor) -> Tensor:
        entering_TD, self.entering_TD = self.entering_TD, None
        if entering_TD is None or len(entering_TD) != len(token_ids_T):
            raise ConfigError(
                "--parallel: a pipeline is for losses that run the decoder once, over their batch; "
                "give ddp, fsdp or tpK"
            )
        return entering_TD


@dataclass(slots=True)
class _Part:
    """A part of a batch in flight.

    It holds its micro-batches, the current micro-batch, dropout masks by index in the model, and the random state
    before the loss.
    """

    micro_batches: list[Batch]
    kept_RN: dict[int, Tensor]
    random: Tensor
    unit: int
    current: int = 0
    losses: list[Loss] = field(default_factory=list)


class PipelineModel(DividedModel):
    """A decoder over a mesh (pipeline, data). The ranks of one pipeline learn from the same rows."""

    def __init__(self, model: nn.Module, mesh: Mesh, loss: LossFunction, dropout: Dropout) -> None:
        decoder = _checked(model, mesh)
        super().__init__(model, mesh, loss, dropout)
        layout, timeout = mesh.layout, timedelta(seconds=mesh.timeout_s)
        ranks = torch.arange(mesh.world_size).view(layout.pipeline, layout.data)
        self._line = _own_group(ranks.T.tolist(), timeout)
        self._ends = _own_group(ranks[[0, -1]].T.tolist(), timeout)
        copies = _own_group(ranks.tolist(), timeout)
        self._stage = DecoderStage(copy.deepcopy(decoder), mesh.pp_rank, layout.pipeline)
        self.trained = self._stage
        is_tied = decoder.config.tie_word_embeddings
        self._is_shared = [is_tied and name.startswith("embedding.") for name, _ in self._stage.named_parameters()]
        names, own = {module: name for name, module in model.named_modules()}, dict(self._stage.named_modules())
        self._own_drops = {index for index, module in enumerate(dropout.modules) if names.get(module) in own}
        model.to("cpu")
        step = _StageStep(self, self._stage, loss)
        self._step: nn.Module = averaged_by_ddp(step, mesh.method, copies) if mesh.dp_size > 1 else step
        self._part: _Part

    def loss(self, part: Batch, unit: int | None, *, is_last: bool) -> Loss:
        """Take this rank's rows through the pipeline and accumulate their gradients, so that the loss has none.

        Return the mean loss and the number of labels on the last stage, zeros on other stages.
        """
        batch, stage = self.own(part), self._stage
        device = batch.tokens.device
        micro_batches = micro_batches_of(batch, self.mesh.layout.pipeline)
        kept_RN = self._drawn(batch, sum(len(micro_batch.tokens) for micro_batch in micro_batches))
        in_flight = self._part = _Part(micro_batches, kept_RN, torch.get_rng_state(), unit or 1)
        meta_TD = torch.empty(
            micro_batches[0].tokens.numel(), stage.config.hidden_size, device="meta", requires_grad=True
        )
        chunks = _Chunks(
            self._step,
            self.mesh.pp_rank,
            self.mesh.layout.pipeline,
            device,
            input_args=() if stage.is_first else (meta_TD,),
            output_args=torch.empty((), device="meta") if stage.is_last else meta_TD,
            group=self._line,
        )
        chunks.part = in_flight
        schedule = Schedule1F1B(chunks, len(micro_batches), loss_fn=lambda loss, _: loss, scale_grads=False)
        with torch.autocast(device.type, enabled=False):  # of backward passes; the stage's forward pass has its own
            schedule.step(target=torch.arange(len(micro_batches)), return_outputs=False)
        random = torch.get_rng_state()  # of the last stage, whose loss may have drawn
        dist.broadcast(random, self.mesh.loss_ranks[0], group=self.ranks.control)
        torch.set_rng_state(random)
        number = sum(number for _, number in in_flight.losses)
        total = sum(float(mean) * number for mean, number in in_flight.losses)
        return torch.tensor(total / max(1, number)), number

    def stage_output(self, stage: DecoderStage, loss: LossFunction, entering: Sequence[Tensor]) -> Tensor:
        """Return the stage's output for the current micro-batch: hidden states, or the loss in the batch's units."""
        part = self._part
        batch = part.micro_batches[part.current]
        (stage.entering_TD,) = entering or (None,)
        device = batch.tokens.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.mesh.method.uses_bf16(device)):
            if not stage.is_last:
                return hidden_states(stage, batch.tokens)
            torch.set_rng_state(part.random)  # loss over the whole part
            mean, number = loss(stage, batch)
        part.losses.append((mean.detach(), number))
        return mean * (number / part.unit)

    def drop(self, values: Tensor, index: int) -> Tensor:
        """Apply the part's dropout mask to the rows of a micro-batch."""
        if not self.dropout.probability:
            return values
        size = len(self._part.micro_batches[0].tokens)
        kept_RN = self._part.kept_RN[index][self._part.current * size :][:size]
        scaled_RN = kept_RN.to(values.dtype).div_(1 - self.dropout.probability)
        return (values.view(size, -1) * scaled_RN).view_as(values)

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Sum the gradients of rows shared by two stages, clip to this norm, and return the norm before clipping."""
        grads = [
            (parameter.grad, is_shared)
            for parameter, is_shared in zip(parameters, self._is_shared, strict=True)
            if parameter.grad is not None
        ]
        for grad, is_shared in grads:
            if is_shared:
                dist.all_reduce(grad, group=self._ends)
        counted = [grad for grad, is_shared in grads if not is_shared or self._stage.is_first]
        own = torch.stack(torch._foreach_norm(counted)).square().sum().double().reshape(1).cpu()
        norm = self.ranks.gather(own)[:: self.mesh.dp_size].sum().sqrt().to(counted[0])
        torch._foreach_mul_([grad for grad, _ in grads], (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @torch.no_grad()
    def gather(self) -> None:
        """Broadcast the weights of all stages to all ranks, on the host."""
        own = dict(self._stage.named_parameters())
        for name, parameter in self.model.named_parameters():
            if name in own:
                parameter.copy_(own[name])
            source = self._stage_of(name) * self.mesh.dp_size
            dist.broadcast(parameter.detach(), source, group=self.ranks.patient)

    def own_file(self) -> tuple[Mapping[str, Tensor], int, int]:
        """Return the tensors of this rank's stage, one file per stage."""
        own = {
            name: tensor
            for name, tensor in self._stage.state_dict().items()
            if self.mesh.dp_rank == 0 and self._stage_of(name) == self.mesh.pp_rank
        }
        return own, self.mesh.pp_rank, self.mesh.layout.pipeline

    def _stage_of(self, name: str) -> int:
        return stage_of(name, self._stage.config.num_hidden_layers, self.mesh.layout.pipeline)

    def _drawn(self, batch: Batch, num_rows: int) -> dict[int, Tensor]:
        """Draw dropout for the whole part at all indices, as a single process does.

        Return this rank's rows for its stage. Padding rows are kept.
        """
        drawn: dict[int, Tensor] = {}
        probability = self.dropout.probability
        if not probability or not self._stage.training:
            return drawn
        width = batch.tokens.shape[1] * self._stage.config.hidden_size
        for index in range(len(self.dropout.modules)):
            kept_BN = torch.empty((self.num_rows, width), device=batch.tokens.device).bernoulli_(1 - probability)
            if index in self._own_drops:
                own_RN = own_rows(kept_BN, self.mesh)
                drawn[index] = functional.pad(own_RN, (0, 0, 0, num_rows - len(own_RN)), value=1.0).bool()
        return drawn


def _checked(model: nn.Module, mesh: Mesh) -> Decoder:
    """Return the model if its layers fill the stages. Raises ConfigError."""
    num_stages = mesh.layout.pipeline
    if not isinstance(model, Decoder):
        raise ConfigError("--parallel: a pipeline is for decoders; give ddp or fsdp")
    num_layers = model.config.num_hidden_layers
    if not layers_of(num_layers, num_stages - 1, num_stages):
        raise ConfigError(
            f"--parallel: pp{num_stages} leaves a stage of the decoder's {num_layers} layers without any; "
            "give pp2 or another layout"
        )
    return model


class _StageStep(nn.Module):
    """A stage's computation for one micro-batch; all its parameters are used below one `forward`."""

    def __init__(self, parallel: PipelineModel, stage: DecoderStage, loss: LossFunction) -> None:
        super().__init__()
        self.stage = stage
        self._parallel, self._loss = parallel, loss

    def forward(self, *entering: Tensor) -> Tensor:
        return self._parallel.stage_output(self.stage, self._loss, entering)


class _Chunks(PipelineStage):
    """torch's stage, recording the current micro-batch: recomputation in the backward pass needs the same dropout."""

    part: _Part

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Compute a micro-batch. Raises the stage's own exception."""
        self.part.current = fwd_chunk_id
        try:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        except RuntimeError as error:
            raise error.__cause__ or error from None

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Compute a micro-batch's gradients."""
        self.part.current = bwd_chunk_id
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


def layers_of(num_layers: int, stage: int, num_stages: int) -> range:
    """Return the layers of a stage: equal numbers, except that the last stage may have fewer."""
    size = -(-num_layers // num_stages)
    return range(stage * size, min(num_layers, (stage + 1) * size))


def stage_of(name: str, num_layers: int, num_stages: int) -> int:
    """Return the first stage that has this parameter of a decoder."""
    kind, _, rest = name.partition(".")
    if kind == "layers":
        return int(rest.partition(".")[0]) // -(-num_layers // num_stages)
    return 0 if kind == "embedding" else num_stages - 1


def micro_batches_of(batch: Batch, num_stages: int) -> list[Batch]:
    """Return equal parts of a batch, at least one per stage, padded with rows without labels."""
    num_rows = len(batch.tokens)
    size = -(-num_rows // (MICRO_BATCHES * num_stages))
    number = max(num_stages, -(-num_rows // size))
    below = (0, 0, 0, number * size - num_rows)
    filled = replace(
        batch.each(lambda part: functional.pad(part, below)),
        tokens=functional.pad(batch.tokens, below, value=BOS_TOKEN),
        labels=functional.pad(batch.labels, below, value=IGNORED),
        lengths=(*batch.lengths, *([0] * below[-1])),
    )
    return list(split_batch(filled, number))


def _own_group(groups: list[list[int]], timeout: timedelta) -> Any:
    """Create a process group for each of these lists of ranks; return this rank's group, None if it is in none."""
    made = {tuple(ranks): dist.new_group(ranks, timeout) for ranks in groups if len(ranks) > 1}
    return next((group for ranks, group in made.items() if dist.get_rank() in ranks), None)
