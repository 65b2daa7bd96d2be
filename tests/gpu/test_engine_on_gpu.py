"""The engine on a CUDA device returns the same results as on the CPU, with captured steps and without.

`make gpu-check` runs this file and the benchmarks (docs/benchmarks.md), on a device that has torch, triton, numpy,
safetensors, tokenizers, pytest and pytest-xdist. Triton's compiler takes most of the time, and caches its results in
`TRITON_CACHE_DIR`: `make gpu-check PART=tests` reruns only this file, and `PART=kernel-tests` the kernels' own tests,
compiled instead of interpreted.

If this file fails, the kernels' tests name the kernel. If those pass, `-k "ahead and False"` runs the engine without
captured steps and `-k "ahead and True"` with them. `CUDA_LAUNCH_BLOCKING=1` names the launch that fails without
captured steps, `compute-sanitizer` the access. After one failure on the device every later test of the process fails:
run one at a time. If `tests.support.engine.attention_shapes` is not found, an installed package is named `tests` too.
docs/lab-notes/engine.md#gpu-kernels has the tolerances and the expected step times.
"""

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from models.decoder.config import DecoderConfig
from models.decoder.decoder import Decoder
from models.decoder.window import Window
from services.llm.engine.beam.trie import ItemCodes
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine
from services.llm.engine.forward.weights import join_weights
from services.llm.engine.kv.cache import KvCache
from services.llm.engine.kv.memory import KvMemory
from services.llm.engine.outcome import EngineOutcome, SequenceStatus
from services.llm.engine.ranks import LeadRank
from services.llm.engine.sampling_parameters import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LEVEL_SIZES = (40, 50, 60)
LLAMA = DecoderConfig(
    vocab_size=1 + sum(LEVEL_SIZES),
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=2_048,
)
FAMILIES = {
    "llama": LLAMA,
    "qwen2": replace(LLAMA, qkv_bias=True),
    "qwen3": replace(LLAMA, qk_norm=True, num_attention_heads=9, num_key_value_heads=3),
    "windowed": replace(LLAMA, window=Window(64, frozenset({0, 2}), num_sinks=4)),
}
SMALL = EngineConfig(num_blocks=1_024, tile_tokens=128, max_running=16, max_beam_rows=256, cpu_kernels="torch")


def items(depth: int = 3) -> ItemCodes:
    """A random catalogue of 5,000 items."""
    rng = np.random.default_rng(2)
    codes = np.stack([rng.integers(0, size, 5_000) for size in LEVEL_SIZES[:depth]], axis=1)
    return ItemCodes(codes=codes, level_sizes=LEVEL_SIZES[:depth], token_offsets=(1, 41, 91)[:depth])


def decoder(shape: DecoderConfig) -> Decoder:
    """A random decoder over that catalogue's vocabulary, in fp32."""
    torch.manual_seed(4)
    return Decoder(shape).eval()


def warm_engine(
    device: str,
    shape: DecoderConfig,
    config: EngineConfig,
    dtype: torch.dtype = torch.float32,
    memory: KvMemory | None = None,
) -> Engine:
    """Build an engine and capture its steps if graphs are available; a following engine has its own version."""
    version = "v1" if memory is None else "v2"
    engine = Engine(decoder(shape).to(device, dtype), config, items=items(), bundle_version=version, memory=memory)
    engine.warm_up()
    return engine


SAMPLINGS = (
    SamplingParams(),
    SamplingParams(num_logprobs=3),
    SamplingParams(presence_penalty=1.5),
    SamplingParams(temperature=0.7, seed=9),
    SamplingParams(temperature=0.5, top_k=5, top_p=0.9, min_p=0.01),
    SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5, logit_bias={3: 2.0}),
)


def add_texts(engine: Engine) -> None:
    for index, sampling in enumerate(SAMPLINGS):
        engine.add_text(f"s{index}", [1 + index, 2, 3], max_new_tokens=12, sampling=sampling)


def outcomes_of(engine: Engine) -> dict[str, EngineOutcome]:
    """Rank and write for requests of all lengths and widths."""
    for index in range(12):
        prompt = np.random.default_rng(index).integers(1, 151, 10 + 100 * index).tolist()
        engine.add_rank(f"r{index}", prompt, k=20, excluded=np.arange(index), beam_width=(64, 20, 130)[index % 3])
        engine.add_text(f"t{index}", prompt, max_new_tokens=8)
    outcomes: dict[str, EngineOutcome] = {}
    while engine.has_work:
        outcomes |= {outcome.request_id: outcome for outcome in engine.step(0.0)}
    assert engine.graph_counts.late_captures == engine.graph_counts.eager_fallbacks == 0
    return outcomes


def assert_alike(there: dict[str, EngineOutcome], here: dict[str, EngineOutcome], noise: float = 1e-3) -> None:
    """Assert equal scores within fp32 noise, equal items except near-ties, and equal beginnings of greedy texts."""
    for name, wanted in here.items():
        if name.startswith("r"):
            assert np.allclose(there[name].scores, wanted.scores, atol=noise), name
            assert len(set(there[name].item_indices) & set(wanted.item_indices)) >= 19, name
        else:
            assert there[name].token_ids[:3] == wanted.token_ids[:3], name


@pytest.fixture(autouse=True)
def _exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("rows", [(1,), (7,), (3, 4), (0,)])
def test_logits_of_bf16_are_not_rounded(rows: tuple[int, ...]) -> None:
    """The scores are fp32 sums of arbitrary rows with a level's output matrix, mostly between two bf16 numbers."""
    from services.llm.engine.gpu.forward import triton_forward

    made = decoder(LLAMA).to("cuda", torch.bfloat16)
    cache = KvCache(LLAMA, 4, SMALL.block_tokens, torch.bfloat16, torch.device("cuda"), "model")
    forward = triton_forward(join_weights(made), cache)
    hidden_RD = torch.randn(*rows, LLAMA.hidden_size, device="cuda").bfloat16()

    with torch.inference_mode():
        logits_RS = forward.logits(hidden_RD, 41, 91)

    wanted_RS = hidden_RD.float() @ made.head_weight_VD[41:91].float().T
    assert logits_RS.dtype == torch.float32
    assert logits_RS.shape == (*rows, 50)
    assert torch.allclose(logits_RS, wanted_RS, atol=1e-4)
    assert logits_RS.numel() == 0 or (logits_RS != logits_RS.bfloat16()).float().mean() > 0.5


@pytest.mark.parametrize("kv_kind", ["int8", "fp8"])
def test_narrow_caches_equal_cpu(kv_kind: str) -> None:
    """Rankings, their scores and greedy texts agree with the torch reference for each kind of cache.

    A number halfway between two codes rounds to either by fp32 noise: with weights that differ by 1e-6, scores differed
    by up to 0.0034.
    """
    config = replace(SMALL, kv_kind=kv_kind)

    there, here = (outcomes_of(warm_engine(device, LLAMA, config)) for device in ("cuda", "cpu"))

    assert_alike(there, here, 1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_cpu(family: str) -> None:
    """The engine supports biases, head norms, odd numbers of heads, and windows with sinks."""
    there, here = (outcomes_of(warm_engine(device, FAMILIES[family], SMALL)) for device in ("cuda", "cpu"))

    assert_alike(there, here)


@pytest.mark.parametrize("uses_graphs", [True, False])
def test_graphs_and_running_a_step_ahead_change_nothing(uses_graphs: bool) -> None:
    """Captured steps, with tokens fed on the device or not, and uncaptured steps give the same results."""
    config = replace(SMALL, uses_graphs=uses_graphs, is_asynchronous=True)

    ahead = outcomes_of(warm_engine("cuda", LLAMA, config))
    waiting = outcomes_of(warm_engine("cuda", LLAMA, replace(SMALL, uses_graphs=False, is_asynchronous=False)))

    assert_alike(ahead, waiting)


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_drafts_change_nothing(is_asynchronous: bool) -> None:
    """Verified drafts, whose rows run as a captured prompt, give the results of plain decoding."""
    config = replace(SMALL, is_asynchronous=is_asynchronous)
    drafting = warm_engine("cuda", LLAMA, replace(config, num_speculative_tokens=7))

    assert_alike(outcomes_of(drafting), outcomes_of(warm_engine("cuda", LLAMA, config)))
    assert drafting.draft_counts.num_accepted > 0


def test_one_rank_changes_nothing() -> None:
    """An engine that sums over a group of one NCCL rank gives the results of an engine without a group."""
    ranks = LeadRank(Path(), torch.float32, "cuda", SMALL, items())
    engine = Engine(decoder(LLAMA).to("cuda"), SMALL, items=items(), bundle_version="v1", ranks=ranks)

    assert_alike(outcomes_of(engine), outcomes_of(warm_engine("cuda", LLAMA, replace(SMALL, uses_graphs=False))))
    engine.close()


def test_nothing_waits_for_the_device_but_collecting() -> None:
    """Starting steps of rankings and texts with any setting makes no synchronising call; the final event is exempt."""
    engine = warm_engine("cuda", LLAMA, replace(SMALL, is_asynchronous=True))
    add_texts(engine)
    outcomes_of(engine)  # objects that are built or cached on first use

    torch.cuda.set_sync_debug_mode("error")
    try:
        add_texts(engine)
        outcomes = outcomes_of(engine)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert all(outcome.status in (SequenceStatus.DONE, SequenceStatus.LENGTH) for outcome in outcomes.values())


def test_texts_with_every_setting_run_beside_greedy_ones() -> None:
    """Draws, penalties and logprobs are computed from the outputs of a captured step."""
    there, here = (warm_engine(device, LLAMA, SMALL) for device in ("cuda", "cpu"))

    for engine in (there, here):
        add_texts(engine)
    outcomes, wanted = outcomes_of(there), outcomes_of(here)

    for index in range(len(SAMPLINGS)):
        assert outcomes[f"s{index}"].token_ids[:3] == wanted[f"s{index}"].token_ids[:3]
    assert outcomes["s1"].tokens[0].logprob == pytest.approx(wanted["s1"].tokens[0].logprob, abs=1e-3)


def test_half_precision_stays_near() -> None:
    """Most items in bf16 equal the items in fp32."""
    half = outcomes_of(warm_engine("cuda", LLAMA, SMALL, torch.bfloat16))
    full = outcomes_of(warm_engine("cuda", LLAMA, SMALL))

    shares = [
        len(set(half[name].item_indices) & set(full[name].item_indices)) / 20 for name in full if name.startswith("r")
    ]
    assert np.mean(shares) > 0.7


def test_an_engine_is_made_ready_while_another_serves() -> None:
    """Two engines with one KV memory give the same results as separately, during a capture and concurrently."""
    config = replace(SMALL, is_asynchronous=True, num_blocks=640)
    wanted = outcomes_of(warm_engine("cuda", LLAMA, SMALL))
    serving = warm_engine("cuda", LLAMA, config)
    with ThreadPoolExecutor(1) as loader:
        loading = loader.submit(warm_engine, "cuda", LLAMA, config, memory=serving.memory)
        rounds = [outcomes_of(serving)]
        while not loading.done():
            rounds.append(outcomes_of(serving))
        following = loading.result()
        both = [loader.submit(outcomes_of, following), *(outcomes_of(serving) for _ in range(3))]
        rounds += [both[0].result(), *both[1:], outcomes_of(following)]

    assert following.memory is serving.memory
    serving.check_integrity(following)
    for outcomes in rounds:
        assert_alike(outcomes, wanted)


@pytest.mark.parametrize("shares_memory", [True, False])
def test_an_engine_goes_on_after_another_one_and_its_graphs_are_gone(shares_memory: bool) -> None:
    """After a bundle swap, captured graphs keep using their own workspaces, in replays and in eager work."""
    wanted = outcomes_of(warm_engine("cuda", LLAMA, SMALL))
    before = warm_engine("cuda", LLAMA, SMALL)
    after = warm_engine("cuda", LLAMA, SMALL, memory=before.memory if shares_memory else None)
    outcomes_of(before)

    del before
    gc.collect()
    torch.cuda.empty_cache()
    taken = [torch.full((2**20,), torch.nan, device="cuda") for _ in range(64)]  # freed memory is overwritten
    rounds = [outcomes_of(after), outcomes_of(after)]

    assert len(taken) == 64
    for outcomes in rounds:
        assert_alike(outcomes, wanted)


def test_memory_does_not_grow() -> None:
    """After warm-up, a second set of requests allocates no further memory."""
    engine = warm_engine("cuda", LLAMA, SMALL)
    outcomes_of(engine)
    before = torch.cuda.memory_allocated()

    outcomes_of(engine)

    assert torch.cuda.memory_allocated() - before < 2**20
    engine.check_integrity()
