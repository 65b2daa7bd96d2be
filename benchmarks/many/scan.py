"""A scan of every store of a stack for ids that were to be erased, in the encodings that stores and logs use.

    Redis       keys, and values by field
    files       names and contents in the folders of the state, the bundle cache, Redis and Ray
    topics      each record of each topic, with its key and headers
    objects     names and contents in the bundle store
    metrics     lines of the page that Prometheus reads

Compressed contents are read as their values: Parquet, and strings in Redis' file.
"""

import base64
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pyarrow as pa
import pyarrow.parquet as pq

from infra.local.servers.ray_home import ray_home
from models.files import each_file
from models.registry.storage.objects import open_store
from services.contracts.tenant import prefix_of
from services.settings.broker_log import BrokerLog
from services.settings.kafka_clients import broker_as_dependency, open_reader
from services.settings.redis_clients import open_redis
from services.settings.settings import Settings
from services.settings.topic_reader import TopicReader

_BROKER = {"broker", "kafka"}
_PARQUET, _REDIS_FILE, _LZF = b"PAR1", (b"REDIS", b"VALKEY"), b"\xc3"
_MIN_LZF, _MAX_REFERENCE = 4, 264
_CONTEXT_BYTES = 60
AUDIT, TOPIC = "audit", "topic "
"""The kind of the audit's lines, and the prefix of the kinds of records; a deletion leaves both."""
_AUDIT_LINE = b'"event": "audit"'
_POLL_MS = 200
_ALIGNED_FROM = (0, 2, 3)
"""By the number of bytes before a text modulo 3: the first character of its Base64 that depends on no other byte."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A place that may hold an id: the kind of its store, its name there, and its content."""

    kind: str
    place: str
    content: bytes


Store = Callable[[Settings], Iterator[Entry]]


@dataclass(frozen=True, slots=True)
class Sought:
    """A text in each encoding, as patterns after a literal that they contain."""

    forms: tuple[tuple[bytes, re.Pattern[bytes]], ...]

    def context_in(self, content: bytes) -> bytes | None:
        """Return the text with the bytes around it; None if it is absent."""
        for literal, pattern in self.forms:
            if literal in content and (match := pattern.search(content)):
                return content[max(0, match.start() - _CONTEXT_BYTES) : match.end() + _CONTEXT_BYTES]
        return None


def text_sought(text: str) -> Sought:
    """Return a text to find anywhere, also inside a longer text."""
    raw = text.encode()
    forms = {*_plain_forms(text).values(), raw.hex().encode(), raw.hex().upper().encode()}
    for shift, first in enumerate(_ALIGNED_FROM):
        encoded = base64.b64encode(b"\0" * shift + raw)[first : 8 * (shift + len(raw)) // 6]
        forms |= {encoded, encoded.replace(b"+", b"-").replace(b"/", b"_")}
    return Sought(tuple((form, re.compile(re.escape(form))) for form in sorted(forms)))


def prefix_sought(tenant: str) -> Sought:
    """Return the prefix of a tenant's ids to find, but not that of a tenant whose id ends with this id.

    An id whose length in bytes, which may precede it, is the code of a letter or digit (48 and more) may be missed.
    """
    return _not_within(tenant, prefix_of(tenant))


def name_sought(name: str) -> Sought:
    """Return a tenant's id, or a key's, to find as a word: the longer id of another tenant does not count."""
    return _not_within(name, name, after=r"(?![a-z0-9-])")


def _not_within(word: str, text: str, after: str = "") -> Sought:
    forms = _plain_forms(text)
    wide = forms.pop("wide")
    patterns = [(form, rb"(?<![a-z0-9-])" + re.escape(form) + after.encode()) for form in forms.values()]
    hexed = text.encode().hex().encode()
    patterns.append((hexed, rb"(?<!2d)(?<!3\d)(?<![67][0-9a-f])" + hexed))
    patterns.append((wide, rb"(?<![a-z0-9-]\0\0\0)" + re.escape(wide)))
    return Sought(tuple((form, re.compile(pattern)) for form, pattern in patterns if word))


def _plain_forms(text: str) -> dict[str, bytes]:
    """Return a text as it is, in URLs, in JSON with and without escapes, in Python's logs, and in NumPy's arrays."""
    return {
        "raw": text.encode(),
        "url": quote(text, safe="").encode(),
        "json": json.dumps(text)[1:-1].encode(),
        "json in utf-8": json.dumps(text, ensure_ascii=False)[1:-1].encode(),
        "python": repr(text)[1:-1].encode(),
        "wide": text.encode("utf-32-le"),
    }


def scan(
    settings: Settings, soughts: Mapping[str, Sequence[Sought]], stores: Sequence[Store]
) -> dict[str, dict[str, list[str]]]:
    """Return the places in these stores, by kind, that hold a text sought under a name; each is read once."""
    places: dict[str, dict[str, list[str]]] = {name: defaultdict(list) for name in soughts}
    for store in stores:
        for entry in store(settings):
            for name, any_of in soughts.items():
                contexts = (sought.context_in(entry.content) for sought in any_of)
                if (context := next(filter(None, contexts), None)) is not None:
                    places[name][entry.kind].append(f"{entry.place}: {context!r}")
    return places


def traces_of(settings: Settings, text: str, stores: Sequence[Store] | None = None) -> list[str]:
    """Return the places that contain a text, such as a user's id; by default in Redis and in files."""
    kinds = scan(settings, {text: [text_sought(text)]}, stores or (in_redis, in_files))[text]
    return [f"{kind}: {place}" for kind, places in kinds.items() for place in places]


def in_redis(settings: Settings) -> Iterator[Entry]:
    """Yield each key, and each value of it with its field."""
    client = open_redis(settings.redis_address, 5.0)
    for key in client.scan_iter(count=1_000):
        yield Entry("redis", repr(key), key)
        for field, value in _fields(client, key):
            yield Entry("redis", f"{key!r} {field!r}", field + b"\n" + value)
    client.close()


def _fields(client: Any, key: bytes) -> Iterator[tuple[bytes, bytes]]:
    kind = client.type(key)
    if kind == b"hash":
        yield from client.hscan_iter(key, count=500)
    elif kind == b"zset":
        yield from ((b"", member) for member, _ in client.zscan_iter(key))
    elif kind == b"set":
        yield from ((b"", member) for member in client.sscan_iter(key))
    elif kind == b"list":
        yield from ((b"", value) for value in client.lrange(key, 0, -1))
    elif kind == b"string":
        yield b"", client.get(key) or b""
    elif kind != b"none":  # expired meanwhile
        raise ValueError(f"{key!r}: a value of type {kind!r} is not read")


def in_files(settings: Settings) -> Iterator[Entry]:
    """Yield each file but a broker's, by the first folder of its path. Raises OSError."""
    client = open_redis(settings.redis_address, 5.0)
    redis_dir = Path(client.config_get("dir")["dir"])
    client.close()
    yield from in_folders(settings, redis_dir)


def in_folders(settings: Settings, *others: Path) -> Iterator[Entry]:
    """Yield each file of the state, bundles and Ray, and of other folders; needs no running stack. Raises OSError.

    The audit's lines in a log are an entry of their own: they say which items an operation has changed.
    """
    roots = {settings.state_dir: "", settings.bundle_root: "bundles", ray_home(settings.state_dir): "ray"}
    roots |= dict.fromkeys(others, "redis files")
    outer = [root for root in roots if not any(root != whole and root.is_relative_to(whole) for whole in roots)]
    for root in outer:
        for path in each_file(root):
            inner = path.relative_to(root)
            if _BROKER & {*path.parts} or (content := _content(path)) is None:
                continue
            if _AUDIT_LINE in content:
                yield Entry(AUDIT, str(inner), b"\n".join(line for line in content.splitlines() if _AUDIT_LINE in line))
                content = b"\n".join(line for line in content.splitlines() if _AUDIT_LINE not in line)
            yield Entry(roots[root] or inner.parts[0], str(inner), f"{inner}\n".encode() + content)


def _content(path: Path) -> bytes | None:
    """Return a file's content and the values that it compresses; None without a regular file."""
    try:
        if not path.is_file():
            return None
        content = path.read_bytes()
    except FileNotFoundError:  # renamed since, and listed again under its new name
        return None
    if content.startswith(_PARQUET):
        return content + b"\n" + parquet_values(content)
    if content.startswith(_REDIS_FILE):
        return b"\n".join((content, *lzf_strings(content)))
    return content


def parquet_values(content: bytes) -> bytes:
    """Return the values of a Parquet file as JSON; a digest may follow it. Empty for an unfinished file."""
    table = content[: content.rfind(_PARQUET) + len(_PARQUET)]
    try:
        rows = pq.ParquetFile(BytesIO(table)).read().to_pylist()
    except pa.ArrowInvalid:
        return b""
    return json.dumps(rows, ensure_ascii=False, default=_plain).encode(errors="surrogatepass")


def _plain(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def lzf_strings(content: bytes) -> Iterator[bytes]:
    """Yield the strings that Redis' file compresses. Other bytes may look like a string; their content is noise."""
    at = -1
    while (at := content.find(_LZF, at + 1)) >= 0:
        size, begin = _length(content, at + 1)
        full_size, begin = _length(content, begin)
        if _MIN_LZF <= size < full_size <= size * _MAX_REFERENCE and begin + size <= len(content):
            text = _decompressed(content[begin : begin + size], full_size)
            if text is not None:
                yield text


def _length(content: bytes, at: int) -> tuple[int, int]:
    """Return a length of 6, 14 or 32 bits and the offset after it; length 0 for another encoding."""
    first = content[at] if at < len(content) else 0xFF
    if first < 0x40:
        return first, at + 1
    if first < 0x80:
        return int.from_bytes(content[at : at + 2]) & 0x3FFF, at + 2
    return (int.from_bytes(content[at + 1 : at + 5]) if first == 0x80 else 0), at + 5


def _decompressed(packed: bytes, size: int) -> bytes | None:
    """Return the text of an LZF stream; None unless it has this size."""
    text, at = bytearray(), 0
    while at < len(packed) and len(text) < size:
        control = packed[at]
        at += 1
        if control < 32:
            text += packed[at : at + control + 1]
            at += control + 1
            continue
        length = control >> 5
        if length == 7:
            length += packed[at] if at < len(packed) else 0
            at += 1
        back = ((control & 31) << 8) + (packed[at] if at < len(packed) else 0) + 1
        at += 1
        if back > len(text):
            return None
        for _ in range(length + 2):
            text.append(text[-back])
    return bytes(text) if (at, len(text)) == (len(packed), size) else None


def in_topics(settings: Settings) -> Iterator[Entry]:
    """Yield each record of every topic. Raises DependencyUnavailable."""
    with ExitStack() as clients, broker_as_dependency():
        admin, consumer = open_reader(settings.kafka_address, clients, fetch_max_wait_ms=50, max_poll_records=1_000)
        for name in sorted(admin.list_topics()):
            log, reader = BrokerLog(consumer, name), TopicReader(admin, consumer, [name])
            reader.resume({}, {})
            ends = {place: log.end(place.partition) for place in reader.places}
            reader.resume({}, {})
            while any(reader.marks[place].offset < end for place, end in ends.items()):
                for place, records in reader.poll(_POLL_MS).items():
                    for record in records:
                        at = f"{name} {place.partition} {record.offset}"
                        yield Entry(f"{TOPIC}{name}", at, _record(record))


def _record(record: Any) -> bytes:
    headers = (part for name, value in record.headers for part in (name.encode(), value or b""))
    return b"\n".join((record.key or b"", record.value or b"", *headers))


def in_objects(settings: Settings) -> Iterator[Entry]:
    """Yield each object of the bundle store, if there is one."""
    if not settings.bundle_store:
        return
    store = open_store(settings.bundle_store)
    for path in [item["path"] for chunk in store.list() for item in chunk]:
        yield Entry("objects", path, path.encode() + b"\n" + bytes(store.get(path).bytes()))


def in_metrics(settings: Settings) -> Iterator[Entry]:
    """Yield each line of the stack's metrics. Raises httpx.HTTPError."""
    page = httpx.get(f"http://127.0.0.1:{settings.metrics_port}/metrics", timeout=30.0).raise_for_status()
    yield from (Entry("metrics", line, line.encode()) for line in page.text.splitlines())


STORES: tuple[Store, ...] = (in_redis, in_files, in_objects, in_metrics)
"""The stores that a deletion empties: all but the broker's topics, whose records end with the topics' retention."""
EVERYWHERE = (*STORES, in_topics)
