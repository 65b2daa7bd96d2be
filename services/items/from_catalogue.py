"""The columns that a bundle's catalogue alone fills: categories, titles and popularity."""

from collections.abc import Sequence

import numpy as np

from models.catalogue import Catalogue
from services.items.columns import ItemColumns, NumberColumn, TextColumn


def columns_of(catalogue: Catalogue) -> ItemColumns:
    """Return the columns of a catalogue's items, all of them available."""
    num_items = len(catalogue.item_ids)
    return ItemColumns(
        num_items=num_items,
        available=np.ones(num_items, dtype=bool),
        texts={
            "categories": _text_column(catalogue.categories),
            "title": _text_column([(title,) if title else () for title in catalogue.titles]),
        },
        numbers={"popularity": NumberColumn(np.asarray(catalogue.popularity, dtype=np.float64))},
    )


def _text_column(texts: Sequence[tuple[str, ...]]) -> TextColumn:
    values = list(dict.fromkeys(((), *texts)))
    code_of = {value: code for code, value in enumerate(values)}
    codes = np.fromiter((code_of[one] for one in texts), dtype=np.int32, count=len(texts))
    return TextColumn(codes, values, code_of)
