"""No step waits for the device: run on tensors that have no values, a step can read none."""

import pytest


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_nothing_is_read_from_the_device_before_the_ranking_is_complete(depth, items_of, decoder_of, engine_of) -> None:
    """On the meta device every read, copy to the host or size that depends on values fails; only the last step's copy does."""
    items = items_of(depth)
    engine = engine_of(decoder_of(items).to("meta"), items, cpu_kernels="torch")
    engine.add_rank("wide", [0, 1, 2, 3], k=20, beam_width=30, excluded=[4, 7])
    engine.add_rank("narrow", [0, 1], k=3, beam_width=3)

    for _ in range(depth - 1):
        engine.step(0.0)

    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor") as copied:
        engine.step(0.0)
    assert copied.traceback[-1].name == "_rankings_to_host"
