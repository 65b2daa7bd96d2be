"""Trains a recommender as MiniOneRec does, and writes it in that framework's layout.

    model/           Hugging Face folder: Qwen2 of four layers from random weights, or a given base with added tokens
    index.json       item -> SID tokens, three levels of 256 codes by residual quantisation
    test.csv         rows of history_item_sid and item_sid

A row's label is the item after its history of at most 10 items: the last item of a user for tests, the one before it
for training (one row a user, the longest). The loss covers the answer only: SID, newline and end of text.

Shape suffixes: B rows, T tokens, V vocabulary.
"""

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from tokenizers import AddedToken
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2Tokenizer

from benchmarks.quality.sequences import read_items, read_sequences
from pipelines.codes.code_book import make_codes
from pipelines.codes.embedding import fit_encoder, texts_of
from pipelines.foreign.examples import MINIONEREC_PIECES

_LEVELS, _LEVEL_SIZE, _MAX_ITEMS, _EMBEDDING_SIZE = 3, 256, 10, 64
_AUTO: Any = AutoModelForCausalLM
_QWEN2: Any = Qwen2Config
_AUTO_TOKENIZER: Any = AutoTokenizer
_QWEN2_TOKENIZER: Any = Qwen2Tokenizer
"""Untyped by their package."""
_VOCABULARY, _IGNORED = 2_000, -100
_BATCH, _BATCH_OF_BASE, _LEARNING_RATE, _WARM_UP = 64, 16, 3e-4, 0.05
"""Rows of a step, from random weights and from a base, whose activations take more memory."""
_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class Row:
    """A history of SIDs, oldest first, and the SID that followed."""

    history: tuple[str, ...]
    label: str

    @property
    def pieces(self) -> list[str]:
        """The prompt's pieces, which the framework encodes one by one."""
        return [piece.replace("{history}", ", ".join(self.history)) for piece in MINIONEREC_PIECES]


def write_recommender(
    sequences: Path, out: Path, base: Path | None, *, num_tests: int, num_rows: int | None, epochs: int
) -> dict[str, Any]:
    """Train and write the folder; return {rows, epochs, loss} of the training."""
    users = [items for _, items in read_sequences(sequences) if len(items) >= 3]
    sids = _sids(sequences, users)
    train = [_row(sids, items[:-1]) for items in users][:num_rows]
    tests = [_row(sids, items) for items in users[:: max(1, len(users) // num_tests)]][:num_tests]
    out.mkdir(parents=True, exist_ok=True)
    (out / "index.json").write_text(json.dumps(sids))
    _write_rows(out / "test.csv", tests)
    tokenizer = _tokenizer(base, sorted({token for sid in sids.values() for token in sid}), train)
    model = _model(base, len(tokenizer))
    loss = _train(model, tokenizer, train, epochs, _BATCH if base is None else _BATCH_OF_BASE)
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    return {"rows": len(train), "epochs": epochs, "loss": loss}


def _sids(sequences: Path, users: Sequence[Sequence[str]]) -> dict[str, list[str]]:
    """Return each item's SID tokens, by codes over text and use in training events."""
    items = read_items(sequences)
    rows = {item: row for row, item in enumerate(items["item_id"])}
    trained = [np.array([rows[item] for item in user[:-2]], dtype=np.int64) for user in users]
    _, embeddings_ND = fit_encoder(texts_of(items), trained, _EMBEDDING_SIZE, 0)
    _, codes = make_codes(embeddings_ND, _LEVEL_SIZE, _LEVELS, 0)
    return {
        item: [f"<{'abc'[level]}_{code}>" for level, code in enumerate(codes[row].tolist())]
        for item, row in rows.items()
    }


def _row(sids: Mapping[str, Sequence[str]], items: Sequence[str]) -> Row:
    *history, label = ("".join(sids[item]) for item in items[-_MAX_ITEMS - 1 :])
    return Row(tuple(history), label)


def _write_rows(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(("user_id", "history_item_sid", "item_sid"))
        writer.writerows((f"u{number}", str(list(row.history)), row.label) for number, row in enumerate(rows))


def _tokenizer(base: Path | None, names: Sequence[str], rows: Sequence[Row]) -> Any:
    """Return the base's tokenizer, or Qwen2's with merges learned from the prompts, with the SID tokens added.

    It is the class that `AutoTokenizer` takes for a Qwen2 folder: another class would split the prompts otherwise.
    """
    if base is not None:
        tokenizer: Any = _AUTO_TOKENIZER.from_pretrained(base)
    else:
        tokenizer = _QWEN2_TOKENIZER().train_new_from_iterator(
            (piece for row in rows[:1_000] for piece in row.pieces), _VOCABULARY
        )
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=True) for name in names])
    return tokenizer


def _model(base: Path | None, vocab_size: int) -> Any:
    torch.manual_seed(0)
    if base is None:
        return _AUTO.from_config(_QWEN2(vocab_size=vocab_size, **_SIZES), dtype=torch.float32)
    model = _AUTO.from_pretrained(base, dtype=torch.float32)
    model.resize_token_embeddings(max(vocab_size, model.config.vocab_size))
    return model


def _train(model: Any, tokenizer: Any, rows: Sequence[Row], epochs: int, batch: int) -> float:
    """Train by AdamW with a cosine schedule; return the mean loss of the last epoch."""
    encoded = [_encode(tokenizer, row) for row in rows]
    steps = epochs * math.ceil(len(rows) / batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    model.train()
    losses = []
    for tokens_BT, labels_BT in track(list(_batches(encoded, epochs, batch)), "fine-tuning"):
        loss: Any = _loss(model, tokens_BT, labels_BT)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return float(np.mean(losses[-steps // epochs :]))


def _rate(step: int, steps: int) -> float:
    warm_up = max(1, int(_WARM_UP * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


def _encode(tokenizer: Any, row: Row) -> tuple[list[int], int]:
    """Return the tokens of prompt and answer, and the number of prompt tokens."""
    prompt = [token for piece in row.pieces for token in tokenizer(piece).input_ids]
    return [*prompt, *tokenizer(f"{row.label}\n").input_ids, tokenizer.eos_token_id], len(prompt)


def _batches(
    encoded: Sequence[tuple[list[int], int]], epochs: int, batch: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield padded tokens (B, T) and labels (B, T) in a random order of length groups."""
    draw = np.random.default_rng(0)
    by_length = sorted(range(len(encoded)), key=lambda number: len(encoded[number][0]))
    groups = [by_length[first : first + batch] for first in range(0, len(by_length), batch)]
    for _ in range(epochs):
        for group in draw.permutation(len(groups)):
            chosen = [encoded[number] for number in groups[group]]
            longest = max(len(tokens) for tokens, _ in chosen)
            tokens_BT, labels_BT = (torch.full((len(chosen), longest), fill) for fill in (0, _IGNORED))
            for row, (tokens, num_prompt) in enumerate(chosen):
                tokens_BT[row, : len(tokens)] = torch.tensor(tokens)
                labels_BT[row, num_prompt : len(tokens)] = torch.tensor(tokens[num_prompt:])
            yield tokens_BT, labels_BT


def _loss(model: Any, tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Return the answers' cross-entropy. Padding follows each row, so causal attention needs no mask."""
    next_BT = labels_BT[:, 1:]
    is_answer_BT = next_BT != _IGNORED
    hidden_XD = model.model(tokens_BT[:, :-1]).last_hidden_state[is_answer_BT]
    return functional.cross_entropy(model.lm_head(hidden_XD), next_BT[is_answer_BT])
