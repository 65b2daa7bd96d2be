"""Training tokens per second, and model FLOPs utilisation (MFU): model FLOPs as a fraction of the device's peak.

A multiply-add is two FLOPs, and the backward pass takes twice the FLOPs of the forward pass, so a weight of the layers
costs 6 FLOPs per token (Chowdhery et al. 2022, PaLM, appendix B). As there, attention scores and sums are added, here
over the causal half only, and so is the softmax over the items that a label is compared with. Padding, embeddings,
norms, dropout and the optimizer do not count.
"""

from collections.abc import Iterable

import torch

from models.decoder.config import DecoderConfig
from pipelines.planner.devices import device_of_driver
from pipelines.training.parallel.mesh import ONE_PROCESS, Mesh
from pipelines.training.parallel.recompute import flops_factor
from services.llm.engine.cost.machine_limits import measure_limits

SPEED = "speed.json"
_FLOPS = 6
"""FLOPs of forward and backward pass per multiply-add of the forward pass."""


def decoder_work(config: DecoderConfig, num_tokens: int) -> int:
    """Return the multiply-adds of one prompt of this many tokens, without embeddings and output head."""
    attention_width = config.num_attention_heads * config.head_dim
    key_value_width = config.num_key_value_heads * config.head_dim
    projections = config.hidden_size * (2 * attention_width + 2 * key_value_width + 3 * config.intermediate_size)
    attention = attention_width * (num_tokens + 1)  # scores and sums, over half of the square
    return config.num_hidden_layers * num_tokens * (projections + attention)


def training_flops(config: DecoderConfig, lengths: Iterable[int], num_scores: int) -> int:
    """Return the FLOPs of one step over windows of these lengths in tokens.

    `num_scores` counts products of a hidden state and a row of the head.
    """
    return _FLOPS * (sum(decoder_work(config, length) for length in lengths) + num_scores * config.hidden_size)


def speed_of(
    num_tokens: int, flops: int, seconds: float, device: torch.device, mesh: Mesh = ONE_PROCESS
) -> dict[str, float | None]:
    """Return tokens and FLOPs per second of all processes, their MFU by data sheet and by measured peak, and HFU.

    HFU includes recomputation. The MFU by data sheet is null if no data sheet gives the peak, as for any CPU.
    """
    sheet = device_of_driver(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    flops_per_s = flops / seconds
    dtype = torch.bfloat16 if mesh.method.uses_bf16(device) else torch.float32
    measured = mesh.world_size * measure_limits(device, dtype).flops_per_s
    again = flops_factor(mesh.method.recompute, device, dtype)
    return {
        "tokens_per_s": num_tokens / seconds,
        "flops_per_s": flops_per_s,
        "mfu": None if sheet is None else flops_per_s / (mesh.world_size * sheet.flops_per_s["bf16"]),
        "measured_peak_flops_per_s": measured,
        "mfu_of_measured": flops_per_s / measured,
        "hfu_of_measured": flops_per_s * again / measured,
    }
