"""One address at which a second broker replaces the first, with the same topic ID but a shorter or different log.

The embedded broker keeps nothing, so a new broker simulates a restored volume or a power loss: this proxy replaces the
second broker's topic ID by the first's in all traffic, and vice versa.
"""

import asyncio
import struct
import threading
import uuid

from kafka import KafkaAdminClient

from tests.support.servers import HOST, Server, free_port

_LENGTH = struct.Struct(">i")


class SubstitutedBroker:
    """A proxy in its own thread. Brokers advertise the proxy's address."""

    def __init__(self) -> None:
        self.port = free_port()
        self._server: Server | None = None
        self._swap = b"", b""
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def lead_to(self, server: Server | None, swap: tuple[bytes, bytes] | None = None) -> None:
        """Cut all connections and lead to this broker from now on.

        `swap` are the bytes that clients see, and the broker's own bytes.
        """

        async def switch() -> None:
            """Switch brokers, in the proxy's thread."""
            self._server = server
            self._swap = swap or (b"", b"")

        asyncio.run_coroutine_threadsafe(switch(), self._loop).result(10)
        self.cut()

    def cut(self) -> None:
        """Cut all connections; new connections lead to the same broker."""

        async def abort() -> None:
            """Cut the connections, in the proxy's thread."""
            for writer in self._writers:
                writer.transport.abort()

        asyncio.run_coroutine_threadsafe(abort(), self._loop).result(10)

    def close(self) -> None:
        """End it."""

        async def end() -> None:
            """Stop listening and forwarding."""
            self._listener.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        self.lead_to(None)
        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._serve, HOST, self.port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:
            return writer.transport.abort()
        back_reader, back_writer = await asyncio.open_connection(HOST, self._server.port)
        self._writers |= {writer, back_writer}
        seen, own = self._swap
        await asyncio.wait(
            [
                asyncio.create_task(_pump(reader, back_writer, seen, own)),
                asyncio.create_task(_pump(back_reader, writer, own, seen)),
            ],
            return_when=asyncio.FIRST_COMPLETED,
        )
        for stream in (writer, back_writer):
            stream.transport.abort()
            self._writers.discard(stream)
        return None


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, old: bytes, new: bytes) -> None:
    """Forward whole frames in one direction, with `new` in place of `old`, until one end closes."""
    try:
        while True:
            (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            frame = await reader.readexactly(length)
            writer.write(_LENGTH.pack(length) + (frame.replace(old, new) if old else frame))
            await writer.drain()
    except (asyncio.IncompleteReadError, OSError):
        return


def make_topic(server: Server, front: SubstitutedBroker, topic: str) -> bytes:
    """Create a topic of one partition at a broker that advertises the proxy, bypassing it; return its ID."""
    door = SubstitutedBroker()
    door.lead_to(server, (_LENGTH.pack(door.port), _LENGTH.pack(front.port)))
    admin = KafkaAdminClient(bootstrap_servers=door.address)
    made = admin.create_topics({topic: {"num_partitions": 1, "replication_factor": -1}})
    admin.close()
    door.close()
    return uuid.UUID(str(made["topics"][0]["topic_id"])).bytes
