"""No step waits for the device: on the meta device, whose tensors have no values, none can be read."""

import numpy as np
import pytest

from services.llm.engine.text.parameters import SamplingParams

SAMPLINGS = (
    SamplingParams(),
    SamplingParams(num_logprobs=2),
    SamplingParams(temperature=0.8, seed=3),
    SamplingParams(temperature=0.5, top_k=5, top_p=0.9, min_p=0.01),
    SamplingParams(repetition_penalty=1.2, presence_penalty=1.0, frequency_penalty=0.5, logit_bias={3: 2.0}),
)


class Everything:
    """A mask that allows every token."""

    def allowed(self) -> np.ndarray:
        """Return all bits."""
        return np.full(2, -1, dtype=np.int32)

    def take(self, token_id: int) -> None:
        """Ignore the token."""


@pytest.mark.parametrize("depth", [1, 3])
def test_nothing_is_read_from_the_device_before_the_ranking_is_complete(depth, items_of, decoder_of, engine_of) -> None:
    """Every read, copy to the host or size that depends on values would fail; only the last step's copy does."""
    items = items_of(depth)
    engine = engine_of(decoder_of(items).to("meta"), items)
    engine.add_rank("wide", [0, 1, 2, 3], k=20, beam_width=30, excluded=[4, 7])
    engine.add_rank("narrow", [0, 1], k=3, beam_width=3)

    for _ in range(depth - 1):
        engine.step(0.0)

    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor") as copied:
        engine.step(0.0)
    assert "arrays" in [frame.name for frame in copied.traceback]


def test_a_step_with_every_kind_of_text_is_started_without_a_read(items_of, decoder_of, engine_of) -> None:
    """Whatever the settings, nothing is read until the next call of the asynchronous engine collects the step."""
    items = items_of(2)
    engine = engine_of(decoder_of(items).to("meta"), items, is_asynchronous=True)
    for place, sampling in enumerate(SAMPLINGS):
        engine.add_text(f"{place}", [1, 2, 3 + place], max_new_tokens=4, sampling=sampling)
    engine.add_text("held", [1, 2], max_new_tokens=4, mask=Everything())
    engine.add_rank("rank", [0, 1, 2, 3], k=20, beam_width=30, excluded=[4, 7])

    engine.step(0.0)

    assert engine.is_ahead
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor") as copied:
        engine.step(0.0)
    assert "arrays" in [frame.name for frame in copied.traceback]
