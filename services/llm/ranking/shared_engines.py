"""The engines of a replica, shared: bundles with the same decoder, apart from an adapter, run on one engine and thread.

A name's adapter is loaded into the engine of its parent's decoder; the parent's own names use that engine without an
adapter. Users are counted: an adapter is unloaded with its last user, and the engine ends with its last. An adapter
that the engine cannot hold is merged into weights of its own, in an engine of its own: see `engine_for`. On a GPU,
steps of adapters run eagerly, since the captured graphs are the base's.
"""

import json
import math
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

import structlog
from pyarrow import compute as pc
from pyarrow import parquet

from models.catalogue import numbers_of
from models.decoder.adapter import read_adapter
from models.decoder.config import read_config
from models.registry.bundle import Bundle
from models.search import search_of
from services.errors import BundleCorrupt, ConfigError
from services.items.live_items import LiveItems
from services.llm.engine.adapters import slots_of
from services.llm.engine.config import EngineConfig
from services.llm.ranking.model import LoadedBundle, load_beside, try_out
from services.llm.serving.engine_thread import EngineThread
from services.residency.state import ModelBytes

log = structlog.get_logger()

_ENGINE_BYTES = 4 * 2**20
"""Memory of an engine apart from its weights and items."""
_ITEM_BYTES = 800
"""Memory of a catalogue's item: its texts, index, codes and masks."""
_CALL_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeed:
    """The engine that a bundle runs on: bundles with an equal key share it. `size`: the bytes that it takes."""

    key: str
    size: ModelBytes
    adapter: str = ""
    """Key of the bundle's adapter in that engine; empty without one, or if it is merged."""
    merged_because: str = ""
    """Why the adapter is merged into weights of its own; empty if it is not."""


def engine_for(bundle: Bundle, config: EngineConfig, number_bytes: int) -> EngineNeed:
    """Return the engine that a trained bundle needs, with weights of this many bytes each and without a KV pool.

    Reads the headers of its weights and the codes of its catalogue. Raises BundleCorrupt, CheckpointError or OSError.
    """
    folder = bundle.path / "decoder"
    num_items, codes = _codes_of(bundle)
    own = num_items * _ITEM_BYTES
    weights = sum(map(_num_values, folder.glob("*.safetensors"))) * number_bytes + _ENGINE_BYTES
    base, adapter = _digest(bundle.base_prefix_version, codes), bundle.adapter_version
    if not adapter:
        return EngineNeed(key=base, size=ModelBytes(own, {base: weights}))
    shapes = _shapes(folder / "adapter" / "adapter_model.safetensors")
    rank = max((shape[0] for name, shape in shapes.items() if ".lora_A" in name), default=0)
    try:
        num_slots, slot_bytes = slots_of(config, read_config(folder), rank, number_bytes)
    except ConfigError as error:
        merged = _digest(bundle.prefix_version, codes)
        return EngineNeed(key=merged, size=ModelBytes(own, {merged: weights}), merged_because=str(error))
    own += 4 * sum(map(math.prod, shapes.values()))
    shared = {base: weights, f"{base} slots": num_slots * slot_bytes}
    return EngineNeed(key=base, size=ModelBytes(own, shared), adapter=_digest(adapter))


@dataclass(frozen=True, slots=True)
class RunningBundle:
    """A loaded bundle and the thread that runs its engine.

    `leave` gives the engine up, once, and returns whether it ends: its thread then stops after the requests in flight.
    """

    bundle: LoadedBundle
    thread: EngineThread
    leave: Callable[[], bool]


@dataclass(slots=True, eq=False)
class _Engine:
    """An engine that loads or runs, the bundle that it was loaded with, and its users by adapter."""

    started: Future[tuple[LoadedBundle, EngineThread]] = field(default_factory=Future)
    users: Counter[str] = field(default_factory=Counter)


class SharedEngines:
    """The engines of one replica by key. Each method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards users, and the order of an engine's loads and unloads
        self._engines: dict[str, _Engine] = {}

    def run(
        self,
        bundle: Bundle,
        need: EngineNeed,
        start: Callable[[], tuple[LoadedBundle, EngineThread]],
        live_items: LiveItems,
    ) -> RunningBundle:
        """Load a bundle on the engine that it needs; for its first user, `start` starts it, without the adapter.

        A bundle that needs an engine that is being started waits for it. Raises as `start` does, CheckpointError,
        BundleCorrupt or DependencyUnavailable.
        """
        if need.merged_because:
            log.warning("adapter_merged", version=bundle.version, reason=need.merged_because)
        engine, is_first = self._enter(need)
        try:
            if is_first:
                self._start(engine, need.key, start)
            loaded, thread = engine.started.result()
            if not is_first:
                loaded = load_beside(bundle, loaded.engine, live_items)
            if need.adapter:
                loaded = replace(loaded, adapter=need.adapter)
                self._load_adapter(bundle, loaded, thread)
        except BaseException:
            self._leave(engine, need)
            raise
        return RunningBundle(loaded, thread, partial(self._leave, engine, need))

    def _enter(self, need: EngineNeed) -> tuple[_Engine, bool]:
        with self._lock:
            is_first = need.key not in self._engines
            engine = self._engines.setdefault(need.key, _Engine())
            engine.users[need.adapter] += 1
            return engine, is_first

    def _start(self, engine: _Engine, key: str, start: Callable[[], tuple[LoadedBundle, EngineThread]]) -> None:
        try:
            engine.started.set_result(start())
        except BaseException as error:  # noqa: BLE001 - all users of the engine raise it
            with self._lock:
                del self._engines[key]
            engine.started.set_exception(error)

    def _load_adapter(self, bundle: Bundle, loaded: LoadedBundle, thread: EngineThread) -> None:
        adapter = read_adapter(bundle.adapter_dir, loaded.engine.decoder_config)
        with self._lock:
            loading = thread.call(lambda engine: engine.load_adapter(loaded.adapter, adapter))
        loading.result(_CALL_S)
        try_out(loaded, thread)

    def _leave(self, engine: _Engine, need: EngineNeed) -> bool:
        with self._lock:
            engine.users[need.adapter] -= 1
            is_last = not engine.users.total()
            if is_last and self._engines.get(need.key) is engine:
                del self._engines[need.key]
            if engine.started.exception() is not None:
                return True
            _, thread = engine.started.result()
            if is_last:
                thread.stop()
            elif need.adapter and not engine.users[need.adapter]:
                thread.call(lambda running: running.unload_adapter(need.adapter))
            return is_last


def _codes_of(bundle: Bundle) -> tuple[int, str]:
    """Return the number of items, and what identifies their codes and the search over them."""
    search, path = search_of(bundle.manifest), bundle.path / "catalogue.parquet"
    columns = ["code", *(["popularity"] if search.popular_first else [])]
    try:
        table = parquet.ParquetFile(path).read(columns).select(columns)
        flat = [pc.list_flatten(table["code"]), *table.columns[1:]]
        values = [numbers_of(column).tobytes() for column in flat]
        levels = {name.decode(): value.decode() for name, value in (table.schema.metadata or {}).items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BundleCorrupt(f"{path}: not a catalogue ({error})") from error
    about = json.dumps([levels, search.record()], sort_keys=True)
    return table.num_rows, _digest(about, *values)


def _digest(*parts: str | bytes) -> str:
    digest = blake2b(digest_size=16)
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def _num_values(path: Path) -> int:
    return sum(map(math.prod, _shapes(path).values()))


def _shapes(path: Path) -> dict[str, list[int]]:
    """Return the shapes of a safetensors file's tensors, from its header."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return {name: tensor["shape"] for name, tensor in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError) as error:
        raise BundleCorrupt(f"{path}: not a safetensors file ({error})") from error
