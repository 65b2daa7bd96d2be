"""Files and folders are flushed to disk before they are renamed."""

import os
import tempfile
from pathlib import Path

import pytest

from models.files import SCRATCH_KEPT_S, each_file, rename_durably, rename_if_absent, scratch_of, write_durably
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


def test_a_write_removes_old_scratch_files_of_its_own_file(tmp_path: Path) -> None:
    """Scratch files and folders of a killed process are removed after a day; recent ones and other names stay."""
    path = tmp_path / "keys[1].json"
    old, recent, other = (
        scratch_of(path),
        scratch_of(path),
        scratch_of(tmp_path / "keys1.json"),
    )
    old_folder = scratch_of(path)
    old_folder.mkdir()
    for left in (old_folder / "weights", old, recent, other):
        left.write_text("half")
    before_s = old.stat().st_mtime - SCRATCH_KEPT_S - 1
    for left in (old_folder, old, other):
        os.utime(left, (before_s, before_s))

    write_durably(path, b"{}", mode=0o600)

    assert {left for left in tmp_path.iterdir() if left.name.startswith(".")} == {recent, other}
    assert path.read_bytes() == b"{}"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_failed_write_leaves_no_scratch_file(tmp_path: Path) -> None:
    """A target that cannot be replaced raises OSError, and its folder has no other file."""
    (tmp_path / "target").mkdir()

    with pytest.raises(OSError, match="target"):
        write_durably(tmp_path / "target", b"content")

    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_file_that_is_renamed_during_a_search_is_in_it_under_its_new_name(tmp_path: Path) -> None:
    """Also a file of a new folder is in the search; no file is in it twice, and an absent folder has none."""
    for name in ("a", "b.tmp"):
        (tmp_path / name).touch()
    search = each_file(tmp_path)

    first = next(search)
    (tmp_path / "day").mkdir()
    (tmp_path / "b.tmp").rename(tmp_path / "day" / "b")

    assert [first, *search] == [tmp_path / "a", tmp_path / "b.tmp", tmp_path / "day" / "b"]
    assert not list(each_file(tmp_path / "absent"))


def test_a_folder_that_cannot_be_listed_is_not_an_empty_folder() -> None:
    """Its files may be what is searched for."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        (inner := Path(folder) / "day").mkdir(mode=0)
        try:
            if user == 0:  # the superuser may list every folder
                os.seteuid(65_534)
            with pytest.raises(PermissionError):
                list(each_file(Path(folder)))
        finally:
            os.seteuid(user)
            inner.chmod(0o700)
