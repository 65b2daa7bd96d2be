"""Small recommenders as frameworks write them: a random checkpoint with SID tokens, an index and test rows."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from pipelines.foreign.examples import MINIONEREC_PIECES

FAMILIES: dict[str, type[PretrainedConfig]] = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
LEVEL_SIZE = 16
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM, INSTRUCTION = "Below is an instruction.", "Can you predict the next possible item that the user may expect?"


@dataclass(frozen=True)
class Recommender:
    """A framework's folder: checkpoint, index, and the code of each item as token names."""

    folder: Path
    index: Path
    sids: dict[str, list[str]]

    @property
    def item_ids(self) -> list[str]:
        """The items in the index's order."""
        return list(self.sids)

    def text_of(self, row: int) -> str:
        return "".join(self.sids[self.item_ids[row]])


def sid_names(depth: int = 3, pattern: str = "<{level}_{code}>") -> list[str]:
    """Return all SID tokens, sorted as text like the frameworks' `sorted(set)`."""
    names = [pattern.format(level="abcd"[level], code=code) for level in range(depth) for code in range(LEVEL_SIZE)]
    return sorted(names)


def write_tokenizer(folder: Path, names: Sequence[str]) -> Tokenizer:
    """Write a byte-level BPE tokenizer with a chat template and the SID tokens, which are not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*MINIONEREC_PIECES, SYSTEM, INSTRUCTION] * 3, trainer)
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=True) for name in names])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def write_model(folder: Path, family: str, vocab_size: int, **changes: int) -> None:
    """Write a random checkpoint of two layers, peaked enough that ties are rare."""
    torch.manual_seed(7)
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
    }
    model = AutoModelForCausalLM.from_config(FAMILIES[family](**sizes | changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.05}
    (folder / "generation_config.json").write_text(json.dumps(settings))


def random_sids(num_items: int, depth: int = 3, num_shared: int = 6) -> dict[str, list[str]]:
    """Return SIDs of items; a few items share a code, and most prefixes of two codes have one third code."""
    draw = np.random.default_rng(3)
    codes = [tuple(draw.integers(0, LEVEL_SIZE, depth).tolist()) for _ in range(num_items)]
    codes[-num_shared:] = codes[:num_shared]
    return {
        f"i{row:03}": [f"<{'abcd'[level]}_{code}>" for level, code in enumerate(item_codes)]
        for row, item_codes in enumerate(codes)
    }


def write_recommender(
    folder: Path, family: str = "qwen3", num_items: int = 300, depth: int = 3, num_shared: int = 6
) -> Recommender:
    """Write a MiniOneRec folder."""
    sids = random_sids(num_items, depth, num_shared)
    tokenizer = write_tokenizer(folder / "model", sid_names(depth))
    write_model(folder / "model", family, tokenizer.get_vocab_size() + 5)  # padded, as frameworks do
    index = folder / "Toys.index.json"
    index.write_text(json.dumps(sids))
    return Recommender(folder / "model", index, sids)


def write_csv_rows(made: Recommender, path: Path, num_rows: int, max_items: int = 10) -> list[tuple[list[int], int]]:
    """Write MiniOneRec's test rows, and return the history and label of each as rows of the index."""
    draw, cases = np.random.default_rng(5), []
    lines = ["user_id,history_item_sid,item_sid"]
    for number in range(num_rows):
        length = max_items if number == 0 else int(draw.integers(1, max_items + 1))
        history, label = draw.integers(0, len(made.sids), length).tolist(), int(draw.integers(0, len(made.sids)))
        listed = str([made.text_of(row) for row in history])
        lines.append(f'u{number},"{listed}",{made.text_of(label)}')
        cases.append((history, label))
    path.write_text("\n".join(lines))
    return cases


def write_chat_rows(made: Recommender, path: Path, num_rows: int, max_items: int = 10) -> list[tuple[list[int], int]]:
    """Write MIMIGenRec's test rows, and return the history and label of each as rows of the index."""
    draw, cases, rows = np.random.default_rng(6), [], []
    for _ in range(num_rows):
        history = draw.integers(0, len(made.sids), int(draw.integers(1, max_items + 1))).tolist()
        label = int(draw.integers(0, len(made.sids)))
        text = "The interaction history: " + ", ".join(made.text_of(row) for row in history)
        rows.append({"system": SYSTEM, "instruction": INSTRUCTION, "input": text, "output": made.text_of(label)})
        cases.append((history, label))
    path.write_text(json.dumps(rows))
    return cases
