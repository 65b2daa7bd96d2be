"""The loaded models of one process: loads a name when it is first asked for, off the request path, and unloads others.

`ResidencyTable` decides, threads of this module do the work: several fetch files, two follow the resident names whose
records have changed, and a single thread loads and unloads, so that loading takes at most one core from requests. A
name is fetched and loaded once, however many requests ask for it meanwhile. A failed name is retried after a second
when it is asked for again, with the pause doubling after each consecutive failure up to a minute. The module does not
know what a model is.
"""

import math
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import structlog

from services.contracts.fairness import FairOrder
from services.contracts.tenant import tenant_of_name
from services.observability.metrics import ResidencyMetrics
from services.residency.state import FORGET_S, Actions, ModelBytes, Residency, ResidencyTable, TooLarge

log = structlog.get_logger()

_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 60.0
_NUM_FETCHING, _NUM_FOLLOWING = 4, 2
_NUM_AHEAD = 8
"""Names of a tenant that are fetched before memory is free for them. A name that is wanted more than these is fetched
too; further fetches would only take time from requests."""
_SWITCH_S = 0.0001
"""How long a thread keeps the interpreter while another waits. With Python's 5 ms requests wait for loads."""
_ACT_EVERY_S = 1.0
"""While names wait for memory, requests find out this often whether a model may be unloaded by now."""

Model = TypeVar("Model")


class ModelSource(Protocol[Model]):
    """Loads models by name. Each method may block; calls for one name never overlap."""

    def fetch(self, name: str) -> int | ModelBytes:
        """Bring a name's files to this machine, and return the bytes of memory that the model will take."""
        ...

    def load(self, name: str) -> Model:
        """Load a fetched model."""
        ...

    def due(self, models: Mapping[str, Model]) -> Collection[str]:
        """Return the names that `refresh` may have work for. Called at each poll with the resident names."""
        ...

    def refresh(self, name: str, model: Model) -> None:
        """Follow the name's record. Never raises."""
        ...

    def is_broken(self, model: Model) -> bool:
        """Whether a part of the model could not be loaded; it is retried by `refresh`."""
        ...

    def unload(self, name: str, model: Model) -> None:
        """Free a model that has no references."""
        ...


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """The last failure of a name that cannot be loaded, and the time of its next attempt."""

    reason: str
    pause_s: float
    retry_at_s: float


@dataclass(slots=True)
class _Asked:
    """The requests for a name whose files are not fetched yet."""

    last_s: float
    num_requests: int = 1


class Residents(Generic[Model]):
    """The models of one process by name. All methods may be called from any thread."""

    def __init__(
        self,
        table: ResidencyTable,
        source: ModelSource[Model],
        metrics: ResidencyMetrics,
        poll_s: float,
        clock: Callable[[], float] = time.monotonic,
        settled: Callable[[str], object] = lambda name: None,
    ) -> None:
        """`settled` is called with each name that was loaded or has failed. It must not block."""
        self._settled = settled
        self._table = table
        self._source = source
        self._metrics = metrics
        self._poll_s = poll_s
        self._clock = clock
        self._changed = threading.Condition(threading.RLock())  # guards the table and what follows
        self._models: dict[str, Model] = {}
        self._fetching: dict[str, _Asked] = {}
        self._to_fetch: dict[str, dict[str, _Asked]] = {}
        """The names whose files are fetched next, by tenant."""
        self._fetch_order = FairOrder()
        self._acted_s = -math.inf
        self._is_looking = False
        self._refreshing: set[str] = set()
        self._failures: dict[str, LoadFailure] = {}
        self._reported_bytes: dict[str, int] = {}
        self._fetchers = ThreadPoolExecutor(_NUM_FETCHING, "model-fetch")
        self._loader = ThreadPoolExecutor(1, "model-load")
        self._followers = ThreadPoolExecutor(_NUM_FOLLOWING, "model-follow")
        self._stopped = threading.Event()
        self._poller = threading.Thread(target=self._poll, name="model-poll", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether names are followed."""
        return self._poller.is_alive()

    def start(self) -> None:
        """Load the pinned names, then follow all resident names.

        Blocks until each pinned name is loaded or has failed, or until `stop`.

        Lets requests interrupt the loading threads of this process sooner.
        """
        sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))
        with self._changed:
            for name in sorted(self._table.pinned):
                self._ask_for(name)
            self._changed.wait_for(lambda: self._stopped.is_set() or all(map(self._is_settled, self._table.pinned)))
        self._poller.start()

    def stop(self) -> None:
        """Stop loading, and unload every model that has no references. Does not wait for a load in progress."""
        with self._changed:  # loads are submitted under this lock
            self._stopped.set()
            self._changed.notify_all()
            for pool in (self._fetchers, self._loader, self._followers):
                pool.shutdown(wait=False, cancel_futures=True)
            models, self._models = self._models, {}
        for name, model in models.items():
            self._source.unload(name, model)

    def acquire(self, name: str) -> Model | None:
        """Return a resident model, which stays in memory until `release`; None if it is absent, and load it then."""
        with self._changed:
            if self._table.acquire(name, self._clock()):
                return self._models[name]
            self._ask_for(name)
            return None

    def touch(self, name: str) -> Model | None:
        """Return a resident model as `acquire` does, without a reference: for models that count their users.

        Waits for no other thread if the model is resident.
        """
        if self._table.use(name, self._clock()):
            return self._models.get(name)
        with self._changed:
            self._ask_for(name)
        return None

    def release(self, name: str) -> None:
        """Give a model back."""
        with self._changed:
            self._table.release(name)
            if self._table.state(name) is Residency.DRAINING:
                self._act()

    def peek(self, name: str) -> Model | None:
        """Return a resident model without a reference, for reports."""
        with self._changed:
            return self._models.get(name)

    def models(self) -> list[Model]:
        """Return all models in memory."""
        with self._changed:
            return list(self._models.values())

    def state(self, name: str) -> Residency:
        """Return the state of a name; a name whose files are fetched is loading."""
        with self._changed:
            is_fetching = name in self._fetching or name in self._to_fetch.get(tenant_of_name(name), ())
            return Residency.LOADING if is_fetching else self._table.state(name)

    def failure(self, name: str) -> LoadFailure | None:
        """Return the last failure of a name that cannot be loaded now."""
        with self._changed:
            return self._failures.get(name)

    def resize(self, name: str, size: int | ModelBytes) -> bool:
        """Change the bytes of a name that is loading or resident; return whether they fit. See ResidencyTable."""
        with self._changed:
            fits = self._table.resize(name, size, self._clock())
            self._act()
            self._report_bytes()
            return fits

    def _is_settled(self, name: str) -> bool:
        return self._table.state(name) is Residency.RESIDENT or name in self._failures

    def _ask_for(self, name: str) -> None:
        """Fetch a name unless it is on its way, or has failed a short time ago."""
        now_s = self._clock()
        self._table.still_wanted(name, now_s)
        failure = self._failures.get(name)
        is_due = failure is None or now_s >= failure.retry_at_s
        waiting = self._to_fetch.get(tenant := tenant_of_name(name), {})
        if (asked := waiting.get(name) or self._fetching.get(name)) is not None:
            asked.last_s = now_s
            asked.num_requests += 1
        elif is_due and self._table.state(name) is Residency.ABSENT:
            asked = self._to_fetch.setdefault(tenant, {})[name] = _Asked(now_s)
        if asked is not None and name not in self._fetching and self._may_fetch(name, asked):
            self._fetch_more()
        if now_s - self._acted_s >= _ACT_EVERY_S and self._table.names(Residency.WAITING):
            self._acted_s = now_s
            if not self._stopped.is_set():
                self._loader.submit(self._act_now)

    def _fetch_more(self) -> None:
        """Start the fetches of the next names.

        One at a time while fetched names wait for memory: further fetches in parallel would take time from requests.
        """
        num_parallel = 1 if self._table.names(Residency.WAITING) else _NUM_FETCHING
        while len(self._fetching) < num_parallel and not self._stopped.is_set():
            if (name := self._next_to_fetch()) is None:
                return
            asked = self._fetching[name] = self._to_fetch[tenant_of_name(name)].pop(name)
            self._fetchers.submit(self._fetch, name, asked)

    def _next_to_fetch(self) -> str | None:
        """Return the name that is fetched next: tenants take turns, the most wanted name of a tenant is first.

        Forgets names that nobody has asked for for a while.
        """
        since_s = self._clock() - FORGET_S
        most_wanted = dict[str, str]()
        for tenant, waiting in list(self._to_fetch.items()):
            kept = {name: asked for name, asked in waiting.items() if asked.last_s >= since_s or self._is_pinned(name)}
            self._to_fetch[tenant] = kept
            if not kept:
                del self._to_fetch[tenant]
                continue
            name = max(kept, key=lambda name: (self._is_pinned(name), kept[name].num_requests))
            if self._may_fetch(name, kept[name]):
                most_wanted[tenant] = name
        if not most_wanted:
            return None
        tenant = self._fetch_order.next(most_wanted)
        self._fetch_order.charge(tenant, 1, 1)
        return most_wanted[tenant]

    def _may_fetch(self, name: str, asked: _Asked) -> bool:
        """Return whether few names of the tenant are ahead of this name: fetched, and wanted as much."""
        tenant = tenant_of_name(name)
        others = [other.num_requests for key, other in self._fetching.items() if tenant_of_name(key) == tenant]
        num_ahead = sum(number >= asked.num_requests for number in [*others, *self._table.requests_waiting(tenant)])
        return self._is_pinned(name) or num_ahead < _NUM_AHEAD

    def _is_pinned(self, name: str) -> bool:
        return name in self._table.pinned

    def _fetch(self, name: str, asked: _Asked) -> None:
        try:
            size = self._source.fetch(name)
            with self._changed:
                del self._fetching[name]
                self._table.want(name, size, self._clock(), asked.num_requests)
                self._act()
        except Exception as error:  # noqa: BLE001 - the other names must keep serving
            with self._changed:
                self._fetching.pop(name, None)
                self._record_failure(name, error)
                self._fetch_more()

    def _load(self, name: str) -> None:
        began_s = self._clock()
        try:
            model = self._source.load(name)
        except Exception as error:  # noqa: BLE001 - the other names must keep serving
            with self._changed:
                self._table.failed(name)
                self._record_failure(name, error)
                self._act()
            return
        with self._changed:
            self._models[name] = model
            self._failures.pop(name, None)
            self._table.loaded(name, self._clock())
            self._metrics.load_failed.labels(self._metrics.part, name).set(self._source.is_broken(model))
            self._metrics.loads.labels(self._metrics.part, name).inc()
            self._metrics.load_seconds.observe(self._clock() - began_s)
            log.info("model_loaded", name=name, seconds=round(self._clock() - began_s, 3))
            self._changed.notify_all()
            self._settled(name)
            self._act()

    def _unload(self, name: str) -> None:
        with self._changed:
            model = self._models.pop(name)
        try:
            self._source.unload(name, model)
        except Exception:  # a draining name would block the loads of all others
            log.exception("model_unload_failed", name=name)
        del model
        with self._changed:
            reason = self._table.unloaded(name)
            self._metrics.evictions.labels(self._metrics.part, name, reason).inc()
            log.info("model_unloaded", name=name, reason=reason.value)
            self._act()
            self._report_bytes()

    def _act_now(self) -> None:
        with self._changed:
            self._act()

    def _act(self) -> None:
        """Start the loads and unloads that the table allows now."""
        self._acted_s = self._clock()
        actions = Actions() if self._stopped.is_set() else self._table.next_actions(self._clock())
        for name, error in actions.refused.items():
            self._record_failure(name, error)
        for name in actions.load:
            self._loader.submit(self._load, name)
        for name in actions.unload:
            self._loader.submit(self._unload, name)
        if actions.load:
            self._report_bytes()
        self._fetch_more()

    def _report_bytes(self) -> None:
        """Update the metrics of memory that have changed; names that share memory change together."""
        before, now = self._reported_bytes, self._table.bytes_by_name()
        for name in before.keys() | now.keys():
            if before.get(name) != now.get(name):
                self._metrics.resident_bytes.labels(self._metrics.part, name).set(now.get(name, 0))
        self._reported_bytes = dict(now)
        self._metrics.shared_bytes.labels(self._metrics.part).set(self._table.shared_bytes)

    def _record_failure(self, name: str, error: Exception) -> None:
        before = self._failures.get(name)
        pause_s = _FIRST_PAUSE_S if before is None else min(_MAX_PAUSE_S, 2 * before.pause_s)
        if isinstance(error, TooLarge):
            pause_s = _MAX_PAUSE_S
        self._failures[name] = LoadFailure(str(error), pause_s, self._clock() + pause_s)
        self._metrics.load_failed.labels(self._metrics.part, name).set(1)
        self._metrics.resident_bytes.labels(self._metrics.part, name)  # lists a name that was never in memory
        self._report_bytes()
        self._changed.notify_all()
        self._settled(name)
        log.error("model_refused", name=name, retry_after_s=pause_s, error=repr(error))

    def _poll(self) -> None:
        while not self._stopped.wait(self._poll_s):
            with self._changed:
                if self._stopped.is_set():
                    return
                for name in self._table.pinned:
                    self._ask_for(name)
                self._act()
                if not self._is_looking:
                    self._is_looking = True
                    self._followers.submit(self._follow_due, dict(self._models))

    def _follow_due(self, models: Mapping[str, Model]) -> None:
        """Follow the names whose records have changed: reads of all records would take time from requests."""
        due: Collection[str] = ()
        try:
            due = self._source.due(models)
        finally:
            with self._changed:
                self._is_looking = False
                if due and not self._stopped.is_set():
                    self._act()  # before a follow, whose reference would keep an idle name
                    for name in due:
                        self._follow(name)

    def _follow(self, name: str) -> None:
        if name in self._models and name not in self._refreshing and self._table.acquire(name, None):
            self._refreshing.add(name)
            self._followers.submit(self._refresh, name, self._models[name])

    def _refresh(self, name: str, model: Model) -> None:
        try:
            self._source.refresh(name, model)
            self._metrics.load_failed.labels(self._metrics.part, name).set(self._source.is_broken(model))
        finally:
            with self._changed:
                self._refreshing.discard(name)
            self.release(name)
