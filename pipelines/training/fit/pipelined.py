"""Pipeline parallelism: each rank holds a run of a decoder's layers, scheduled by torch's 1F1B.

With more ranks than stages, DDP replicates each stage. A part of a batch passes through the stages in micro-batches, up
to four per stage; a rank keeps the activations of at most as many as there are stages from it to the last. The loss
runs unchanged on the last stage: the decoder that it calls continues from the previous stage's output. Tied rows of
input and output embeddings exist on the first and the last stage, and their gradients are summed. Dropout and samples
are drawn for the whole part, so losses equal a single process's.

The given model stays whole, on the host if there are GPUs, as in `sharded.py`. Knows no loss.

Shape suffixes: B rows of a part, R rows of this rank, T tokens of a micro-batch, D hidden, N numbers of a row.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

from models.catalogue import BOS_TOKEN
from models.decoder.config import DecoderConfig
from models.decoder.decoder import Attend, Decoder
from models.decoder.rope import rotary_angles
from pipelines.planner.mesh import MICRO_BATCHES, Layout
from pipelines.scoring.dense import hidden_states
from pipelines.training.fit.batches import IGNORED, Batch, split_batch
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.fit.parallel import PLAIN, Loss, LossFunction, Method, Ranks, Share, averaged_by_ddp
from pipelines.training.fit.shard_files import ShardWriter
from services.errors import ConfigError


class Stage(Decoder):
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
                "--parallel: a pipeline is for losses that run the decoder once, over their batch; give ddp, fsdp or tpK"
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


class Pipeline(Ranks):
    """Ranks of a mesh (pipeline, data). The ranks of one pipeline learn from the same rows."""

    is_divided = True

    def __init__(
        self,
        layout: Layout,
        timeout_s: float,
        method: Method = PLAIN,
        *,
        accumulation: int = 1,
        local_rank: int = 0,
    ) -> None:
        super().__init__(timeout_s, method, accumulation=accumulation, local_rank=local_rank)
        self._layout, self._num_stages, self.num_shares = layout, layout.pipeline, layout.data
        self._stage, self.share = divmod(self.rank, layout.data)
        self._last_rank = (layout.pipeline - 1) * layout.data
        ranks = torch.arange(self.size).view(layout.pipeline, layout.data)
        timeout = timedelta(seconds=timeout_s)
        self._line = _own_group(ranks.T.tolist(), timeout)
        self._ends = _own_group(ranks[[0, -1]].T.tolist(), timeout)
        self._copies = _own_group(ranks.tolist(), timeout)
        self._dropping: list[nn.Module] = []
        self._own_places: set[int] = set()
        self._dropout, self._unit = 0.0, 1
        self._is_shared: list[bool] = []
        self._part: _Part

    @property
    def layout(self) -> Layout:
        """Layout of the processes, with the maximum number of micro-batches of a part."""
        return self._layout

    def copy(self, model: nn.Module) -> Stage:
        """Return a copy of this rank's stage; the model itself moves to the host. Raises ConfigError."""
        if not isinstance(model, Decoder):
            raise ConfigError("--parallel: a pipeline is for decoders; give ddp or fsdp")
        num_layers = model.config.num_hidden_layers
        if not layers_of(num_layers, self._num_stages - 1, self._num_stages):
            raise ConfigError(
                f"--parallel: pp{self._num_stages} leaves a stage of the decoder's {num_layers} layers without any; give pp2 or another layout"
            )
        trained = Stage(copy.deepcopy(model), self._stage, self._num_stages)
        is_tied = model.config.tie_word_embeddings
        self._is_shared = [is_tied and name.startswith("embedding.") for name, _ in trained.named_parameters()]
        names, own = {module: name for name, module in model.named_modules()}, dict(trained.named_modules())
        self._own_places = {place for place, module in enumerate(self._dropping) if names.get(module) in own}
        model.to("cpu")
        return trained

    def wrap(self, model: nn.Module, loss: LossFunction) -> nn.Module:
        """Return a module that takes this rank's rows through the pipeline, forward and backward."""
        assert isinstance(model, Stage)
        return _Piped(self, model, loss)

    def numbers(self, trained: nn.Module, model: nn.Module) -> list[int]:
        """Return the index of each of this stage's parameters among the whole model's."""
        places = {name: number for number, (name, _) in enumerate(model.named_parameters())}
        return [places[name] for name, _ in trained.named_parameters()]

    def unit(self, batch: Batch) -> int:
        """Return the batch's number of positions, and keep it for the losses in flight."""
        self._unit = super().unit(batch)
        return self._unit

    def sending(self, _wrapped: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of one part; at its end, gradients are averaged over the copies of a stage."""
        return nullcontext()

    def backward(self, _loss: Tensor) -> None:
        """Do nothing: the schedule has computed the gradients."""

    def drops(self, modules: Sequence[nn.Module], probability: float) -> None:
        """Record the modules of the whole model that have dropout."""
        self._dropping, self._dropout = list(modules), probability

    def dropped(self, values: Tensor, probability: float, place: int) -> Tensor:
        """Apply the part's dropout mask to the rows of a micro-batch."""
        if not probability:
            return values
        size = len(self._part.micro_batches[0].tokens)
        kept_RN = self._part.kept_RN[place][self._part.current * size :][:size]
        return (values.view(size, -1) * kept_RN.to(values.dtype).div_(1 - probability)).view_as(values)

    def go_through(self, submodule: nn.Module, stage: Stage, batch: Batch) -> Loss:
        """Take a part through the pipeline and accumulate its gradients.

        Return the mean loss and the number of labels on the last stage, zeros on other stages.
        """
        device = batch.tokens.device
        micro_batches = micro_batches_of(batch, self._num_stages)
        kept_RN = self._drawn(batch, sum(len(one.tokens) for one in micro_batches), stage)
        part = self._part = _Part(micro_batches, kept_RN, torch.get_rng_state(), self._unit)
        laid_out_TD = torch.empty(
            micro_batches[0].tokens.numel(), stage.config.hidden_size, device="meta", requires_grad=True
        )
        chunks = _Chunks(
            submodule,
            self._stage,
            self._num_stages,
            device,
            input_args=() if stage.is_first else (laid_out_TD,),
            output_args=torch.empty((), device="meta") if stage.is_last else laid_out_TD,
            group=self._line,
        )
        chunks.part = part
        schedule = Schedule1F1B(chunks, len(micro_batches), loss_fn=lambda loss, _: loss, scale_grads=False)
        with torch.autocast(device.type, enabled=False):  # of backward passes; the stage's forward pass has its own
            schedule.step(target=torch.arange(len(micro_batches)), return_outputs=False)
        random = torch.get_rng_state()  # of the last stage, whose loss may have drawn
        dist.broadcast(random, self._last_rank, group=self._control)
        torch.set_rng_state(random)
        number = sum(number for _, number in part.losses)
        total = sum(float(mean) * number for mean, number in part.losses)
        return torch.tensor(total / max(1, number)), number

    def loss_of(self, stage: Stage, loss: LossFunction, entering: Sequence[Tensor]) -> Tensor:
        """Return the stage's output for the current micro-batch: hidden states, or the loss in the batch's units."""
        part = self._part
        batch = part.micro_batches[part.current]
        (stage.entering_TD,) = entering or (None,)
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=self.uses_bf16(batch.tokens.device)):
            if not stage.is_last:
                return hidden_states(stage, batch.tokens)
            torch.set_rng_state(part.random)  # loss over the whole part
            mean, number = loss(stage, batch)
        part.losses.append((mean.detach(), number))
        return mean * (number / part.unit)

    def averaged(self, module: nn.Module) -> nn.Module:
        """Return a module that averages gradients over the copies of this stage, if there are any."""
        return averaged_by_ddp(module, self.method, self._copies) if self.num_shares > 1 else module

    def shares(self, own: Share) -> list[Share]:
        """Return each share's part of the step, as known by the last stage."""
        return super().shares(own)[self._last_rank :]

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Sum the gradients of rows shared by two stages, clip to this norm, and return the norm before clipping."""
        found = [
            (parameter.grad, is_shared)
            for parameter, is_shared in zip(parameters, self._is_shared, strict=True)
            if parameter.grad is not None
        ]
        for grad, is_shared in found:
            if is_shared:
                dist.all_reduce(grad, group=self._ends)
        counted = [grad for grad, is_shared in found if not is_shared or self._stage == 0]
        own = torch.stack(torch._foreach_norm(counted)).square().sum().double().reshape(1).cpu()
        norm = self._gathered(own)[:: self.num_shares].sum().sqrt().to(counted[0])
        torch._foreach_mul_([grad for grad, _ in found], (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    @contextmanager
    def whole(self, trained: nn.Module, model: nn.Module) -> Iterator[None]:
        """Gather the weights of all stages into the whole model.

        Inside this block the model is on rank 0's device, otherwise on the host.
        """
        self._bring(trained, model)
        if self.is_main:
            model.to(next(trained.parameters()).device)
        try:
            yield
        finally:
            model.to("cpu")

    def take_over(self, trained: nn.Module, model: nn.Module) -> None:
        """Gather the weights of all stages into the whole model, and move it back to the device."""
        self._bring(trained, model)
        model.to(next(trained.parameters()).device)

    def shard_writer(self, checkpoints: Checkpoints) -> ShardWriter:
        """Return a writer of the state's stages."""
        return ShardWriter(checkpoints, is_main=self.is_main)

    def export(self, trained: nn.Module, config: DecoderConfig, folder: Path) -> None:
        """Write one file per stage."""
        num_layers = config.num_hidden_layers
        own = {
            name: tensor
            for name, tensor in trained.state_dict().items()
            if self.share == 0 and stage_of(name, num_layers, self._num_stages) == self._stage
        }
        self._save_parts(config, own, folder, self._stage, self._num_stages)

    def is_true_of_main(self, own: bool) -> bool:
        """Return rank 0's answer."""
        return bool(self.from_main(lambda: float(own)))

    def _drawn(self, batch: Batch, num_rows: int, stage: Stage) -> dict[int, Tensor]:
        """Draw dropout for the whole part at all indices, as a single process does.

        Return this rank's rows for its stage. Padding rows are kept.
        """
        drawn: dict[int, Tensor] = {}
        if not self._dropout or not stage.training:
            return drawn
        width = batch.tokens.shape[1] * stage.config.hidden_size
        for place in range(len(self._dropping)):
            kept_BN = torch.empty((self._num_rows, width), device=batch.tokens.device).bernoulli_(1 - self._dropout)
            if place in self._own_places:
                own_RN = kept_BN[self.share :: self.num_shares] if self.share < self._num_rows else kept_BN[:1]
                drawn[place] = functional.pad(own_RN, (0, 0, 0, num_rows - len(own_RN)), value=1.0).bool()
        return drawn

    @torch.no_grad()
    def _bring(self, trained: nn.Module, model: nn.Module) -> None:
        """Broadcast the weights of all stages to all ranks, on the host."""
        assert isinstance(model, Decoder)
        own = dict(trained.named_parameters())
        for name, parameter in model.named_parameters():
            if name in own:
                parameter.copy_(own[name])
            stage = stage_of(name, model.config.num_hidden_layers, self._num_stages)
            dist.broadcast(parameter.detach(), stage * self.num_shares, group=self._patient)


class _Piped(nn.Module):
    """A stage and its losses as a module that takes a part of a batch through the whole pipeline."""

    def __init__(self, group: Pipeline, stage: Stage, loss: LossFunction) -> None:
        super().__init__()
        self._group, self._stage = group, stage
        self._step = group.averaged(_StageStep(group, stage, loss))

    def forward(self, batch: Batch) -> Loss:
        """Return the mean loss and the number of labels, known by the last stage, and accumulate gradients."""
        return self._group.go_through(self._step, self._stage, batch)


class _StageStep(nn.Module):
    """A stage's computation for one micro-batch; all its parameters are used below one `forward`."""

    def __init__(self, group: Pipeline, stage: Stage, loss: LossFunction) -> None:
        super().__init__()
        self.stage = stage
        self._group, self._loss = group, loss

    def forward(self, *entering: Tensor) -> Tensor:
        """Return the output of the stage."""
        return self._group.loss_of(self.stage, self._loss, entering)


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
