"""The search of the offline logs for a deleted tenant's users."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.cli.tenant_deletion import users_in_logs
from services.contracts.tenant import scoped
from services.errors import EnvironmentFault


def write_log(path: Path, *user_ids: str) -> None:
    """Write a file of the log, or a scratch file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"user_id": user_ids}), path)


def test_a_file_that_the_worker_completes_during_the_search_is_searched(tmp_path: Path) -> None:
    """Its events are the tenant's too; a file that the worker removes meanwhile is absent."""
    day = tmp_path / "interactions" / "partition=0" / "t" / "2026-01-01"
    write_log(day / "1.parquet", scoped("acme", "ann"), "eve")
    write_log(day / "2.9.tmp", scoped("acme", "bob"))
    write_log(day / "3.parquet", scoped("acme", "kim"))
    search = users_in_logs(tmp_path, "acme")

    first = next(search)
    (day / "2.9.tmp").rename(day / "2.parquet")
    (day / "3.parquet").unlink()

    assert [first, *search] == [scoped("acme", "ann"), scoped("acme", "bob")]


def test_an_anonymous_visitor_belongs_to_the_tenant_of_the_model_name(tmp_path: Path) -> None:
    """Impressions without a user are found by their name, not by that of a tenant whose id ends with this id."""
    names = ["acme.fr", "eu-acme.fr", "fr", None]
    pq.write_table(
        pa.table({"user_id": pa.array([None] * len(names), pa.string()), "name": names}), tmp_path / "1.parquet"
    )
    pq.write_table(pa.table({"user_id": ["eve"], "name": ["acme.fr"]}), tmp_path / "2.parquet")

    assert list(users_in_logs(tmp_path, "acme")) == [""]


def test_a_file_that_cannot_be_searched_keeps_the_deletion_open(tmp_path: Path) -> None:
    """The error names the file, since it may hold the tenant's users."""
    (tmp_path / "1.parquet").write_bytes(b"PAR1 no table PAR1")

    with pytest.raises(EnvironmentFault) as refused:
        list(users_in_logs(tmp_path, "acme"))

    assert str(tmp_path / "1.parquet") in str(refused.value)
