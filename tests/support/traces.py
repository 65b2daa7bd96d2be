"""A search of all stores of a stack, apart from the broker's log, for a text that was to be erased."""

import base64
import json
from io import BytesIO
from pathlib import Path
from urllib.parse import quote

import pyarrow.parquet as pq

from models.files import each_file
from services.settings.redis_clients import open_redis
from services.settings.settings import Settings

_BROKER = {"broker", "kafka"}


def traces_of(settings: Settings, text: str) -> list[str]:
    """Return the places that contain a text, such as a user's ID.

    Searches keys and values of Redis, its file, and files of the state folder, raw and in the usual encodings.
    """
    raw = text.encode()
    forms = {raw, quote(text, safe="").encode(), json.dumps(text)[1:-1].encode(), raw.hex().encode()}
    forms.add(base64.b64encode(raw).rstrip(b"="))
    client = open_redis(settings.redis_address, 5.0)
    traces = []
    for key in client.scan_iter():
        if any(form in key + (client.dump(key) or b"") for form in forms):
            traces.append(repr(key))
        values = client.hgetall(key) if client.type(key) == b"hash" else {}
        if any(form in name + value for name, value in values.items() for form in forms):
            traces.append(f"a field of {key!r}")
    folders = {settings.state_dir, Path(client.config_get("dir")["dir"])}
    client.close()
    for path in (path for folder in folders for path in each_file(folder)):
        if _BROKER & {*path.parts} or not path.is_file():
            continue
        try:
            content = path.read_bytes()
        except FileNotFoundError:  # renamed since, and listed again under its new name
            continue
        if path.suffix == ".parquet":  # compressed; a snapshot of items ends with a digest
            table = content[:-32] if path == settings.items_snapshot else content
            content += "\n".join(map(str, pq.ParquetFile(BytesIO(table)).read().to_pylist())).encode()
        traces += [str(path) for form in forms if form in content]
    return traces
