"""Work that is put in its place is on the disk before it has its name."""

from pathlib import Path

import pytest

from models.files import rename_durably, rename_if_absent
from tests.support.disk import noted


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is written through to disk, and which names are given, in order."""
    return noted(monkeypatch)


def test_a_folder_goes_with_all_that_is_in_it(tmp_path: Path, calls: list[str]) -> None:
    """Every file and folder is on disk before the whole has its name, and the name is after."""
    inner = tmp_path / "scratch" / "decoder"
    inner.mkdir(parents=True)
    (inner / "weights").write_text("1")

    rename_durably(tmp_path / "scratch", tmp_path / "v1")

    assert (tmp_path / "v1" / "decoder" / "weights").read_text() == "1"
    assert calls == ["decoder", "weights", "scratch", "scratch -> v1", tmp_path.name]


def test_a_file_takes_the_place_of_another(tmp_path: Path, calls: list[str]) -> None:
    """The pointer of before is gone, and nothing is left beside it."""
    (tmp_path / "LIVE").write_text("v1")
    (tmp_path / ".LIVE").write_text("v2")

    rename_durably(tmp_path / ".LIVE", tmp_path / "LIVE")

    assert [path.name for path in tmp_path.iterdir()] == ["LIVE"]
    assert (tmp_path / "LIVE").read_text() == "v2"
    assert calls == [".LIVE", ".LIVE -> LIVE", tmp_path.name]


def test_a_folder_that_is_there_is_kept(tmp_path: Path) -> None:
    """Another run's finished work is not overwritten."""
    for name in ("scratch", "v1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "made").write_text(name)

    with pytest.raises(OSError, match="not empty"):
        rename_durably(tmp_path / "scratch", tmp_path / "v1")
    rename_if_absent(tmp_path / "scratch", tmp_path / "v1")

    assert (tmp_path / "v1" / "made").read_text() == "v1"


def test_a_folder_that_cannot_be_put_is_no_success(tmp_path: Path) -> None:
    """Only what somebody else has finished takes the place of one's own work."""
    with pytest.raises(OSError, match="No such file"):
        rename_if_absent(tmp_path / "absent", tmp_path / "v1")
