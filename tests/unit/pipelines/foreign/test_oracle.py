"""An imported recommender gives the lists of its framework: transformers' beam search in fp32 over a prefix trie."""

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.foreign.oracle import framework_metrics, generate
from models.catalogue import Catalogue
from models.decoder.weights import load_decoder
from models.search import Search
from pipelines.foreign.examples import MINIONEREC_PIECES
from pipelines.foreign.measure import code_lists, metrics_of
from pipelines.foreign.model import ImportedModel, catalogue_of, import_model
from pipelines.foreign.options import ImportOptions
from pipelines.scoring.beams import BeamScorer
from tests.support.foreign.recommenders import (
    FAMILIES,
    INSTRUCTION,
    SYSTEM,
    Recommender,
    write_chat_rows,
    write_csv_rows,
    write_recommender,
)

NUM_ROWS, NUM_BEAMS, TIE = 40, 50, 1e-4


@dataclass(frozen=True)
class Imported:
    """A framework's folder, its test rows, and the import of both."""

    made: Recommender
    cases: list[tuple[list[int], int]]
    model: ImportedModel
    catalogue: Catalogue


def imported(root: Path, family: str, **sizes: int) -> Imported:
    """Write a recommender with test rows, and import both."""
    made = write_recommender(root / "source", family, **sizes)
    cases = write_csv_rows(made, root / "test.csv", NUM_ROWS)
    options = ImportOptions(
        checkpoint=made.folder, index=made.index, examples=root / "test.csv", name="toys", max_measured=4
    )
    model = import_model(options, root, lambda _: None)
    histories = np.concatenate([np.array(history) for history, _ in cases])
    return Imported(made, cases, model, catalogue_of(model.codes(), histories))


def test_items_of_one_code_follow_one_another_by_popularity(tmp_path: Path) -> None:
    """Three of 12 items share a code with an older, less popular item, which comes after them."""
    recommender = imported(tmp_path, "qwen2", num_items=12, num_shared=3)
    catalogue = replace(recommender.catalogue, popularity=np.arange(12.0))
    decoder = load_decoder(recommender.model.decoder_dir, torch.float32, "cpu")
    scorer = BeamScorer(decoder, catalogue, recommender.model.prompt, NUM_BEAMS, recommender.model.search)
    ((_, items, scores),) = scorer.lists([np.array(recommender.cases[0][0])], [()], [NUM_BEAMS])

    pairs = [(a, b) for a, b in pairwise(items.tolist()) if (catalogue.codes[a] == catalogue.codes[b]).all()]
    assert sorted(pairs) == [(9, 0), (10, 1), (11, 2)]
    assert all(scores[items.tolist().index(a)] == scores[items.tolist().index(b)] for a, b in pairs)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Imported:
    return imported(tmp_path_factory.mktemp(request.param), request.param)


def oracle_lists(recommender: Imported, search: Search, num_rows: int) -> list[list[tuple[tuple[int, ...], float]]]:
    """Return the framework's lists of codes as tokens."""
    model = AutoModelForCausalLM.from_pretrained(recommender.made.folder, dtype=torch.float32).eval()
    tokens = [
        (*recommender.catalogue.tokens([row]), *search.close) for row in range(len(recommender.catalogue.item_ids))
    ]
    sequences, prompt = sorted(set(tokens)), recommender.model.prompt
    return [
        generate(model, prompt.tokens(recommender.catalogue, history), sequences, NUM_BEAMS)
        for history, _ in recommender.cases[:num_rows]
    ]


def our_lists(recommender: Imported, search: Search, num_rows: int) -> list[list[tuple[tuple[int, ...], float]]]:
    """Return our lists of codes as tokens."""
    decoder = load_decoder(recommender.model.decoder_dir, torch.float32, "cpu")
    histories = [np.array(history) for history, _ in recommender.cases[:num_rows]]
    lists = code_lists(decoder, recommender.catalogue, recommender.model.prompt, search, histories)
    return [
        [((*recommender.catalogue.tokens([item]), *search.close), score) for item, score in zip(*ranked, strict=True)]
        for ranked in lists
    ]


def test_prompts_equal_the_framework_token_for_token(family: Imported) -> None:
    """Each row's compiled prompt is what MiniOneRec encodes: pieces joined as token lists."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(family.made.folder)
    prompt = replace(family.model.prompt, stride=1)
    for history, _ in family.cases:
        sids = ", ".join(family.made.text_of(row) for row in history)
        expected = [
            token for piece in MINIONEREC_PIECES for token in tokenizer(piece.replace("{history}", sids)).input_ids
        ]

        assert prompt.tokens(family.catalogue, history) == expected


def test_beams_that_share_a_prompt_give_what_transformers_gives_without(family: Imported) -> None:
    """The oracle computes a prompt once for all beams: same codes, scores within rounding."""
    model = AutoModelForCausalLM.from_pretrained(family.made.folder, dtype=torch.float32).eval()
    sequences = sorted({tuple(family.catalogue.tokens([row])) for row in range(len(family.catalogue.item_ids))})
    for history, _ in family.cases[:3]:
        prompt = family.model.prompt.tokens(family.catalogue, history)
        shared, own = (generate(model, prompt, sequences, NUM_BEAMS, share_prompt=share) for share in (True, False))

        assert [code for code, _ in shared] == [code for code, _ in own]
        assert [score for _, score in shared] == pytest.approx([score for _, score in own], abs=1e-5)


@pytest.mark.parametrize("with_close", [False, True])
def test_lists_equal_the_framework_and_differ_only_in_ties(family: Imported, with_close: bool) -> None:
    """At least 99.5 % of the first ten positions are equal, the others are ties; HR and NDCG are equal."""
    search = family.model.search if with_close else replace(family.model.search, close=())
    num_rows = 6 if with_close else 12
    theirs, ours = (find(family, search, num_rows) for find in (oracle_lists, our_lists))
    num_equal = num_positions = 0
    for expected, ranked in zip(theirs, ours, strict=True):
        for (code, score), (own, own_score) in zip(expected[:10], ranked[:10], strict=True):
            num_positions += 1
            num_equal += code == own
            assert abs(score - own_score) < TIE, "a difference must be a tie"

    assert len(family.model.search.close) == 2
    assert num_equal >= 0.995 * num_positions
    labels = [(*family.catalogue.tokens([label]), *search.close) for _, label in family.cases[:num_rows]]
    codes = [[code for code, _ in ranked] for ranked in ours]
    assert framework_metrics(codes, labels, 50) == pytest.approx(
        framework_metrics([[code for code, _ in ranked] for ranked in theirs], labels, 50), abs=1e-3
    )
    rows = [np.array([family.catalogue.tokens([row]) for row in range(len(family.catalogue.item_ids))])]
    by_item = [
        np.array([(rows[0] == code[:3]).all(1).argmax() for code in list_codes], dtype=np.int64) for list_codes in codes
    ]
    metrics = metrics_of(by_item, np.array([label for _, label in family.cases[:num_rows]]), family.catalogue.codes)
    assert (metrics["hr@50"], metrics["ndcg@50"]) == pytest.approx(framework_metrics(codes, labels, 50), abs=1e-9)


def test_a_catalogue_below_the_beam_width_gives_each_item_once(tmp_path: Path) -> None:
    """12 items at 50 beams: no invalid and no duplicate item, in the framework's order."""
    recommender = imported(tmp_path, "qwen2", num_items=12, num_shared=3)
    search = replace(recommender.model.search, close=())
    decoder = load_decoder(recommender.model.decoder_dir, torch.float32, "cpu")
    scorer = BeamScorer(decoder, recommender.catalogue, recommender.model.prompt, NUM_BEAMS, search)
    histories = [np.array(history) for history, _ in recommender.cases[:5]]
    for _, items, scores in scorer.lists(histories, [()] * 5, [NUM_BEAMS] * 5):
        assert sorted(items.tolist()) == list(range(12))
        assert np.isfinite(scores).all()
    assert [[code for code, _ in ranked] for ranked in our_lists(recommender, search, 5)] == [
        [code for code, _ in ranked] for ranked in oracle_lists(recommender, search, 5)
    ]


def test_chat_prompts_equal_the_framework_token_for_token(tmp_path: Path) -> None:
    """MIMIGenRec's rows go through the checkpoint's chat template."""
    made = write_recommender(tmp_path / "source", "llama", num_items=40)
    cases = write_chat_rows(made, tmp_path / "test.json", 20)
    options = ImportOptions(checkpoint=made.folder, index=made.index, examples=tmp_path / "test.json", name="chat")
    model = import_model(options, tmp_path, lambda _: None)
    tokenizer, catalogue = (
        PreTrainedTokenizerFast.from_pretrained(made.folder),
        catalogue_of(model.codes(), np.zeros(0, int)),
    )
    for history, _ in cases:
        text = "The interaction history: " + ", ".join(made.text_of(row) for row in history)
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{INSTRUCTION}\n\n{text}"}]
        written = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)

        assert replace(model.prompt, stride=1).tokens(catalogue, history) == tokenizer(written).input_ids
