"""`tailrace up`: the checks before any process starts."""

from pathlib import Path

import pytest

from infra.local.commands.up import run_stack
from infra.local.supervisor.part import Part
from infra.local.supervisor.stackfile import StackFile
from services.errors import EnvironmentFault
from services.settings.settings import Settings


def test_a_damaged_snapshot_of_items_ends_the_start_with_the_fix(tmp_path: Path) -> None:
    """Otherwise no gateway would become ready, since the new broker knows no item."""
    settings = Settings(state_dir=tmp_path)
    settings.items_snapshot.parent.mkdir(parents=True)
    settings.items_snapshot.write_bytes(b"damaged")

    def parts_of(_: Settings) -> tuple[Part, ...]:
        raise AssertionError("started")

    with pytest.raises(EnvironmentFault, match=r"snapshot\.parquet: damaged snapshot of items; restore it, or remove"):
        run_stack(settings, print, lambda _: None, parts_of)

    assert not StackFile(tmp_path).is_claimed()
