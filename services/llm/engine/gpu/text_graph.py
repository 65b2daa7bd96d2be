"""Text decode as a captured step: the last token of each request is the input, logits and the most probable next tokens are outputs.

Shape suffixes: B requests, V vocabulary.
"""

import torch
from torch import Tensor

from services.llm.engine.forward.layers import LayerLoop, StepInputs
from services.llm.engine.gpu.graph_device import GraphDevice
from services.llm.engine.gpu.graph_shapes import TextShape
from services.llm.engine.gpu.step_table import StepTable
from services.llm.engine.schedule.sequence import Sequence
from services.llm.engine.text.sampling import SampledBatch, SamplingInput, sample


class TextGraph:
    """One captured shape."""

    def __init__(
        self, shape: TextShape, forward: LayerLoop, vocab_size: int, table: StepTable, device: GraphDevice
    ) -> None:
        self._num_requests = shape.num_requests
        self._forward = forward
        self._vocab_size = vocab_size
        self._table = table
        table.fill([], shape.num_requests)
        self._graph = device.capture(self._body, [table.numbers, table.sampled_B])

    def run(self, sequences: list[Sequence]) -> SampledBatch:
        """Sample each request's next token. Does not wait; sampling parameters and masks are prepared while the device runs the graph."""
        self._table.fill(sequences, self._num_requests)
        self._graph.replay()
        draws = [SamplingInput.of(sequence) for sequence in sequences]
        logits_BV, token_B = self._graph.outputs
        if any(not draw.is_plain_greedy for draw in draws):
            return sample(logits_BV[: len(draws)], draws)
        return SampledBatch(token_B[: len(draws)].clone(), logits_BV, [None] * len(draws))

    def _body(self) -> tuple[Tensor, ...]:
        columns = self._table.columns(self._num_requests)
        pages = self._forward.prepare_uniform(self._table.batch(self._num_requests, 1))
        hidden_BD = self._forward.hidden(
            StepInputs(
                self._table.tokens(self._num_requests), columns["position"], columns["slot_mapping"], pages, tails=None
            )
        )
        logits_BV = self._forward.logits(hidden_BD, 0, self._vocab_size)
        return logits_BV, torch.argmax(logits_BV, dim=-1)
