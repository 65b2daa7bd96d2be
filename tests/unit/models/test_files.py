"""Files and folders are flushed to disk before they are renamed."""

from pathlib import Path

import pytest

from models.files import rename_durably, rename_if_absent
from tests.support.disk import noted


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return noted(monkeypatch)


def test_a_folder_is_flushed_with_its_content(tmp_path: Path, calls: list[str]) -> None:
    """Every file and folder is flushed before the rename, and the parent folder after it."""
    inner = tmp_path / "scratch" / "decoder"
    inner.mkdir(parents=True)
    (inner / "weights").write_text("1")

    rename_durably(tmp_path / "scratch", tmp_path / "v1")

    assert (tmp_path / "v1" / "decoder" / "weights").read_text() == "1"
    assert calls == ["decoder", "weights", "scratch", "scratch -> v1", tmp_path.name]


def test_a_file_replaces_another(tmp_path: Path, calls: list[str]) -> None:
    """The rename replaces the old file and leaves no temporary file."""
    (tmp_path / "LIVE").write_text("v1")
    (tmp_path / ".LIVE").write_text("v2")

    rename_durably(tmp_path / ".LIVE", tmp_path / "LIVE")

    assert [path.name for path in tmp_path.iterdir()] == ["LIVE"]
    assert (tmp_path / "LIVE").read_text() == "v2"
    assert calls == [".LIVE", ".LIVE -> LIVE", tmp_path.name]


def test_an_existing_folder_is_kept(tmp_path: Path) -> None:
    """An existing folder with another run's output is not overwritten."""
    for name in ("scratch", "v1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "made").write_text(name)

    with pytest.raises(OSError, match="not empty"):
        rename_durably(tmp_path / "scratch", tmp_path / "v1")
    rename_if_absent(tmp_path / "scratch", tmp_path / "v1")

    assert (tmp_path / "v1" / "made").read_text() == "v1"
