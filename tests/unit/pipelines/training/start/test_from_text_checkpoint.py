"""A decoder that starts from a text checkpoint: its layers, rows from item texts, and serving."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from models.catalogue import NUM_SPECIAL_TOKENS, Catalogue, load_catalogue
from models.decoder.decoder import Decoder
from models.decoder.weights import load_decoder
from models.prompt import Prompt
from pipelines.codes.options import CodesOptions
from pipelines.evaluation.evaluate import read_report
from pipelines.runner.stage import silent
from pipelines.scoring.dense import DecoderScorer, hidden_states
from pipelines.training.start.from_text_checkpoint import checkpoint_hash, decoder_from_text
from pipelines.training.start.warm_start import WarmStart
from pipelines.training.train_decoder import begin_warm, first_decoder, read_training, train
from services.errors import ConfigError
from services.llm.engine.beam.trie import ItemCodes
from services.llm.engine.config import EngineConfig
from services.llm.engine.engine import Engine
from tests.support.engine.checkpoints import write_checkpoint
from tests.support.training.bundles import build_catalogue
from tests.support.training.synthetic import tokenized, write_ingested
from tests.unit.pipelines.conftest import (
    CPU,
    QUICK,
    SMALL_DECODER,
    Built,
    checkpoints_in,
    learn_the_ring,
    ndcg_of,
)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text checkpoint of two layers with four query heads over two key/value heads."""
    return write_checkpoint(tmp_path_factory.mktemp("text"), scale=0.05)


@pytest.fixture(scope="session")
def ring(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The ring, trained from the checkpoint's first layer at depth 1."""
    return learn_the_ring(tmp_path_factory.mktemp("ring"), replace(SMALL_DECODER, text_start=str(text), text_layers=1))


def start(folder: Path, texts: list[str], catalogue: Catalogue | None = None, num_layers: int = 0) -> Decoder:
    """Build the decoder of a catalogue with these texts."""
    catalogue = catalogue or build_catalogue(len(texts))
    return decoder_from_text(folder, num_layers, catalogue, texts, 64, 0)


TEXTS = ["the river", "the sea", "the river", "", "a turbine", "café"]


def test_layers_are_the_checkpoints(text: Path) -> None:
    """Layers keep the checkpoint's shape with rescaled outputs; vocabulary and positions come from the catalogue."""
    source = load_decoder(text, torch.float32, "cpu")
    size = source.embedding.weight.norm(dim=1).pow(2).mean().sqrt()

    whole, first = start(text, TEXTS), start(text, TEXTS, num_layers=1)

    assert (len(whole.layers), len(first.layers)) == (2, 1)
    for decoder in (whole, first):
        for taken, given in zip(decoder.layers, source.layers, strict=False):
            for name, weight in taken.state_dict().items():
                adds = name.startswith(("output", "down"))
                torch.testing.assert_close(weight * size if adds else weight, given.state_dict()[name])
    assert whole.config == replace(source.config, vocab_size=NUM_SPECIAL_TOKENS + 6, max_position_embeddings=64)


def test_layers_compute_what_they_did(text: Path) -> None:
    """With the checkpoint's rescaled rows, the hidden states equal the checkpoint's up to the final norm."""
    source, decoder = load_decoder(text, torch.float32, "cpu"), start(text, ["the river", *TEXTS])
    size = source.embedding.weight.norm(dim=1).pow(2).mean().sqrt()
    with torch.no_grad():
        decoder.embedding.weight.copy_(source.embedding.weight[: len(decoder.embedding.weight)] / size)
        source.norm.weight.fill_(1.0)

    tokens = torch.tensor([[3, 1, 4, 1, 5]])

    with torch.inference_mode():
        torch.testing.assert_close(hidden_states(decoder, tokens), hidden_states(source, tokens), atol=1e-2, rtol=1e-2)


def test_rows_are_of_the_words(text: Path) -> None:
    """Equal texts have equal rows, other texts differ, and all rows have norm 1, even without text."""
    rows_ID = start(text, TEXTS).embedding.weight.detach()[NUM_SPECIAL_TOKENS:]

    assert torch.equal(rows_ID[0], rows_ID[2])
    assert not torch.allclose(rows_ID[0], rows_ID[1])
    torch.testing.assert_close(rows_ID.norm(dim=1), torch.ones(6))


def test_a_deeper_code_has_the_mean_of_its_items(text: Path) -> None:
    """At each level, a code of a single item has its text's direction, and a shared code the mean direction."""
    codes = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], dtype=np.int32)
    catalogue = replace(build_catalogue(4), codes=codes, level_sizes=(2, 2))
    texts = ["the river", "the river", "a turbine", "café"]
    flat_ID = start(text, texts).embedding.weight.detach()[NUM_SPECIAL_TOKENS:]

    rows_VD = start(text, texts, catalogue).embedding.weight.detach()

    first = rows_VD[NUM_SPECIAL_TOKENS]
    torch.testing.assert_close(first, flat_ID[0])
    assert torch.nn.functional.cosine_similarity(rows_VD[NUM_SPECIAL_TOKENS + 1], flat_ID[2], dim=0) > 0.3
    assert len(rows_VD) == catalogue.vocab_size


@pytest.mark.parametrize("texts", [[""] * 4, ["the sea"] * 4])
def test_texts_that_tell_nothing_leave_random_rows(texts: list[str], text: Path) -> None:
    """Empty or equal texts give distinct random rows with finite values."""
    rows_ID = start(text, texts).embedding.weight.detach()[NUM_SPECIAL_TOKENS:]

    assert rows_ID.isfinite().all()
    assert len({tuple(row) for row in rows_ID.tolist()}) == 4


def test_what_cannot_be_read_is_refused_by_its_field(text: Path, tmp_path: Path) -> None:
    """The error names the field and the fix for a bad folder, tokenizer, shape, layer count or texts."""
    bare, odd, small, garbled = (tmp_path / name for name in ("bare", "odd", "small", "garbled"))
    for folder in (bare, odd, small, garbled):
        write_checkpoint(folder)
    (bare / "tokenizer.json").unlink()
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {"head_dim": 7}))
    tokenizer = json.loads((small / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0] |= {"id": 9_999, "content": "river"}
    (small / "tokenizer.json").write_text(json.dumps(tokenizer))
    (garbled / "tokenizer.json").write_text("{}")
    field = r"^decoder\.text_start: "

    with pytest.raises(ConfigError, match=field + r".*absent is no folder; give that of a checkpoint"):
        start(tmp_path / "absent", TEXTS)
    with pytest.raises(ConfigError, match=field + r".*absent is no folder"):
        checkpoint_hash(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=field + r".*bare has no tokenizer\.json; put the checkpoint's own"):
        start(bare, TEXTS)
    with pytest.raises(ConfigError, match=field + r".*head_dim 7 is odd; give a whole checkpoint of llama, mistral"):
        start(odd, TEXTS)
    with pytest.raises(ConfigError, match=field + r"tokenizer\.json has the token \d+, and the weights have \d+ rows"):
        start(small, TEXTS)
    with pytest.raises(ConfigError, match=field + r".*tokenizer\.json cannot be read .*; fetch it again"):
        start(garbled, TEXTS)
    with pytest.raises(ConfigError, match=r"^decoder\.text_layers: 3, and .* has 2; give 1 to 2, or 0 for all"):
        start(text, TEXTS, num_layers=3)
    with pytest.raises(ConfigError, match=field + r"there are 6 texts of 30 items; run the stage tokenize again"):
        start(text, TEXTS, build_catalogue())


def test_another_content_is_another_hash(text: Path, tmp_path: Path) -> None:
    """The hash changes with the checkpoint's content, so the stage runs again."""
    other = write_checkpoint(tmp_path / "other", seed=6)

    assert checkpoint_hash(str(text)) == checkpoint_hash(str(text)) != checkpoint_hash(str(other))
    assert checkpoint_hash("") == ""


def test_the_whole_flow_runs_and_says_what_the_checkpoint_decides(ring: Built) -> None:
    """The whole pipeline runs with the checkpoint's shape instead of the requested shape."""
    training, ndcg = read_training(ring.trained.decoder_dir.parent), read_report(ring.evaluated)["metrics"]

    asked = training["options"]
    assert training["text_start"] == {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "feed_forward": 48}
    assert (asked["hidden_size"], asked["num_layers"]) == (16, 2)
    assert min(ndcg[name]["ndcg@10"] for name in ("decoder", "student")) > 0.8


def test_the_engine_serves_it_with_grouped_queries(ring: Built) -> None:
    """A decoder with grouped queries ranks in the engine like in dense scoring."""
    bundle = ring.assembled / "bundle"
    catalogue = load_catalogue(bundle / "catalogue.parquet")
    decoder = load_decoder(bundle / "decoder", torch.float32, CPU)
    history = [3, 4, 5]
    items = ItemCodes(codes=catalogue.codes, level_sizes=catalogue.level_sizes, token_offsets=catalogue.token_offsets)
    engine = Engine(decoder, EngineConfig(), items=items, bundle_version="v1")
    engine.add_rank("one", Prompt(10, 5).tokens(catalogue, history), k=5)

    outcomes = []
    while engine.has_work:
        outcomes += engine.step(0.0)

    scores_V = DecoderScorer(decoder, catalogue, Prompt(10, 5))([np.array(history)])[0]
    assert decoder.config.num_key_value_heads == 2
    assert outcomes[0].item_indices.tolist() == np.argsort(-scores_V)[:5].tolist()


def test_a_warm_start_that_fits_wins_and_one_that_does_not_leaves_the_text(ring, built, text) -> None:
    """A matching bundle provides the weights; otherwise the checkpoint does, with a full training."""
    tokens = ring.trained.tokenized
    catalogue = load_catalogue(tokens / "catalogue.parquet")
    options = replace(SMALL_DECODER, text_start=str(text), text_layers=1)
    fresh = first_decoder(tokens, catalogue, options)
    results, name = [], "layers.0.q.weight"
    for bundle in (ring.assembled / "bundle", built.assembled / "bundle"):
        decoder = first_decoder(tokens, catalogue, options)
        with capture_logs():
            begun = begin_warm(WarmStart(bundle, "v1"), decoder, catalogue, QUICK)
        results.append((decoder.state_dict()[name], begun is None))

    (warm, warm_refused), (refused, was_refused) = results
    live = load_decoder(ring.assembled / "bundle" / "decoder", torch.float32, CPU)
    assert torch.equal(warm, live.state_dict()[name])
    assert torch.equal(refused, fresh.state_dict()[name])
    assert (warm_refused, was_refused) == (False, True)


def test_text_numbers_are_learned_beside_it(text: Path, tmp_path: Path) -> None:
    """Text rows work with codes of depth 3 and are folded as for any decoder."""
    options = replace(SMALL_DECODER, text_start=str(text), text_size=8)
    tokens = tokenized(write_ingested(tmp_path / "ingest"), tmp_path / "tokens", CodesOptions(depth=3))

    train(tokens, options, tmp_path, checkpoints_in(tmp_path / "saved"), CPU, silent)

    assert ndcg_of(tmp_path / "decoder", tokens) > 0.5
