"""Random steps of small decoders of any family and shape, to compare forward passes."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from models.decoder.config import DecoderConfig
from models.decoder.decoder import Decoder
from models.decoder.rope_config import Rope, RopeScaling
from models.decoder.window import Window
from services.llm.engine.beam.tails import Tails
from services.llm.engine.forward.layers import Forward, StepInputs
from services.llm.engine.forward.weights import DecoderWeights
from services.llm.engine.kv.cache import KvCache
from services.llm.engine.plan import Chunk, StepPlan
from tests.support.engine.attention_shapes import attention_shape
from tests.support.training.sequences import sequence_of

CPU = torch.device("cpu")
BLOCK, NUM_BLOCKS, VOCABULARY, PLACES = 4, 64, 50, 2
ODD = attention_shape(
    4, 2, 20, vocab_size=VOCABULARY, hidden_size=70, intermediate_size=150, max_position_embeddings=256
)
"""A shape whose sizes match no vector width."""


def decoder_of(config: DecoderConfig, seed: int = 1) -> Decoder:
    """Build a decoder with large random weights everywhere."""
    torch.manual_seed(seed)
    decoder = Decoder(config).eval()
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    return decoder


@st.composite
def decoders(draw) -> Decoder:
    """Build a small decoder of any family, with odd sizes, scaled positions and windows."""
    groups, per_group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3, 7]))
    bias, layers = draw(st.booleans()), draw(st.integers(1, 2))
    scaling = RopeScaling(kind="yarn", factor=4.0, original_positions=32, attention_factor=1.1)
    config = DecoderConfig(
        vocab_size=VOCABULARY,
        hidden_size=draw(st.sampled_from([6, 32, 40, 64, 70])),
        intermediate_size=draw(st.sampled_from([5, 48, 66, 96])),
        num_hidden_layers=layers,
        num_attention_heads=groups * per_group,
        num_key_value_heads=groups,
        head_dim=draw(st.sampled_from([4, 8, 20, 32, 64, 80])),
        max_position_embeddings=256,
        rope=Rope(10_000.0, draw(st.sampled_from([None, scaling]))),
        qkv_bias=bias,
        output_bias=bias and draw(st.booleans()),
        mlp_bias=bias and draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        window=draw(st.sampled_from([None, Window(5, frozenset({0}), 2), Window(9, frozenset(range(layers)))])),
    )
    return decoder_of(config, draw(st.integers(0, 99)))


@st.composite
def plans(draw) -> StepPlan:
    """Build a step of chunks at any position of their prompts and of beams, over shuffled blocks."""
    blocks = np.random.default_rng(draw(st.integers(0, 99))).permutation(NUM_BLOCKS).tolist()
    plan, used = StepPlan(), 0
    work = st.tuples(st.integers(0, 20), st.integers(1, 40), st.integers(0, 9))
    for start, count, beams in draw(st.lists(work, min_size=1, max_size=4)):
        tokens = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=start + count, max_size=start + count))
        need = -(-len(tokens) // BLOCK)
        sequence = sequence_of(tokens, blocks[used : used + need])
        used += need
        if beams and used:
            sequence.num_levels, sequence.num_levels_done, sequence.num_computed_tokens = 3, 1, len(tokens)
            sequence.rows_by_level = (beams, beams)
            plan.beam_steps.append(sequence)
        else:
            plan.chunks.append(Chunk(sequence, start, count))
    return plan


def inputs_of(plan: StepPlan, config: DecoderConfig, dtype: torch.dtype, pages: object) -> StepInputs:
    """Build the inputs of a step as the runner does, with random tails."""
    positions = [np.arange(chunk.start, chunk.end) for chunk in plan.chunks]
    slots = [
        np.array(chunk.sequence.block_table)[where // BLOCK] * BLOCK + where % BLOCK
        for chunk, where in zip(plan.chunks, positions, strict=True)
    ]
    tokens = [token for chunk in plan.chunks for token in chunk.sequence.tokens[chunk.start : chunk.end]]
    beams = [(len(sequence.tokens), sequence.num_beam_rows) for sequence in plan.beam_steps]
    num_beams = sum(count for _, count in beams)
    positions += [np.full(count, position) for position, count in beams]
    torch.manual_seed(5)
    tails = None
    if num_beams:
        shape = (config.num_hidden_layers, num_beams, PLACES, config.num_key_value_heads, config.head_dim)
        place_B = torch.randint(0, PLACES, (num_beams,))
        tails = Tails(
            torch.randn(shape).to(dtype),
            torch.randn(shape).to(dtype),
            place_B,
            torch.arange(PLACES) <= place_B[:, None],
        )
    return StepInputs(
        torch.tensor([*tokens, *range(num_beams)]) % VOCABULARY,
        torch.from_numpy(np.concatenate(positions)),
        torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *slots])),
        pages,
        tails,
    )


def filled_cache(config: DecoderConfig, dtype: torch.dtype) -> KvCache:
    """Build a cache filled with random keys and values."""
    cache = KvCache(config, NUM_BLOCKS, BLOCK, dtype, CPU)
    torch.manual_seed(6)
    shape = (NUM_BLOCKS * BLOCK, config.num_key_value_heads, config.head_dim)
    for layer in range(config.num_hidden_layers):
        cache.write(layer, torch.arange(shape[0]), torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))
    return cache


def prompt_of(rows: int) -> StepPlan:
    """Build the step of one prompt."""
    sequence = sequence_of([n % VOCABULARY for n in range(rows)], list(range(-(-rows // BLOCK))))
    return StepPlan(chunks=[Chunk(sequence, 0, rows)])


def run_step(
    build: Callable[[KvCache], Forward],
    weights: DecoderWeights,
    plan: StepPlan,
    output_rows_R: Tensor | None = None,
) -> list[Tensor]:
    """Run a step through a forward pass over a filled cache; return hidden states, cache contents and tails."""
    cache = filled_cache(weights.config, weights.head_VD.dtype)
    forward = build(cache)
    with torch.inference_mode():
        step = inputs_of(plan, weights.config, weights.head_VD.dtype, forward.prepare(plan))
        hidden_RD = forward.hidden(replace(step, output_rows_R=output_rows_R))
    layers = [cache.slots(layer) for layer in range(weights.config.num_hidden_layers)]
    tails = [] if step.tails is None else [step.tails.keys_YBLGK, step.tails.values_YBLGK]
    return [hidden_RD, *(x for layer in layers for x in (layer.keys, layer.values)), *tails]
