"""The scan for a deleted tenant's ids, apart from servers: encodings, tenants of similar ids, and files."""

import base64
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.many.scan import in_folders, name_sought, prefix_sought, scan, text_sought
from infra.local.servers.ray_home import make_ray_home, remove_ray_home
from services.contracts.tenant import scoped
from services.settings.settings import Settings

ID = "user-müller/4711"


@pytest.mark.parametrize("before", ["", "a", "bc"])
@pytest.mark.parametrize(
    "encoded",
    [
        str.encode,
        lambda text: json.dumps(text).encode(),
        lambda text: repr(text).encode(),
        lambda text: text.encode().hex().encode(),
        lambda text: text.encode().hex().upper().encode(),
        lambda text: base64.b64encode(text.encode()),
        lambda text: base64.urlsafe_b64encode(text.encode()),
        lambda text: np.array([text]).tobytes(),
        lambda text: text.replace("ü", "%C3%BC").replace("/", "%2F").encode(),
    ],
    ids=["raw", "json", "python", "hex", "upper hex", "base64", "base64 of URLs", "numpy", "url"],
)
def test_an_id_is_found_in_each_encoding_at_any_place(encoded, before: str) -> None:
    """An id inside a longer text is found at any offset; another id is not."""
    content = b"\xff\x00" + encoded(f"{before}{ID} and more") + b"\xff"

    assert text_sought(ID).context_in(content)
    assert text_sought(ID.replace("4711", "5711")).context_in(content) is None


@pytest.mark.parametrize("encoded", [str.encode, json.dumps, repr, lambda text: text.encode().hex()])
def test_a_tenant_whose_id_ends_with_anothers_is_not_the_other(encoded) -> None:
    """The prefix of `acme` is not found in an id of `eu-acme`, nor its name in the other's."""
    own, other = ("", encoded(scoped("acme", "u"))), ("", encoded(scoped("eu-acme", "u")))
    contents = [
        b" ".join(part if isinstance(part, bytes) else part.encode() for part in parts) for parts in (own, other)
    ]

    assert [prefix_sought("acme").context_in(content) is not None for content in contents] == [True, False]
    assert [prefix_sought("eu-acme").context_in(content) is not None for content in contents] == [False, True]


def test_a_name_is_found_as_a_word() -> None:
    """Longer ids that begin or end with it do not name the tenant; its model names do."""
    texts = (b'tenant="acme"', b"acme.default", b"eu-acme", b"acme-eu", b"acme2")

    assert [name_sought("acme").context_in(text) is not None for text in texts] == [True, True, False, False, False]


def test_files_are_searched_by_name_and_by_compressed_content(tmp_path: Path) -> None:
    """Each planted id is found: in a file's name, in Parquet with a digest after it, in the logs of Ray."""
    settings = Settings(state_dir=tmp_path)
    plain, table = tmp_path / "log" / f"of-{ID.replace('/', '_')}", tmp_path / "items" / "snapshot.parquet.acme"
    plain.parent.mkdir()
    plain.touch()
    table.parent.mkdir()
    ids = [ID if number % 7 == 3 else f"{ID[:-4]}{number:04}" for number in range(1_000)]
    pq.write_table(pa.table({"ids": pa.array([ids])}), table, compression="zstd", write_statistics=False)
    table.write_bytes(table.read_bytes() + bytes(32))
    (tmp_path / "log" / "unfinished.tmp").write_bytes(b"PAR1")
    raw = table.read_bytes()
    ray = make_ray_home(tmp_path)
    (ray / "access.log").write_text(f'GET "/v1/users/{ID}"\n')
    try:
        places = scan(settings, {"id": [text_sought(ID)], "name": [text_sought(plain.name)]}, [in_folders])
    finally:
        remove_ray_home(tmp_path)

    assert ID.encode() not in raw
    assert {kind: len(found) for kind, found in places["id"].items()} == {"items": 1, "ray": 1}
    assert [*places["name"]] == ["log"]


def test_lines_of_the_audit_are_apart(tmp_path: Path) -> None:
    """A log that names an id only in the audit's lines holds it nowhere else."""
    lines = ({"event": "audit", "act": f"PUT /v1/items/{ID}"}, {"event": "recommended", "request_id": "r"})
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "gateway.log").write_text("".join(json.dumps(line) + "\n" for line in lines))
    places = scan(
        Settings(state_dir=tmp_path), {"id": [text_sought(ID)], "request": [text_sought('"r"')]}, [in_folders]
    )

    assert [*places["id"]] == ["audit"]
    assert [*places["request"]] == ["logs"]
