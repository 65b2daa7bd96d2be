"""Tiny random text checkpoints for tests: a decoder, a tokenizer trained on a few lines, and a chat template."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from models.decoder.config import DecoderConfig
from models.decoder.decoder import Decoder
from models.decoder.weights import save_decoder

LINES = [
    "the tail gets out and the river runs on to the sea",
    "a turbine takes the head of the flow, 1 2 3 4 5 6 7 8 9 0",
    'naïve café, 日本語, 🎉 and {"name": "x", "age": 12}',
    "if it can be said it can be said plainly; so say it\n",
]
SPECIAL = ["<|end|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('only user and assistant speak here') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
EOS_ID = 0


def build_tokenizer() -> Tokenizer:
    """Train a byte-level BPE with an alphabet of all bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES * 5, trainer)
    return tokenizer


def write_checkpoint(
    folder: Path, *, max_positions: int = 256, seed: int = 5, scale: float = 0.5, head_dim: int = 8
) -> Path:
    """Write a folder in Hugging Face layout; a larger `scale` makes the distribution over tokens sharper."""
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    decoder = Decoder(
        DecoderConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
        )
    ).eval()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    save_decoder(decoder, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID}))
    config = {"eos_token": SPECIAL[0], "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def overflowing(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return finite weights whose logits are beyond fp32."""
    factors = {"model.embed_tokens.weight": 1e15, "model.norm.weight": 1e25}
    return {name: tensor * factors.get(name, 1.0) for name, tensor in tensors.items()}
