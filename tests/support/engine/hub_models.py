"""Small random models of the transformers library, the reference for our own decoder."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from models.decoder.decoder import Decoder
from tests.support.engine.dense import logits_of


def build_hub_model(family: type[PretrainedConfig], **changes: Any) -> Any:
    """Build a random model in fp32 with two layers, random biases and norms."""
    torch.manual_seed(3)
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
    }
    model = AutoModelForCausalLM.from_config(family(**sizes | changes), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def hub_logits(model: Any, tokens_T: Tensor) -> Tensor:
    """Return the library's logits (T, V) over one sequence."""
    with torch.inference_mode():
        return model(tokens_T[None]).logits[0]


def largest_difference(model: Any, decoder: Decoder) -> float:
    """Return the largest difference of two models' logits over a random sequence, longer than most windows."""
    tokens_T = torch.randint(0, decoder.config.vocab_size, (120,))
    return float((logits_of(decoder, tokens_T) - hub_logits(model, tokens_T)).abs().max())
