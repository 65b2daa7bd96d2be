"""Errors of the file system are one line that names the option or setting."""

import errno
import itertools
import os
import shutil
from pathlib import Path

import polars as pl
import pytest

from infra.cli.erase import read_accepted
from infra.cli.file_errors import described, with_option
from pipelines.tables.files import check_file
from services.errors import ConfigError, DataError
from tests.unit.infra.cli.conftest import Run

FULL = (
    "No space left on device; free space on its disk, or give a path on another disk "
    "(the state folder is TAILRACE_STATE_DIR)"
)
COMMANDS = [
    ["up"],
    ["up", "--detach"],
    ["down"],
    ["pipeline"],
    ["promote", "v1"],
    ["rollback"],
    ["precompute"],
    ["import", "items", __file__],
]
FOLDERS = ("/proc/x", "/proc/x/y", "{file}", "{file}/x", "{ring}/x", "/" + "x" * 300)
CASES = [*itertools.product(COMMANDS, FOLDERS), (["status"], "{file}")]


@pytest.mark.parametrize(("command", "folder"), CASES, ids=lambda value: value if value in FOLDERS else " ".join(value))
def test_a_state_folder_that_cannot_be_made_is_named(
    tailrace: Run, tmp_path: Path, command: list[str], folder: str
) -> None:
    """The line names the setting and its folder."""
    (file := tmp_path / "file").touch()
    (ring := tmp_path / "ring").symlink_to(ring)
    refused = tailrace(*command, state_dir=folder.format(file=file, ring=ring))
    (line,) = refused.err.strip().splitlines()

    assert refused.code == 1
    assert line.startswith("error: TAILRACE_STATE_DIR: /")


@pytest.mark.parametrize(
    ("words", "path", "number", "named"),
    [
        (["import", "events", "a.csv", "--table", "out/old.parquet"], "out/old.parquet", errno.EACCES, "--table: "),
        (["import", "events", "a.csv", "--table=out/old.parquet"], "out/.old.parquet.7", errno.ENOSPC, "--table: "),
        (["add-items", "gone.csv"], "gone.csv", errno.ENOENT, "gone.csv: "),
        (["erase", "--users", "folder"], "folder", errno.EISDIR, "--users: "),
        (["pipeline", "--events", "a.csv"], "/state/pipeline/x", errno.ENOSPC, "TAILRACE_STATE_DIR: "),
        (["up"], "/state", errno.ENOENT, "TAILRACE_STATE_DIR: "),
        (["up"], "/elsewhere/x", errno.EROFS, "/elsewhere/x: "),
    ],
)
def test_the_error_begins_with_the_source_of_the_path(words: list[str], path: str, number: int, named: str) -> None:
    """The longest matching argument or setting is named."""
    error = OSError(number, os.strerror(number), str(Path(path).absolute()) if "/" in path else path)
    text = described(error, words, {"TAILRACE_STATE_DIR": Path("/state"), "TAILRACE_CACHE_DIR": Path("/cache")})

    assert (text or "").startswith(named) or (text or "").startswith(str(Path.cwd() / named))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["pipeline", "--events", "a.csv", "--items", "b.csv"], "--items: no file b.csv; expected for example items."),
        (["pipeline", "--items=b.csv"], "--items: no file b.csv; expected for example items."),
        (["add-items", "b.csv"], "no file b.csv; expected for example items."),
    ],
)
def test_an_absent_table_is_named_with_its_option(words: list[str], text: str) -> None:
    """Of two tables, the reader learns which is absent."""
    with pytest.raises(DataError) as refused:
        check_file(Path("b.csv"))

    assert with_option(refused.value, words).startswith(text)


@pytest.mark.parametrize(
    ("number", "path"), [(errno.ENOENT, "/elsewhere/x"), (errno.ECONNRESET, "/state"), (errno.ENOENT, None)]
)
def test_a_defect_keeps_its_traceback(number: int, path: str | None) -> None:
    """A missing file that no argument or setting names is not the operator's fault."""
    assert described(OSError(number, "problem", path), ["up"], {"TAILRACE_STATE_DIR": Path("/state")}) is None


def test_a_missing_file_in_an_existing_state_folder_is_a_defect(tmp_path: Path) -> None:
    """Only a folder that does not exist explains a missing file below it."""
    error = FileNotFoundError(errno.ENOENT, "problem", str(tmp_path / "run" / "x"))

    assert described(error, ["up"], {"TAILRACE_STATE_DIR": tmp_path}) is None
    assert described(error, ["up"], {"TAILRACE_STATE_DIR": tmp_path / "run"}) is not None


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (
            PermissionError("Permission denied (os error 13): /data/a.csv"),
            "/data/a.csv: /data/a.csv: Permission denied; give a path that this user may read and write",
        ),
        (
            pl.exceptions.ComputeError("parquet: underlying IO error: No space left on device (os error 28)"),
            FULL,
        ),
        (shutil.Error([("a", "b", "[Errno 28] No space left on device: 'a' -> 'b'")]), FULL),
        (pl.exceptions.ComputeError("length mismatch"), None),
    ],
)
def test_an_error_of_a_library_is_described_too(failure: Exception, message: str | None) -> None:
    """Its number and path are in its text only."""
    assert described(failure, ["report", "/data/a.csv"], {}) == message


def test_a_device_is_not_read_as_a_file_of_erasures() -> None:
    """Reading it would never end."""
    with pytest.raises(ConfigError, match="--out: /dev/full is not a file; give a file"):
        read_accepted(Path("/dev/full"))


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["recommend", "--users", "{file}", "--out", "{link}"], "--out"),
        (["recommend", "--users", "/dev/null", "--exclude-file", "{file}", "--out", "{file}"], "--out"),
        (["erase", "--users", "{file}", "--out", "{file}"], "--out"),
        (["import", "events", "{file}", "--table", "{file}"], "--table"),
        (["profile", "--trace", "{file}", "--json", "{file}"], "--json"),
    ],
)
def test_an_input_is_not_overwritten(tailrace: Run, tmp_path: Path, command: list[str], option: str) -> None:
    """The output's option is named before anything is read, also if it is a link to the input."""
    (file := tmp_path / "given").write_text("u1\n")
    (link := tmp_path / "link").symlink_to(file)
    refused = tailrace(*(word.format(file=file, link=link) for word in command), state_dir=str(tmp_path / "state"))

    assert refused.code == 1
    assert f"{option}: " in refused.err
    assert "is also an input, which would be overwritten; give another file" in " ".join(refused.err.split())
    assert file.read_text() == "u1\n"
