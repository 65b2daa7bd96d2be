"""Many small bundles in an object store, which share their files by content, and the faults of that store."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import SHUT_RDWR
from threading import Thread
from urllib.parse import urlsplit

from benchmarks.load.lone_plane import write_bundle
from benchmarks.scale.row import catalogue_of
from models.files import file_sha256
from models.registry.bundle import hashes
from models.registry.name_record import NameRecord
from models.registry.popular import popular_items
from models.registry.storage.objects import open_store
from services.settings.settings import environment_kept, inherited_environment

_NUM_WRITING = 8
NUM_ITEMS = 2_000


def version_of(name: str) -> str:
    """Return the version that is live under a name."""
    return f"v-{name}"


def publish_many(url: str, names: list[str], folder: Path) -> None:
    """Make a bundle live under each name, by writing the objects that publications and promotions write."""
    source, store = folder / "source", open_store(url)
    write_bundle(catalogue_of(NUM_ITEMS), source)
    about = {"dataset": "made up", "popular": popular_items(source), "files": hashes(source)}
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        store.put(f"files/{file_sha256(path)}", path)

    def publish(name: str) -> None:
        version = version_of(name)
        store.put(f"versions/{version}.json", json.dumps({"version": version, **about}).encode())
        store.put(f"names/{name}.json", NameRecord(live=version).encode())

    with ThreadPoolExecutor(_NUM_WRITING) as pool:
        list(pool.map(publish, names))


@contextmanager
def damaged_file(url: str) -> Iterator[None]:
    """Flip a byte of the catalogue, which all bundles share, for the time of this context."""
    store = open_store(url)
    paths = [one["path"] for chunk in store.list("files/") for one in chunk]
    contents = {path: bytes(store.get(path).bytes()) for path in paths}
    path = next(path for path, content in contents.items() if content.startswith(b"PAR1"))
    store.put(path, contents[path][:-9] + bytes([contents[path][-9] ^ 1]) + contents[path][-8:])
    try:
        yield
    finally:
        store.put(path, contents[path])


class StoreProxy:
    """A TCP proxy before the object store: delays requests by `delay_s`, or refuses connections."""

    def __init__(self, target: str) -> None:
        split = urlsplit(target)
        self._host, self._port = split.hostname or "127.0.0.1", split.port or 80
        self.delay_s = 0.0
        self.is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self, *, is_cut: bool) -> None:
        """Cut or restore the connection."""
        self.is_cut = is_cut
        for writer in list(self._writers) if is_cut else ():
            with suppress(OSError):
                writer.get_extra_info("socket").shutdown(SHUT_RDWR)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection."""
        if self.is_cut:
            writer.transport.abort()
            return
        there_reader, there_writer = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, there_writer}
        forth = asyncio.create_task(self._copy(reader, there_writer, is_delayed=True))
        await self._copy(there_reader, writer, is_delayed=False)
        forth.cancel()
        self._writers -= {writer, there_writer}

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_delayed: bool) -> None:
        try:
            while chunk := await reader.read(1 << 16):
                if is_delayed and self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(chunk)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


@contextmanager
def wire_to_store() -> Iterator[StoreProxy]:
    """Put a wire before the object store of this process's environment; stores opened meanwhile use it."""
    wire = StoreProxy(inherited_environment()["AWS_ENDPOINT_URL"])
    loop, started = asyncio.new_event_loop(), Future[int]()

    async def serve() -> None:
        server = await asyncio.start_server(wire.handle, "127.0.0.1")
        started.set_result(server.sockets[0].getsockname()[1])

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.create_task(serve())
        loop.run_forever()

    Thread(target=run, name="wire", daemon=True).start()
    with environment_kept(AWS_ENDPOINT_URL=f"http://127.0.0.1:{started.result(10.0)}"):
        yield wire
    loop.call_soon_threadsafe(loop.stop)
