"""Ranks the test labels with the live bundle's models, and compares the new models with them user by user.

The champion is the bundle's evaluated pair, not its serving pair: the serving pair has learned the newest event of each
user, and for users without newer events that event is a test label now. The champion ranks the items of its own
catalogue; an item outside it ranks last.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from models.catalogue import Catalogue, load_catalogue
from models.prompt import prompt_of
from models.registry.bundle import Bundle
from models.search import search_of
from pipelines.evaluation.evaluate import EvaluatedModels, read_ranks
from pipelines.evaluation.gain import MIN_CASES
from pipelines.evaluation.held_out import HeldOut
from pipelines.evaluation.pair import load_pair
from pipelines.scoring.metrics import Scorer, gains, interval, rank_labels
from services.errors import TailraceError

log = structlog.get_logger()


def compare(challenger: EvaluatedModels, held_out: HeldOut, evaluated: Path, champion: Bundle) -> list[dict[str, Any]]:
    """Return rows {model, champion, num_users, champion_ndcg, challenger_ndcg, low, high}: a paired 95 % interval.

    An unreadable champion is logged, and the comparison is skipped.
    """
    now = load_catalogue(challenger.tokenized / "catalogue.parquet")
    cases, ranks = held_out.open(f"comparison with {champion.version}"), read_ranks(evaluated)
    try:
        champion.verify()
        before = load_catalogue(champion.judged_dir / "catalogue.parquet")
        prompt = prompt_of(champion.manifest, champion.judged_dir / "decoder")
        pair = load_pair(champion.judged_dir, challenger.device)
        scorers = pair.scorers(before, prompt, search_of(champion.manifest))
        champion_ranks = {
            name: rank_labels(MappedScorer(scorer, before, now), cases).as_served(repeats=challenger.repeats)
            for name, scorer in scorers.items()
        }
    except TailraceError as error:
        log.warning("champion_not_compared", bundle=champion.version, why=str(error))
        return []
    judged = {"decoder": challenger.judged(cases), "student": np.ones(len(cases), dtype=bool)}
    return [
        _row(
            name, champion.version, gains(ranks[name][judged[name]], 10), gains(champion_ranks[name][judged[name]], 10)
        )
        for name in champion_ranks
        if judged[name].all() or judged[name].sum() >= MIN_CASES
    ]


class MappedScorer:
    """Scores histories of one catalogue's item indices by a model of an earlier catalogue, matched by item id."""

    def __init__(self, scorer: Scorer, before: Catalogue, now: Catalogue) -> None:
        self._scorer = scorer
        self._earlier = np.array([before.index_of.get(item_id, -1) for item_id in now.item_ids])

    def __call__(self, histories: Sequence[np.ndarray]) -> np.ndarray:
        """Score -> (B, V) by present index; -inf for items that the model does not know."""
        known = [self._earlier[history] for history in histories]
        scores = self._scorer([history[history >= 0] for history in known])
        return np.where(self._earlier >= 0, scores[:, self._earlier], -np.inf)


def _row(name: str, version: str, new: np.ndarray, old: np.ndarray) -> dict[str, Any]:
    low, high = interval(new - old, seed=0)
    means = {"champion_ndcg": float(old.mean()), "challenger_ndcg": float(new.mean())}
    return {"model": name, "champion": version, "num_users": len(new), **means, "low": low, "high": high}
