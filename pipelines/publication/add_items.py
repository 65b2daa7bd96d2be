"""Adds new items to the live bundle without training.

For codes deeper than 1, new items get codes from the bundle's book and student rows from these codes; the decoder is
unchanged. For items of one token, the decoder gets a row for each from its text, and the student's rows derive from
these. Old items keep their codes, rows and similar items, so lists stored for users stay valid under the new version,
and if the decoder is unchanged, so do its cached prefixes. The bundle's judged pair gets the new items too, because
later starts and comparisons use it. The new version is promoted like any other, so gateways and replicas load it within
seconds.
"""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn

from models.catalogue import Catalogue, load_catalogue
from models.decoder.decoder import Decoder
from models.decoder.weights import load_decoder, save_decoder
from models.mixer import SOURCES
from models.registry.bundle import JUDGED, Bundle, lists_version
from models.registry.store import BundleStore
from models.registry.trainings import lineage_of_addition
from models.similar import SIMILAR, num_neighbours
from models.student import StudentModel, read_student, save_student
from models.wishes.mixing import WISHES
from pipelines.codes.embedding import fit_text, texts_in, texts_of, unit
from pipelines.codes.reuse import KeptCodes, extended_codes, kept_codes
from pipelines.foreign.index import read_index
from pipelines.foreign.tokens import SIDS, codes_of_new
from pipelines.publication.bundle import publish, version_of
from pipelines.publication.model_card import CARD
from pipelines.publication.student_table import export_with_items_added
from pipelines.similarity.extended import extended
from pipelines.similarity.sources import TEXT, TEXT_SIZE
from pipelines.similarity.vectors import nearest_of
from pipelines.tables.reader import ItemTable
from pipelines.training.start.student_rows import fill_rows, rows_like_teachers
from pipelines.training.start.text_rows import load_item_text
from pipelines.training.start.warm_start import rows_before, tokens_before
from pipelines.wishes.make_reader import extend_reader
from services.errors import ConfigError

_NUM_NAMED = 5
_NO_LIFT = "has no effect where codes are deeper than 1: a new item shares its tokens with others; remove it"


def append_items(
    store: BundleStore,
    table: ItemTable,
    now: datetime,
    lift: float = 1.0,
    report: Callable[[str], object] = lambda _sentence: None,
    *,
    force: bool = False,
    index: Path | None = None,
) -> tuple[Bundle, int]:
    """Publish the live bundle with the items that it lacks; return it with their number.

    Without new items it is unchanged.

    `lift` multiplies the rows of new items that are one token: above 1 they are shown more often. `report` is called
    with a sentence for each kind of skipped or changed row. `index` has the SIDs of new items, for a bundle whose codes
    came from an index.

    Raises:
        ConfigError: The bundle has no models, its codes have depth 1 without text (which only training
            extends), or the lift is invalid.
        DataError: Names `table`.
        BundleNotFound: No bundle is live.
        BundleCorrupt: The live bundle is damaged.
        BundleMoved: Another bundle was promoted meanwhile, which lacks these items.
        BundleWithdrawn: This bundle was withdrawn, without `force`.
    """
    live = store.live()
    live.verify()
    if not live.is_trained:
        raise ConfigError(
            f"{live.version} has no models that could rank new items, which the popular tier already shows; "
            "train once with `tailrace pipeline --items FILE`"
        )
    items = table.read_catalogue()
    kept, needs_index = kept_codes(live.path), has_given_codes(live)
    if needs_index != (index is not None):
        raise ConfigError(
            f"--index: the codes of {live.version} came from an index; give the index of the new items"
            if needs_index
            else f"--index: the codes of {live.version} are its own; remove the option"
        )
    if kept is None and not needs_index and load_item_text(live.path) is None:
        raise ConfigError(
            f"{live.version}: its codes have depth 1, a token an item, and its rows are not learned from text; "
            "train once with a recipe whose decoder has a text_size, or with `tailrace pipeline --code-depth 3`"
        )
    if not 0 < lift < float("inf") or ((kept is not None or needs_index) and lift != 1):
        problem = _NO_LIFT if kept is not None or needs_index else "is not a factor; give a number above 0"
        raise ConfigError(f"--lift: {lift:g} {problem}")
    is_known = pl.col("item_id").is_in(list(live.item_ids()))
    new = items.filter(~is_known).sort("item_id")
    for sentence in (*table.findings.sentences(), *_known(items.filter(is_known))):
        report(sentence)
    if not len(new):
        return live, 0
    codes = None
    if index is not None:
        codes = codes_of_new(live.path, live.catalogue(), read_index(index), new["item_id"].to_list())
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "bundle"
        shutil.copytree(live.path, folder, ignore=shutil.ignore_patterns("manifest.json"))
        student = _extend(folder, new, kept, lift, codes)
        _extend_tables(live, folder, student)
        extend_reader(folder / WISHES, live.catalogue(), load_catalogue(folder / "catalogue.parquet"))
        if live.judged_dir != live.path:
            _extend(folder / JUDGED, new, kept, lift, codes)
        export_with_items_added(student, live.path, folder)
        about = {name: value for name, value in live.manifest.items() if name not in {"version", "files"}}
        about["num_items"] = student.config.num_items
        about["lineage"] = lineage_of_addition(live.manifest, live.version)
        if (card := folder / CARD).exists():
            note = (
                f"This bundle adds {len(new)} items to {live.version} without training. This is the card of "
                f"{live.version}:\n\n"
            )
            card.write_text(note + card.read_text())
        version = version_of(folder, now)
        about["lists"] = {"of": lists_version(live.manifest, live.version), "under": version}
        return publish(store, folder, version, about, seen=live.version, force=force), len(new)


def _known(items: pl.DataFrame) -> list[str]:
    """Return a sentence on the items that the bundle already has."""
    if not items.height:
        return []
    named = ", ".join(items["item_id"].head(_NUM_NAMED))
    return [f"items: {items.height} are already in the bundle and stay unchanged, such as item_id={named}"]


def _extend_tables(live: Bundle, folder: Path, student: StudentModel) -> None:
    """Write the tables of similar items and of the other sources with the new items; old items keep their neighbours.

    New items get similar items by the student's rows, and neighbours by text in both directions.
    """
    before, now = live.catalogue(), load_catalogue(folder / "catalogue.parquet")
    num_items, places = len(now.item_ids), np.array(now.indices(before.item_ids))
    new = np.setdiff1d(np.arange(num_items), places)
    similar = live.similar(len(before.item_ids))
    num = max(num_neighbours(num_items), similar.neighbours_VN.shape[1])
    near = nearest_of(new, unit(student.head_weight_VD.detach().numpy()), num)
    extended(similar, places, num_items, near).save(folder / SIMILAR)
    mixer = live.mixer(before)
    sources = {} if mixer is None else mixer.sources
    for name, source in sources.items():
        if name == TEXT:
            texts = texts_in(now)
            alike = nearest_of(new, fit_text(texts, TEXT_SIZE, seed=0).encode(texts), num)
            extended(source.table, places, num_items, alike, both_ways=True).save(folder / SOURCES / name)
        elif name != SIMILAR:
            extended(source.table, places, num_items).save(folder / SOURCES / name)


def has_given_codes(bundle: Bundle) -> bool:
    """Whether the bundle's codes came from an index."""
    return bundle.is_imported or (bundle.path / SIDS).exists()


def _extend(
    pair: Path, new: pl.DataFrame, kept: KeptCodes | None, lift: float, codes: np.ndarray | None = None
) -> StudentModel:
    """Write this folder's models and catalogue with the new items, and return its student.

    Without codes to keep, the folder knows its items' texts.
    """
    before, text, student = (
        load_catalogue(pair / "catalogue.parquet"),
        load_item_text(pair),
        read_student(pair / "student.safetensors"),
    )
    catalogue = with_items(before, new, kept, codes)
    if kept is not None or codes is not None:
        student = with_rows(student, before, catalogue)
    elif text is not None:
        decoder = load_decoder(pair / "decoder", torch.float32, "cpu")
        student, decoder = with_text_rows(student, decoder, before, catalogue, lift * text.rows(texts_of(new)))
        save_decoder(decoder, pair / "decoder")
    catalogue.save(pair / "catalogue.parquet")
    save_student(student, pair / "student.safetensors")
    return student


def with_items(
    old: Catalogue, new: pl.DataFrame, kept: KeptCodes | None, new_codes: np.ndarray | None = None
) -> Catalogue:
    """Return the catalogue with the new items, ordered by ID, with given codes, codes of the book, or one token each.

    New items have no training events.
    """
    ids = (*old.item_ids, *new["item_id"])
    order = sorted(range(len(ids)), key=ids.__getitem__)
    codes, sizes = np.arange(len(ids), dtype=np.int32).reshape(-1, 1), old.level_sizes
    if new_codes is not None:
        codes = np.concatenate([old.codes, new_codes])[order]
    elif kept is None:
        sizes = (len(ids),)
    else:
        codes = extended_codes(ids, ["" for _ in old.item_ids] + texts_of(new), kept)[order]
    titles = (*old.titles, *new["title"])
    categories = (*old.categories, *(tuple(names) for names in new["categories"].to_list()))
    popularity = np.concatenate([old.popularity, np.zeros(len(new))])
    return replace(
        old,
        item_ids=tuple(ids[number] for number in order),
        titles=tuple(titles[number] for number in order),
        categories=tuple(categories[number] for number in order),
        codes=codes,
        level_sizes=sizes,
        popularity=popularity[order],
    )


@torch.no_grad()
def with_text_rows(
    student: StudentModel, decoder: Decoder, before: Catalogue, now: Catalogue, new_rows_ND: Tensor
) -> tuple[StudentModel, Decoder]:
    """Return both models over the larger catalogue of depth 1.

    `new_rows_ND` are the decoder's rows of new items by ID.
    """
    wider_decoder = Decoder(replace(decoder.config, vocab_size=now.vocab_size))
    _fill(wider_decoder, decoder, tokens_before(before, now), new_rows_ND)
    wider = StudentModel(replace(student.config, num_items=len(now.item_ids)))
    _fill(wider, student, rows_before(before, now), rows_like_teachers(student, decoder, before, new_rows_ND))
    return wider.eval(), wider_decoder.eval()


def _fill(wider: nn.Module, model: nn.Module, rows_before_V: np.ndarray, new_ND: Tensor) -> None:
    """Load the weights of `model` into `wider`.

    Old embedding rows move to their new positions; new rows fill the rest, in order.
    """
    weights = model.state_dict()
    rows_VD = weights["embedding.weight"][torch.from_numpy(np.maximum(rows_before_V, 0))]
    rows_VD[torch.from_numpy(np.flatnonzero(rows_before_V < 0))] = new_ND.to(rows_VD)
    wider.load_state_dict(weights | {"embedding.weight": rows_VD})


@torch.no_grad()
def with_rows(student: StudentModel, before: Catalogue, now: Catalogue) -> StudentModel:
    """Return the student over the larger catalogue: old rows unchanged, rows of new items from their codes."""
    wider = StudentModel(replace(student.config, num_items=len(now.item_ids)))
    rows_before_V = rows_before(before, now)
    new = np.flatnonzero(rows_before_V < 0)
    _fill(wider, student, rows_before_V, torch.zeros(len(new), student.config.hidden_size))
    fill_rows(wider, now, new - 1)
    return wider.eval()
