"""Published training runs beyond FSDP in bf16 on A100 and H100: facts with sources, and the planner's predictions.

Throughput is in tokens per second and GPU, or in model TFLOP/s per GPU if a source gives only that. Techniques are
the trainer's.
"""

from dataclasses import dataclass, replace

from benchmarks.plan.runs import Predicted
from pipelines.planner.devices import Device, Gpus, device_named
from pipelines.planner.mesh import Execution, ParallelLayout
from pipelines.planner.shapes import DecoderShape, Experts
from pipelines.planner.step_time import Constants, Group, group_of, step_time

MEGATRON = "Narayanan et al. 2021 (arXiv 2104.04473), table 1"
KORTHIKANTI = "Korthikanti et al. 2022 (arXiv 2205.05198), table 5"
LLAMA_3 = "Llama team 2024 (arXiv 2407.21783), table 4"
TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_ASYNC = "torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
NEMO = "NVIDIA NeMo 24.07, performance summary"
BRIDGE = "NVIDIA Megatron-Bridge, performance summary archive"
TRAINY = "torchtitan, benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md"
AUTOMODEL = "NVIDIA NeMo AutoModel, performance summary"
SHOEYBI = "Shoeybi et al. 2019 (arXiv 1909.08053)"

_TITAN_LINK = 2.4e12
"""Memory bandwidth of torchtitan's H100s with HBM2e, which have 96 GB and a limit of 500 W."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CitedRun:
    """One published run. `batch` is the number of rows of a step."""

    source: str
    shape: DecoderShape
    device: Device
    layout: ParallelLayout
    length: int
    execution: Execution
    dtype: str = "bf16"
    tokens_per_s: float
    """Of one GPU."""

    def group(self, constants: Constants) -> Group:
        """Return the group of the run's interval."""
        return group_of(self.shape, self.layout, self.device, constants, dtype=self.dtype, execution=self.execution)


def predict_cited(run: CitedRun, constants: Constants | None = None) -> Predicted:
    """Return the planner's tokens per second and GPU for a run."""
    layout = run.layout
    step = step_time(
        run.shape,
        layout,
        run.length,
        Gpus(run.device, layout.num_gpus),
        dtype=run.dtype,
        execution=run.execution,
        constants=constants,
    )
    tokens = layout.batch * run.length / layout.num_gpus
    return Predicted(tokens / step.total_s, tokens / step.high_s, tokens / step.low_s)


def _decoder(
    name: str, layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, matrices: int = 3
) -> DecoderShape:
    return DecoderShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=hidden // heads,
        ffn_size=ffn,
        ffn_matrices=matrices,
        vocab_size=vocab,
        is_tied=matrices == 2,
    )


def _gpt(name: str, layers: int, hidden: int, heads: int, vocab: int = 51_200) -> DecoderShape:
    return _decoder(name, layers, hidden, heads, heads, 4 * hidden, vocab, matrices=2)


_LLAMA_3_8B = _decoder("Llama-3-8B", 32, 4_096, 32, 8, 14_336, 128_256)
_LLAMA_3_70B = _decoder("Llama-3-70B", 80, 8_192, 64, 8, 28_672, 128_256)
_LLAMA_3_405B = _decoder("Llama-3-405B", 126, 16_384, 128, 8, 53_248, 128_256)
_LLAMA_2_13B = _decoder("Llama-2-13B", 40, 5_120, 40, 40, 13_824, 32_000)
_LLAMA_2_70B = _decoder("Llama-2-70B", 80, 8_192, 64, 8, 28_672, 32_000)
_GPT_20B, _GPT_175B = _gpt("GPT3-20B", 44, 6_144, 48), _gpt("GPT3-175B", 96, 12_288, 96)
_NEMOTRON_8B = _gpt("Nemotron-8B", 32, 4_096, 32, 256_000)
_NEMOTRON_22B = _gpt("Nemotron-22B", 40, 6_144, 48, 256_000)
_NEMOTRON_340B = _decoder("Nemotron-340B", 96, 18_432, 96, 8, 73_728, 256_000, matrices=2)

_A100, _H100 = device_named("a100-80"), device_named("h100")
_TITAN_H100 = replace(_H100, memory_bytes_per_s=_TITAN_LINK)
_TITAN_TP = Execution(sequence_parallel=True, vocab_parallel=True)
_TITAN_ASYNC_TP = replace(_TITAN_TP, async_tp=True)


def _megatron() -> list[CitedRun]:
    """Full recomputation (counted in FLOPs, their equation 3), no sequence parallelism, micro-batches of one row."""
    rows = (
        (24, 2_304, 24, 1, 1, 32, 512, 137),
        (30, 3_072, 32, 2, 1, 64, 512, 138),
        (36, 4_096, 32, 4, 1, 128, 512, 142),
        (40, 6_144, 48, 8, 1, 256, 1_024, 135),
        (48, 8_192, 64, 8, 2, 512, 1_536, 138),
        (60, 10_240, 80, 8, 4, 1_024, 1_792, 140),
        (80, 12_288, 96, 8, 8, 1_536, 2_304, 148),
        (96, 16_384, 128, 8, 16, 1_920, 2_160, 155),
        (105, 20_480, 128, 8, 35, 2_520, 2_520, 163),
        (128, 25_600, 160, 8, 64, 3_072, 3_072, 163),
    )
    length, vocab = 2_048, 51_200
    runs = []
    for layers, hidden, heads, tensor, pipeline, num_gpus, batch, tflops in rows:
        data = num_gpus // tensor // pipeline
        flops = 96 * layers * hidden**2 * (1 + length / (6 * hidden) + vocab / (16 * layers * hidden))
        layout = ParallelLayout(
            data=data, tensor=tensor, pipeline=pipeline, accumulation=batch // data, checkpointing="full"
        )
        runs.append(
            CitedRun(
                source=MEGATRON,
                shape=_gpt("GPT", layers, hidden, heads),
                device=_A100,
                layout=layout,
                length=length,
                execution=Execution(vocab_parallel=True),
                tokens_per_s=tflops * 1e12 / flops,
            )
        )
    return runs


def _korthikanti() -> list[CitedRun]:
    """Sequence parallelism, selective recomputation; 175 and 530 billion parameters with three stages per rank."""
    rows = (
        (48, 6_144, 64, 1, 1, 4, 1.10),
        (96, 12_288, 96, 8, 3, 64, 13.75),
        (105, 20_480, 128, 35, 3, 280, 37.83),
        (128, 25_600, 160, 64, 1, 512, 71.49),
    )
    runs = []
    for layers, hidden, heads, pipeline, stages, batch, seconds in rows:
        layout = ParallelLayout(tensor=8, pipeline=pipeline, accumulation=batch, checkpointing="none")
        if pipeline == 1:
            layout = replace(layout, micro_batch=batch, accumulation=1)
        runs.append(
            CitedRun(
                source=KORTHIKANTI,
                shape=_gpt("GPT", layers, hidden, heads),
                device=_A100,
                layout=layout,
                length=2_048,
                execution=replace(_TITAN_TP, virtual_stages=stages),
                tokens_per_s=batch * 2_048 / seconds / layout.num_gpus,
            )
        )
    return runs


def _llama_3() -> list[CitedRun]:
    """Without context parallelism; 126 layers on 16 ranks with eight runs of layers each."""
    runs = []
    for data, rows, tflops in ((64, 32, 430), (128, 16, 400)):
        layout = ParallelLayout(data=data, tensor=8, pipeline=16, accumulation=rows)
        per_token = _LLAMA_3_405B.training_flops(1, 8_192)
        runs.append(
            CitedRun(
                source=LLAMA_3,
                shape=_LLAMA_3_405B,
                device=_H100,
                layout=layout,
                length=8_192,
                execution=replace(_TITAN_TP, virtual_stages=8),
                tokens_per_s=tflops * 1e12 / per_token,
            )
        )
    return runs


def _titan() -> list[CitedRun]:
    """FSDP2 with tensor parallelism over 8, and with pipelines of 8 in 8 micro-batches; float8 layer products."""

    def run(
        source: str, shape: DecoderShape, layout: ParallelLayout, dtype: str, tokens: float, execution: Execution
    ) -> CitedRun:
        return CitedRun(
            source=source,
            shape=shape,
            device=_TITAN_H100,
            layout=layout,
            length=8_192,
            execution=execution,
            dtype=dtype,
            tokens_per_s=tokens,
        )

    large = ParallelLayout(shard=32, tensor=8, micro_batch=16, checkpointing="full")
    small = ParallelLayout(shard=8, tensor=8, micro_batch=12, checkpointing="selective")
    whole = ParallelLayout(shard=8, tensor=8, pipeline=8, micro_batch=4, accumulation=8, checkpointing="full")
    plain, overlapped = _TITAN_TP, _TITAN_ASYNC_TP
    staged = replace(overlapped, keep_gathered=True)
    return [
        run(TITAN_ASYNC, _LLAMA_3_70B, large, "bf16", 597.3, plain),
        run(TITAN_ASYNC, _LLAMA_3_70B, large, "bf16", 652.4, overlapped),
        run(TITAN_ASYNC, _LLAMA_3_70B, large, "fp8", 809.8, plain),
        run(TITAN_ASYNC, _LLAMA_3_70B, large, "fp8", 942.4, overlapped),
        run(TITAN, _LLAMA_3_70B, large, "fp8", 829, plain),
        run(TITAN, _LLAMA_3_70B, large, "fp8", 876, overlapped),
        run(TITAN_ASYNC, _LLAMA_3_8B, small, "bf16", 4_378, plain),
        run(TITAN_ASYNC, _LLAMA_3_8B, small, "bf16", 4_809.4, overlapped),
        run(TITAN_ASYNC, _LLAMA_3_8B, small, "fp8", 5_078.1, plain),
        run(TITAN_ASYNC, _LLAMA_3_8B, small, "fp8", 5_570.1, overlapped),
        run(TITAN, _LLAMA_3_405B, whole, "fp8", 100, staged),
        run(TITAN, _LLAMA_3_405B, whole, "fp8", 128, replace(staged, virtual_stages=2)),
    ]


def _nemo() -> list[CitedRun]:
    """In fp8 with sequence parallelism, overlapped tensor parallelism and interleaved stages."""
    rows = (
        (NEMO, _GPT_20B, 64, 256, 2, 2_048, 2, 1, 1, 5_851),
        (NEMO, _GPT_175B, 128, 256, 1, 2_048, 4, 8, 6, 726),
        (NEMO, _GPT_175B, 512, 2_048, 2, 2_048, 4, 8, 6, 782),
        (NEMO, _LLAMA_2_13B, 16, 128, 1, 4_096, 1, 4, 10, 8_646),
        (NEMO, _LLAMA_2_70B, 64, 128, 1, 4_096, 4, 4, 20, 1_707),
        (NEMO, _NEMOTRON_8B, 64, 256, 4, 4_096, 2, 1, 1, 12_701),
        (NEMO, _NEMOTRON_22B, 64, 256, 2, 4_096, 2, 4, 10, 4_256),
        (NEMO, _NEMOTRON_340B, 128, 32, 1, 4_096, 8, 8, 12, 322),
        (BRIDGE, _LLAMA_3_70B, 64, 128, 1, 8_192, 4, 8, 5, 1_619),
        (BRIDGE, _LLAMA_3_70B, 64, 256, 1, 8_192, 4, 8, 5, 1_621),
    )
    runs = []
    for source, shape, num_gpus, batch, micro_batch, length, tensor, pipeline, stages, tokens in rows:
        data = num_gpus // tensor // pipeline
        layout = ParallelLayout(
            data=data,
            tensor=tensor,
            pipeline=pipeline,
            micro_batch=micro_batch,
            accumulation=batch // data // micro_batch,
        )
        runs.append(
            CitedRun(
                source=source,
                shape=shape,
                device=_H100,
                layout=layout,
                length=length,
                execution=replace(_TITAN_ASYNC_TP, virtual_stages=stages),
                dtype="fp8",
                tokens_per_s=tokens,
            )
        )
    return runs


def _titan_fsdp() -> list[CitedRun]:
    """FSDP2, two rows of 8,192 tokens per GPU, selective recomputation, on H100 and H200."""
    rows = (
        (TITAN, _TITAN_H100, 8, "fp8", 8_532),
        (TITAN, _TITAN_H100, 128, "fp8", 8_380),
        (TRAINY, device_named("h200"), 32, "fp8", 10_938),
        (TRAINY, device_named("h200"), 64, "fp8", 10_753),
    )
    return [
        CitedRun(
            source=source,
            shape=_LLAMA_3_8B,
            device=device,
            layout=ParallelLayout(shard=num_gpus, micro_batch=2, checkpointing="selective"),
            length=8_192,
            execution=Execution(),
            dtype=dtype,
            tokens_per_s=tokens,
        )
        for source, device, num_gpus, dtype, tokens in rows
    ]


def _blackwell() -> list[CitedRun]:
    """In fp8 on B200 and GB200, with the techniques of `_nemo`."""
    rows = (
        ("gb200", _LLAMA_3_8B, ParallelLayout(data=8, micro_batch=2, accumulation=8), 1, 31_508),
        ("b200", _LLAMA_3_8B, ParallelLayout(data=8, micro_batch=2, accumulation=8), 1, 30_624),
        ("gb200", _LLAMA_3_70B, ParallelLayout(shard=64, micro_batch=2, accumulation=2), 1, 4_312),
        ("gb200", _LLAMA_3_70B, ParallelLayout(data=8, tensor=2, pipeline=4, accumulation=16), 5, 3_546),
        ("gb200", _LLAMA_3_405B, ParallelLayout(data=4, tensor=4, pipeline=16, accumulation=384), 4, 813),
    )
    return [
        CitedRun(
            source=BRIDGE,
            shape=shape,
            device=device_named(device),
            layout=layout,
            length=8_192,
            execution=replace(_TITAN_ASYNC_TP, virtual_stages=stages),
            dtype="fp8",
            tokens_per_s=tokens,
        )
        for device, shape, layout, stages, tokens in rows
    ]


def _volta() -> list[CitedRun]:
    """1.2 billion parameters on one V100 at 39 TFLOP/s, 8.3 billion on 512 at 15.1 PFLOP/s."""
    rows = (
        (40, 1_536, 16, ParallelLayout(micro_batch=8), 39.0),
        (72, 3_072, 32, ParallelLayout(data=64, tensor=8, micro_batch=8), 29.5),
    )
    runs = []
    for layers, hidden, heads, layout, tflops in rows:
        flops = 96 * layers * hidden**2 * (1 + 1_024 / (6 * hidden) + 51_200 / (16 * layers * hidden))
        runs.append(
            CitedRun(
                source=SHOEYBI,
                shape=_gpt("GPT-2", layers, hidden, heads),
                device=device_named("v100"),
                layout=replace(layout, checkpointing="full"),
                length=1_024,
                execution=Execution(vocab_parallel=True),
                tokens_per_s=tflops * 1e12 / flops,
            )
        )
    return runs


def _experts() -> list[CitedRun]:
    """Mixtures of experts in bf16 on eight H100s: FSDP, with expert parallelism in the first."""
    qwen = _decoder("Qwen3-30B-A3B", 48, 2_048, 32, 4, 6_144, 151_936)
    gpt_oss = _decoder("gpt-oss-20b", 24, 2_880, 64, 8, 2_880, 201_088)
    rows = (
        (replace(qwen, head_dim=128, experts=_mixture(qwen, 128, 8, 768)), 4, 16, 12_040),
        (replace(gpt_oss, head_dim=64, windows=(128,) * 12, experts=_mixture(gpt_oss, 32, 4, 2_880)), 2, 16, 13_058),
    )
    return [
        CitedRun(
            source=AUTOMODEL,
            shape=shape,
            device=_H100,
            layout=ParallelLayout(shard=8, micro_batch=micro_batch, accumulation=accumulation),
            length=4_096,
            execution=Execution(),
            tokens_per_s=tokens,
        )
        for shape, micro_batch, accumulation, tokens in rows
    ]


def _mixture(shape: DecoderShape, num: int, per_token: int, size: int) -> Experts:
    router = num * shape.hidden_size
    return Experts(num=num, per_token=per_token, ffn_size=size, num_layers=shape.num_layers, router_numbers=router)


CITED_RUNS = (
    *_megatron(),
    *_korthikanti(),
    *_llama_3(),
    *_titan(),
    *_nemo(),
    *_titan_fsdp(),
    *_blackwell(),
    *_volta(),
    *_experts(),
)
