"""A decoder whose item rows are initialised from usage: the rows' values, and the set of initialised rows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from models.catalogue import NUM_SPECIAL_TOKENS, Catalogue, load_catalogue
from models.decoder.decoder import Decoder
from models.decoder.weights import load_decoder
from pipelines.data.examples import read_labelled_sequences
from pipelines.runner.stage import silent
from pipelines.training.start.from_interactions import start_from_use
from pipelines.training.start.warm_start import WarmStart
from pipelines.training.train_decoder import TrainOptions, new_decoder, train
from tests.support.training.bundles import build_catalogue
from tests.unit.pipelines.conftest import CPU, QUICK, SMALL_DECODER, Built, checkpoints_in

RNG = np.random.default_rng(0)
SEQUENCES = [RNG.permutation(12)[: RNG.integers(2, 9)] for _ in range(40)]


def started(catalogue: Catalogue, options: TrainOptions = SMALL_DECODER) -> tuple[Decoder, Decoder]:
    """Return a decoder with random rows, and a decoder initialised from usage."""
    random, decoder = new_decoder(catalogue, options), new_decoder(catalogue, options)
    start_from_use(decoder, catalogue, SEQUENCES)
    return random, decoder


def of_popularity(num_items: int) -> Catalogue:
    """Build a catalogue of the items in SEQUENCES, followed by items without events."""
    popularity = np.bincount(np.concatenate(SEQUENCES), minlength=num_items).astype(np.float64)
    return replace(build_catalogue(num_items), popularity=popularity)


def test_rows_are_the_right_singular_vectors_of_users_by_items() -> None:
    """Cosines equal a dense SVD's of the degree-scaled matrix, and norms grow with the number of events."""
    used_UI = np.zeros((40, 12))
    for user, items in enumerate(SEQUENCES):
        used_UI[user, items] = 1
    _, strengths, right = np.linalg.svd(used_UI / np.sqrt(used_UI.sum(1, keepdims=True) * used_UI.sum(0)))
    vectors_IU = right.T * strengths
    vectors_IU /= np.linalg.norm(vectors_IU, axis=1, keepdims=True)

    _, decoder = started(of_popularity(12))

    num_events_I = used_UI.sum(axis=0)
    rows_ID = decoder.embedding.weight[NUM_SPECIAL_TOKENS:].detach().numpy() / (0.05 * SMALL_DECODER.hidden_size**0.5)
    expected_IU = vectors_IU * (num_events_I / (num_events_I + 5))[:, None]
    assert np.abs(rows_ID @ rows_ID.T - expected_IU @ expected_IU.T).max() < 1e-4


def test_only_rows_of_items_with_events_are_set_and_every_seed_has_the_same() -> None:
    """Only rows of items with events are initialised, independently of the seed."""
    catalogue = of_popularity(15)

    random, decoder = started(catalogue)
    _, other = started(catalogue, replace(SMALL_DECODER, seed=7))

    rows_VD, before_VD = decoder.embedding.weight, random.embedding.weight
    is_set_V = (rows_VD != before_VD).any(dim=1)
    assert is_set_V.tolist() == [False] * NUM_SPECIAL_TOKENS + [True] * 12 + [False] * 3
    assert torch.equal(rows_VD[is_set_V], other.embedding.weight[is_set_V])
    assert torch.equal(decoder.layers[0].q.weight, random.layers[0].q.weight)


def test_a_code_that_items_share_has_their_mean() -> None:
    """At depth 2, first-level rows are the means of their items' vectors."""
    codes = np.stack([np.arange(12) // 4, np.arange(12) % 4], axis=1).astype(np.int32)
    deep = replace(of_popularity(12), codes=codes, level_sizes=(3, 4))

    _, flat = started(of_popularity(12))
    _, decoder = started(deep)

    items_ID = flat.embedding.weight[NUM_SPECIAL_TOKENS:]
    first_SD = decoder.embedding.weight[NUM_SPECIAL_TOKENS : NUM_SPECIAL_TOKENS + 3]
    assert torch.allclose(first_SD, items_ID.view(3, 4, -1).mean(dim=1), atol=1e-6)


def test_a_training_starts_from_use_unless_it_starts_from_a_bundle(built: Built, tmp_path: Path) -> None:
    """Rows start from usage, or from the bundle if the training starts from a bundle."""
    bundle, tokens = built.assembled / "bundle", built.trained.tokenized
    still = replace(QUICK, epochs=1, validate_every=1, descent=replace(QUICK.descent, learning_rate=0.0))
    options = replace(SMALL_DECODER, use_start=True, fit=still)
    catalogue = load_catalogue(tokens / "catalogue.parquet")
    expected = new_decoder(catalogue, options)
    start_from_use(expected, catalogue, read_labelled_sequences(tokens))
    embeddings = []
    for name, start in (("cold", None), ("warm", WarmStart(bundle, "v1"))):
        out = tmp_path / name
        out.mkdir()
        train(tokens, options, out, checkpoints_in(tmp_path / f"{name}-saved"), CPU, silent, start)
        embeddings.append(load_decoder(out / "decoder", torch.float32, CPU).embedding.weight)

    cold_VD, warm_VD = embeddings
    assert torch.allclose(cold_VD, expected.embedding.weight, atol=1e-6)
    assert torch.allclose(warm_VD, load_decoder(bundle / "decoder", torch.float32, CPU).embedding.weight, atol=1e-6)
