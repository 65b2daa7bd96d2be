"""The engine on a CUDA device gives what it gives on the CPU. `pytest tests/gpu`."""

import numpy as np
import pytest
import torch

from models.decoder import Decoder, DecoderConfig
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine
from services.llm.engine.outcome import Outcome
from services.llm.engine.trie import ItemCodes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LEVEL_SIZES = (40, 50, 60)


def items() -> ItemCodes:
    """A random catalogue of 5,000 items of depth 3."""
    rng = np.random.default_rng(2)
    codes = np.stack([rng.integers(0, size, 5_000) for size in LEVEL_SIZES], axis=1)
    return ItemCodes(codes=codes, level_sizes=LEVEL_SIZES, token_offsets=(1, 41, 91))


def decoder() -> Decoder:
    """A random decoder over that catalogue's vocabulary, in fp32."""
    torch.manual_seed(4)
    config = DecoderConfig(
        vocab_size=1 + sum(LEVEL_SIZES),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2_048,
    )
    return Decoder(config).eval()


def outcomes_on(device: str, kv_kind: str) -> dict[str, Outcome]:
    """Rank and write for a crowd of requests of all lengths on one device."""
    config = EngineConfig(num_blocks=1_024, kv_kind=kv_kind, tile_tokens=128)
    engine = Engine(decoder().to(device), config, items=items(), bundle_version="v1")
    for index in range(12):
        prompt = np.random.default_rng(index).integers(1, 151, 10 + 100 * index).tolist()
        engine.add_rank(f"r{index}", prompt, k=20, allowed=np.ones(5_000, dtype=bool), beam_width=64)
        engine.add_text(f"t{index}", prompt, max_new_tokens=8)
    found: dict[str, Outcome] = {}
    while engine.has_work:
        found |= {outcome.request_id: outcome for outcome in engine.step(0.0)}
    engine.check_integrity()
    return found


@pytest.mark.parametrize("kv_kind", ["model", "int8", "fp8"])
def test_gpu_equals_cpu(kv_kind: str) -> None:
    """Rankings, their scores and greedy texts agree between the Triton kernels and the torch reference."""
    torch.backends.cuda.matmul.allow_tf32 = False

    there, here = outcomes_on("cuda", kv_kind), outcomes_on("cpu", kv_kind)

    for name, wanted in here.items():
        if name.startswith("r"):
            assert np.allclose(there[name].scores, wanted.scores, atol=1e-3)
            assert len(set(there[name].item_indices) & set(wanted.item_indices)) >= 19
        else:
            assert there[name].token_ids[:3] == wanted.token_ids[:3]
