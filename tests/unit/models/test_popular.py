"""The popular items of a manifest, and their packed form."""

import numpy as np

from models.registry.popular import pack, served, unpack


def test_packed_popular_items_are_those_of_the_manifest() -> None:
    """Texts, order and popularity are equal, and so are the fields that another version of the program wrote."""
    items = [
        {"item_id": "b", "title": "B \ud800", "categories": ["x", "y"], "popularity": 3},
        {"item_id": "a", "title": "", "categories": [], "popularity": 0.25},
    ]
    manifest = {"version": "v1", "files": {"a": "0" * 64}, "popular": items, "later": [{"number": 2**80}, None, True]}
    packed = pack(manifest)
    assert packed is not None
    about, catalogue = unpack(packed)

    assert about == served(manifest) == {"version": "v1", "later": manifest["later"]}
    assert (catalogue.item_ids, catalogue.titles) == (("b", "a"), ("B \ud800", ""))
    assert catalogue.categories == (("x", "y"), ())
    np.testing.assert_array_equal(catalogue.popularity, [3.0, 0.25])
    np.testing.assert_array_equal(catalogue.codes, [[0], [1]])


def test_a_manifest_without_popular_items_has_no_packed_form() -> None:
    """Manifests of older versions list none."""
    assert pack({"files": {}}) is None
