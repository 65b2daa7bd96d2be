"""The catalogue: tokens, masks, and its file."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.catalogue import BOS_TOKEN, Catalogue, load_catalogue
from models.errors import BundleCorrupt, InvalidRequest


def deep_catalogue() -> Catalogue:
    """Four items in two categories, encoded by codes of two levels with sizes 2 and 3."""
    return Catalogue(
        item_ids=("a", "b", "c", "d"),
        titles=("A", "B", "C", "D"),
        categories=(("x",), ("x", "y"), ("y",), ()),
        codes=np.array([[0, 0], [0, 2], [1, 1], [1, 0]], dtype=np.int32),
        level_sizes=(2, 3),
        popularity=np.array([1.0, 3.0, 3.0, 0.0]),
    )


def test_each_level_has_tokens_of_its_own() -> None:
    """Token 0 begins a sequence; each level's tokens follow the previous level's; unknown item ids have no index."""
    catalogue = deep_catalogue()

    assert (BOS_TOKEN, catalogue.token_offsets, catalogue.vocab_size) == (0, (1, 3), 6)
    assert catalogue.tokens([1, 3]) == [1, 5, 2, 3]
    assert catalogue.indices(["d", "gone", "a", "d"]) == [3, 0, 3]


@given(
    categories=st.none() | st.sets(st.sampled_from("xy"), min_size=1),
    listed=st.none() | st.sets(st.sampled_from("abcd")),
    excluded=st.sets(st.sampled_from(["a", "b", "c", "d", "gone"])),
)
def test_masks_compose(categories: set[str] | None, listed: set[str] | None, excluded: set[str]) -> None:
    """An item is allowed if it is in a requested category, listed, and not excluded; the oracle checks each item."""
    catalogue = deep_catalogue()
    mask = catalogue.allowed(
        categories=None if categories is None else tuple(categories),
        allowed_item_ids=None if listed is None else tuple(listed),
        excluded_item_ids=excluded,
    )

    for index, item_id in enumerate(catalogue.item_ids):
        in_category = categories is None or bool(categories & set(catalogue.categories[index]))
        assert mask[index] == (in_category and (listed is None or item_id in listed) and item_id not in excluded)


@pytest.mark.parametrize(
    ("categories", "listed", "words"),
    [
        (("Drama", "z"), None, "filters.categories[1]: "),
        (None, ("gone",), "filters.allowed_item_ids[0]: "),
        (("comdy",), None, "; the nearest: 'Comedy'"),
        (("COMEDY",), None, "; the nearest: 'Comedy'"),
        (("sci fi",), None, "; the nearest: 'Sci-Fi'"),
        (("Darma",), None, "; the nearest: 'Drama'"),
        (("?" * 256,), None, "; name one that items have, for example 'Drama', 'Comedy', 'Sci-Fi'"),
    ],
)
def test_filters_must_name_what_exists(categories, listed, words) -> None:
    """An unknown category or item is rejected by position, with the nearest category or else the most common ones."""
    films = (("Drama", "Comedy"), ("Drama", "Comedy", "Sci-Fi"), ("Drama",), ())

    with pytest.raises(InvalidRequest, match=re.escape(words)):
        replace(deep_catalogue(), categories=films).check_filters(categories, listed)


def test_without_categories_the_error_says_so() -> None:
    """A catalogue without categories rejects a category filter with that reason."""
    catalogue = replace(deep_catalogue(), categories=((),) * 4)

    with pytest.raises(InvalidRequest, match="no item of this catalogue has a category"):
        catalogue.check_filters(("Comedy",), None)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    """Save and load keep every field, including the depth."""
    catalogue = deep_catalogue()
    catalogue.save(tmp_path / "catalogue.parquet")

    loaded = load_catalogue(tmp_path / "catalogue.parquet")

    for name in ("item_ids", "titles", "categories", "level_sizes", "depth"):
        assert getattr(loaded, name) == getattr(catalogue, name)
    np.testing.assert_array_equal(loaded.codes, catalogue.codes)
    np.testing.assert_array_equal(loaded.popularity, catalogue.popularity)


_TEXTS = st.lists(
    st.tuples(st.text("ab"), st.text("ab"), st.lists(st.sampled_from("xy")).map(tuple)), min_size=1, max_size=3
)


@given(first=_TEXTS, second=_TEXTS)
def test_catalogues_share_texts_exactly_if_they_are_equal(first: list[Any], second: list[Any]) -> None:
    """Popularity may differ; another id, title or category, or another split of equal letters, is another object."""
    with TemporaryDirectory() as folder:
        loaded = []
        for number, rows in enumerate((first, second)):
            columns = [tuple(row[index] for row in rows) for index in range(3)]
            codes, popularity = np.zeros((len(rows), 1), np.int32), np.full(len(rows), float(number))
            Catalogue(*columns, codes, (1,), popularity).save(Path(folder, "catalogue.parquet"))
            loaded.append(load_catalogue(Path(folder, "catalogue.parquet")))
            texts = loaded[-1].texts
            assert [texts.item_ids, texts.titles, texts.categories] == columns

    assert (loaded[0].texts is loaded[1].texts) == (first == second)
    assert [*loaded[1].popularity] == [1.0] * len(second)


@pytest.mark.parametrize("content", [None, b"", b"not parquet"])
def test_file_that_is_no_catalogue_is_corrupt(tmp_path: Path, content: bytes | None) -> None:
    """A missing or corrupt file raises BundleCorrupt."""
    path = tmp_path / "catalogue.parquet"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(BundleCorrupt, match="not a catalogue"):
        load_catalogue(path)


def test_a_catalogue_of_several_slices_is_loaded_in_order(tmp_path: Path) -> None:
    """Values that are converted in slices, and codes of two levels, come back as they were saved."""
    num_items = 2_345
    saved = Catalogue(
        item_ids=tuple(f"item-{number:04}" for number in range(num_items)),
        titles=tuple(f"Title {number}" for number in range(num_items)),
        categories=tuple((f"c{number % 7}",) * (number % 3) for number in range(num_items)),
        codes=np.stack([np.arange(num_items) % 50, np.arange(num_items) // 50], axis=1).astype(np.int32),
        level_sizes=(50, 47),
        popularity=np.arange(num_items, dtype=np.float64),
    )
    saved.save(tmp_path / "catalogue.parquet")
    loaded = load_catalogue(tmp_path / "catalogue.parquet")

    assert (loaded.item_ids, loaded.titles, loaded.categories) == (saved.item_ids, saved.titles, saved.categories)
    np.testing.assert_array_equal(loaded.codes, saved.codes)


@pytest.mark.parametrize("codes", [[[0, 1], [1]], [[0], None], [[0, None], [1, 0]]])
def test_a_catalogue_with_codes_of_different_lengths_is_corrupt(tmp_path: Path, codes: list[object]) -> None:
    """Every item has a code of the catalogue's depth."""
    path = tmp_path / "catalogue.parquet"
    deep_catalogue().save(path)
    table = pq.read_table(path).slice(0, 2)
    position = table.schema.get_field_index("code")
    pq.write_table(table.set_column(position, "code", pa.array(codes, pa.list_(pa.int32()))), path)

    with pytest.raises(BundleCorrupt):
        load_catalogue(path)


def test_loading_a_catalogue_needs_no_pandas(tmp_path: Path) -> None:
    """A fresh process, each gateway at its start, loads a catalogue without pandas and pyarrow's datasets."""
    deep_catalogue().save(tmp_path / "catalogue.parquet")
    script = (
        "import sys; from pathlib import Path; from models.catalogue import load_catalogue, load_item_ids; "
        "path = Path(sys.argv[1]); load_catalogue(path); load_item_ids(path); "
        "sys.exit(bool({'pandas', 'pyarrow.dataset'} & set(sys.modules)))"
    )

    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "catalogue.parquet")], check=False)

    assert done.returncode == 0
