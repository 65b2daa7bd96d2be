"""Text decode as a recorded step: one token of each request in, the most probable next tokens out.

Shape suffixes: B requests, V vocabulary.
"""

import torch
from torch import Tensor

from services.llm.engine.forward.layers import LayerLoop, StepInputs
from services.llm.engine.gpu.graph_device import GraphDevice
from services.llm.engine.gpu.graph_shapes import TextShape
from services.llm.engine.gpu.step_table import StepTable
from services.llm.engine.schedule.sequence import Sequence
from services.llm.engine.text.draw import Draw
from services.llm.engine.text.sampling import Drawn, sample


class TextGraph:
    """One recorded shape."""

    def __init__(
        self, shape: TextShape, forward: LayerLoop, vocab_size: int, table: StepTable, device: GraphDevice
    ) -> None:
        self._num_requests = shape.num_requests
        self._forward = forward
        self._vocab_size = vocab_size
        self._table = table
        table.fill([], shape.num_requests)
        self._recording = device.record(self._body, [table.numbers])

    def run(self, sequences: list[Sequence]) -> Drawn:
        """Choose each request's next token. Waits for nothing; how it is drawn, masks too, is worked out when the device is at work."""
        self._table.fill(sequences, self._num_requests)
        self._recording.replay()
        draws = [Draw.of(sequence) for sequence in sequences]
        logits_BV, token_B = self._recording.outputs
        if any(not draw.is_most_probable for draw in draws):
            return sample(logits_BV[: len(draws)], draws)
        return Drawn(token_B[: len(draws)].clone(), logits_BV, [None] * len(draws))

    def _body(self) -> tuple[Tensor, ...]:
        columns = self._table.columns(self._num_requests)
        pages = self._forward.prepare_regular(self._table.rows(self._num_requests, 1))
        hidden_BD = self._forward.hidden(
            StepInputs(columns["token"], columns["position"], columns["slot"], pages, tails=None)
        )
        logits_BV = self._forward.logits(hidden_BD, 0, self._vocab_size)
        return logits_BV, torch.argmax(logits_BV, dim=-1)
