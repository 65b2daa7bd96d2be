"""The bytes of a file as UTF-8: compressed files, byte order marks, UTF-16 and Windows-1252. Independent of rows."""

import bz2
import codecs
import gzip
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from services.errors import DataError

CHUNK_BYTES = 8 << 20
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_OPENERS = ((b"\x1f\x8b", gzip.open), (b"BZh", bz2.open), (b"\xfd7zXZ\x00", lzma.open))
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
_SNIFFED = 1_024


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file, decompressed. Raises OSError."""
    opener = _decompressor_of(path)
    return path.open("rb") if opener is None else cast("IO[bytes]", opener(path, "rb"))


def is_compressed(path: Path) -> bool:
    return _decompressor_of(path) is not None


def _decompressor_of(path: Path) -> Callable[[Path, str], Any] | None:
    with path.open("rb") as file:
        start = file.read(8)
    return next((opener for magic, opener in _OPENERS if start.startswith(magic)), None)


def head_of(path: Path) -> bytes:
    """Return the first bytes of a file, decompressed. Raises DataError."""
    with reading(path), open_bytes(path) as file:
        return file.read(_SNIFFED)


def utf8_chunks(path: Path) -> Iterator[bytes]:
    """Yield the content as UTF-8 without a byte order mark; invalid bytes are passed through. Raises DataError."""
    with reading(path), open_bytes(path) as file:
        start = file.read(_SNIFFED)
        mark, encoding = next(((mark, name) for mark, name in _MARKS if start.startswith(mark)), (b"", _guess(start)))
        first = start[len(mark) :]
        if encoding == "utf-8":
            yield from _plain(first, file)
            return
        decoder = codecs.getincrementaldecoder(encoding)(errors="surrogatepass")
        while True:
            try:
                text = decoder.decode(first, final=not first)
            except UnicodeDecodeError as error:
                raise DataError("", f"{path.name} is invalid {encoding} text ({error.reason})", "UTF-8 text") from error
            yield text.encode(errors="surrogatepass")
            if not first:
                return
            first = file.read(CHUNK_BYTES)


def _plain(first: bytes, file: IO[bytes]) -> Iterator[bytes]:
    chunk = first + file.read(CHUNK_BYTES - len(first))
    while chunk:
        yield chunk
        chunk = file.read(CHUNK_BYTES)


def _guess(start: bytes) -> str:
    """Return UTF-16 for text without a byte order mark if every second byte is zero."""
    pairs = max(1, len(start) // 2)
    for offset, name in ((1, "utf-16-le"), (0, "utf-16-be")):
        if start[offset::2].count(0) > 0.6 * pairs and start[1 - offset :: 2].count(0) < 0.1 * pairs:
            return name
    return "utf-8"


class reading:  # noqa: N801 - a context manager that reads as a verb
    """Turns file-system and decompression errors into a DataError that names the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Raise DataError for a file that cannot be read or is truncated."""
        if isinstance(error, EOFError | zlib.error | lzma.LZMAError | OSError):
            why = "it is cut off" if isinstance(error, EOFError) else str(error)
            raise DataError("", f"{self._path} cannot be read ({why})", "a whole file") from error


def as_utf8(data: bytes) -> tuple[bytes, int, list[int]]:
    """Return the data with each line in UTF-8, the number of Windows-1252 lines, and the numbers of undecodable lines.

    A line with half of a surrogate pair is invalid in every encoding; a NUL byte replaces its content.
    """
    if data.isascii():
        return data, 0, []
    try:
        data.decode()
    except UnicodeDecodeError:
        pass
    else:
        return data, 0, []
    lines, num_other, broken = data.split(b"\n"), 0, []
    for number, line in enumerate(lines):
        try:
            line.decode()
        except UnicodeDecodeError:
            if _SURROGATE.search(line):
                lines[number] = b"\0"
                broken.append(number)
                continue
            lines[number] = decode_other(line).encode()
            num_other += 1
    return b"\n".join(lines), num_other, broken


def decode_other(line: bytes) -> str:
    """Decode text that is not UTF-8: Windows-1252, or Latin-1 for bytes undefined in Windows-1252."""
    try:
        return line.decode("cp1252")
    except UnicodeDecodeError:
        return line.decode("latin-1")
