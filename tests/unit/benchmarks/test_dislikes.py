"""The dislikes benchmark holds out whole users' low ratings and compares two trainings by user."""

from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.quality.dislikes import Found, compare, hold_out


def test_every_fifth_users_low_ratings_are_of_a_type_of_their_own(tmp_path: Path) -> None:
    """Only the low ratings of every fifth user get the held-out type; all other ratings keep their rating's type."""
    users, values = [f"u{number}" for number in range(10)], [1.0, 2.0, 3.0]
    rows = [(user, "i", 0, value) for user in users for value in values]
    schema = ["user_id", "item_id", "event_time", "value"]
    pl.DataFrame(rows, schema=schema, orient="row").write_parquet(tmp_path / "events.parquet")

    changed = pl.read_parquet(hold_out(tmp_path / "events.parquet", tmp_path / "out"))

    held_out = changed.filter(pl.col("event_type") == "held-out")
    assert held_out.select("user_id", "value").rows() == [
        (user, value) for user in ("u0", "u5") for value in (1.0, 2.0)
    ]
    assert changed.height - held_out.height == 26
    assert set(changed["event_type"]) == {"held-out", "rating-1", "rating-2", "rating-3"}


def test_a_difference_is_by_user() -> None:
    """If every user's rank worsens by two, the difference and both interval bounds are two."""
    before = np.array([1.0, 50.0, 900.0])

    rows = compare("student", Found(before, before, before), Found(before, before + 2, before))

    found = {row["measure"]: (row["difference"], row["ci95"]) for row in rows}
    assert found == {"ndcg": (0, [0, 0]), "rank_held_out": (2, [2, 2]), "rank_learned": (0, [0, 0])}
