"""The threads that load models: one load for many requests, failures, and memory that is freed."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from services.observability.metrics import ResidencyMetrics
from services.residency.report import resident_models
from services.residency.residents import Residents
from services.residency.state import Residency, ResidencyTable
from tests.support.wait import wait_for


@dataclass
class Files:
    """Models that are their names; `gate` holds loads back, and names in `broken` fail."""

    sizes: dict[str, int]
    gate: threading.Event = field(default_factory=threading.Event)
    fetch_gate: threading.Semaphore | None = None
    fetched: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    loads: Counter[str] = field(default_factory=Counter)
    unloads: Counter[str] = field(default_factory=Counter)
    in_memory: set[str] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    looks: Counter[frozenset[str]] = field(default_factory=Counter)
    look_gate: threading.Event = field(default_factory=threading.Event)
    num_looks_held: int = 0
    refresh_gate: threading.Event = field(default_factory=threading.Event)
    refreshed: list[str] = field(default_factory=list)

    def fetch(self, name: str) -> int:
        """Return the size of a name, or fail."""
        if self.fetch_gate is not None:
            self.fetch_gate.acquire(timeout=30.0)
        self.fetched.append(name)
        if name in self.broken:
            raise OSError(f"{name}: no space left on device")
        return self.sizes[name]

    def load(self, name: str) -> str:
        """Load when the gate is open."""
        self.gate.wait(30.0)
        assert name not in self.in_memory
        self.loads[name] += 1
        self.in_memory.add(name)
        return name

    def due(self, models: Mapping[str, str]) -> set[str]:
        """Return the changed names when the gate is open."""
        self.looks[frozenset(models)] += 1
        if not self.look_gate.wait(0.01):
            self.num_looks_held += 1
            self.look_gate.wait(30.0)
        return self.changed & models.keys()

    def refresh(self, name: str, model: str) -> None:
        """Record the name, and return when the gate is open."""
        self.refreshed.append(name)
        self.refresh_gate.wait(30.0)

    def is_broken(self, model: str) -> bool:
        return False

    def unload(self, name: str, model: str) -> None:
        """Forget the model."""
        self.in_memory.remove(model)
        self.unloads[name] += 1


class Scene:
    """Residents over `Files`, with a clock that only moves by hand."""

    def __init__(self, poll_s: float = 0.01, **options: object) -> None:
        self.files = Files({"a": 4, "b": 4, "c": 4})
        self.files.look_gate.set()
        self.now_s = 0.0
        self.registry = CollectorRegistry()
        table = ResidencyTable(8, **options)  # type: ignore[arg-type]
        metrics = ResidencyMetrics(self.registry, "llm")
        self.models = Residents(table, self.files, metrics, poll_s, clock=lambda: self.now_s)

    def wait_for(self, name: str, state: Residency) -> None:
        wait_for(lambda: self.models.state(name) is state)

    def value(self, metric: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(metric, {"part": "llm", **labels})


@pytest.fixture
def scene() -> Iterator[Scene]:
    """A started scene with room for two of three names."""
    with ExitStack() as stack:
        scene = Scene()
        stack.callback(scene.models.stop)
        stack.callback(scene.files.gate.set)
        stack.callback(scene.files.refresh_gate.set)
        scene.models.start()
        yield scene


def test_requests_interrupt_a_load_sooner_than_pythons_default(scene: Scene) -> None:
    """A thread that waits for the interpreter gets it after half a millisecond, not 5 ms."""
    assert sys.getswitchinterval() <= 0.0005


def test_a_hundred_simultaneous_first_calls_load_once(scene: Scene) -> None:
    """While a name loads, every call returns at once without it, and one load serves them all."""
    calls = [threading.Thread(target=scene.models.acquire, args=("a",)) for _ in range(100)]
    for call in calls:
        call.start()
    for call in calls:
        call.join(10.0)
    scene.files.gate.set()
    scene.wait_for("a", Residency.RESIDENT)

    assert scene.models.acquire("a") == "a"
    assert scene.files.loads == {"a": 1}
    assert scene.value("tailrace_model_loads_total", name="a") == 1


def test_a_name_in_use_is_unloaded_only_after_its_last_request(scene: Scene) -> None:
    """A third name waits until a request gives one of two names in use back."""
    scene.files.gate.set()
    for name in "ab":
        scene.models.acquire(name)
        scene.wait_for(name, Residency.RESIDENT)
        scene.now_s += 1.0
        assert scene.models.acquire(name) == name
    scene.models.acquire("c")
    scene.wait_for("a", Residency.DRAINING)
    assert scene.files.in_memory == {"a", "b"}

    scene.models.release("a")
    scene.wait_for("c", Residency.RESIDENT)

    assert scene.files.in_memory == {"b", "c"}
    assert scene.value("tailrace_model_evictions_total", name="a", reason="room") == 1
    assert [scene.value("tailrace_model_resident_bytes", name=name) for name in "abc"] == [0, 4, 4]


def test_a_failed_name_is_retried_after_a_pause_that_doubles(scene: Scene) -> None:
    """A name that cannot be fetched is reported, harms no other name, and loads once its cause is gone."""
    scene.files.gate.set()
    scene.files.broken = {"a"}
    retries = []
    for _ in range(3):
        scene.models.acquire("a")
        wait_for(lambda: (failure := scene.models.failure("a")) is not None and failure.retry_at_s > scene.now_s)
        failure = scene.models.failure("a")
        assert failure is not None
        retries.append(failure.pause_s)
        scene.now_s = failure.retry_at_s
    assert retries == [1.0, 2.0, 4.0]
    assert scene.value("tailrace_model_load_failed", name="a") == 1
    scene.models.acquire("b")
    scene.wait_for("b", Residency.RESIDENT)

    scene.files.broken = set()
    scene.models.acquire("a")
    scene.wait_for("a", Residency.RESIDENT)
    assert scene.value("tailrace_model_load_failed", name="a") == 0


@pytest.mark.parametrize("size", [4, 9])
def test_a_name_that_was_never_in_memory_is_listed_as_failed(scene: Scene, size: int) -> None:
    """Whether its files cannot be fetched or it exceeds the memory, the operator's list has it."""
    scene.files.sizes["a"] = size
    scene.files.broken = {"a"} if size == 4 else set()
    scene.models.acquire("a")
    wait_for(lambda: scene.models.failure("a"))

    assert [(model.name, model.has_failed) for model in resident_models(scene.registry.collect())] == [("a", True)]


def test_pinned_names_are_loaded_before_the_start_returns() -> None:
    """After `start`, pinned names are resident or known to have failed."""
    scene = Scene(pinned=["a", "b"])
    scene.files.gate.set()
    scene.files.broken = {"b"}
    scene.models.start()

    assert scene.models.acquire("a") == "a"
    assert scene.models.failure("b") is not None
    scene.models.stop()


def test_the_start_returns_if_not_all_pinned_names_fit() -> None:
    """A pinned name that waits while others load is refused as soon as it fits no longer next to them."""
    scene = Scene(pinned=["a", "b", "c"], max_loading=1)
    scene.files.gate.set()
    starting = threading.Thread(target=scene.models.start, daemon=True)
    starting.start()
    starting.join(10.0)

    assert not starting.is_alive()
    failures = [failure for name in "abc" if (failure := scene.models.failure(name)) is not None]
    assert [failure.reason[1:] for failure in failures] == [
        ": needs 4 bytes more; of 8 bytes for models pinned names take 8"
    ]
    scene.models.stop()


def test_a_stop_ends_a_start_that_waits_for_a_load() -> None:
    """A process that is stopped while it loads its pinned names does not wait for the names that are next."""
    scene = Scene(pinned=["a", "b"], max_loading=1)
    starting = threading.Thread(target=scene.models.start, daemon=True)
    starting.start()
    wait_for(lambda: Residency.WAITING in map(scene.models.state, "ab"))  # which is fetched first is not defined
    scene.models.stop()
    starting.join(10.0)

    assert not starting.is_alive()
    scene.files.gate.set()


def test_an_idle_name_is_unloaded() -> None:
    """A name without requests for the idle time gives its memory back; polls of its record are not uses."""
    scene = Scene(idle_s=5.0)
    scene.files.gate.set()
    scene.models.start()
    scene.models.acquire("a")
    scene.wait_for("a", Residency.RESIDENT)
    scene.now_s = 6.0

    scene.wait_for("a", Residency.ABSENT)
    assert scene.value("tailrace_model_evictions_total", name="a", reason="idle") == 1
    scene.models.stop()


def test_an_idle_name_is_not_kept_by_a_slow_read_of_its_record() -> None:
    """A name that became idle while the records were looked at is unloaded, not followed, though it has changed."""
    scene = Scene(poll_s=0.5, idle_s=5.0)
    scene.files.gate.set()
    scene.models.start()
    scene.models.acquire("a")
    scene.wait_for("a", Residency.RESIDENT)
    wait_for(lambda: scene.files.looks[frozenset("a")])
    scene.files.look_gate.clear()
    wait_for(lambda: scene.files.num_looks_held)
    scene.now_s, scene.files.changed = 6.0, {"a"}
    scene.files.look_gate.set()

    scene.wait_for("a", Residency.ABSENT)
    assert not scene.files.refreshed
    scene.models.stop()


def test_an_idle_name_is_unloaded_while_the_records_cannot_be_looked_at() -> None:
    """A look that takes long keeps no name, and no second look begins meanwhile."""
    scene = Scene(idle_s=5.0)
    scene.files.gate.set()
    scene.models.start()
    scene.models.acquire("a")
    scene.wait_for("a", Residency.RESIDENT)
    scene.files.look_gate.clear()
    wait_for(lambda: scene.files.num_looks_held)
    scene.now_s = 6.0

    scene.wait_for("a", Residency.ABSENT)
    scene.models.acquire("b")
    scene.wait_for("b", Residency.RESIDENT)
    assert scene.files.num_looks_held == 1
    scene.files.look_gate.set()
    scene.models.stop()


def test_only_names_with_changed_records_are_followed(scene: Scene) -> None:
    """The resident names are looked at together in each poll; a name that is being followed is not followed again."""
    scene.files.gate.set()
    for name in "ab":
        scene.models.acquire(name)
        scene.wait_for(name, Residency.RESIDENT)
    scene.files.changed = {"a", "c"}
    wait_for(lambda: scene.files.refreshed)
    num_looks = scene.files.looks[frozenset("ab")]
    wait_for(lambda: scene.files.looks[frozenset("ab")] > num_looks + 2)
    assert scene.files.refreshed == ["a"]

    scene.files.refresh_gate.set()
    wait_for(lambda: len(scene.files.refreshed) > 1)
    assert set(scene.files.refreshed) == {"a"}


def test_the_files_of_tenants_are_fetched_in_turn(scene: Scene) -> None:
    """A tenant that asks for many names at once does not delay another, and names asked for long ago are skipped."""
    names = [f"acme.{number}" for number in range(50)]
    scene.files.sizes |= dict.fromkeys((*names, "bolt.one"), 1)
    scene.files.fetch_gate = threading.Semaphore(0)
    for name in (*names, "bolt.one"):
        scene.models.acquire(name)
    scene.files.fetch_gate.release(6)
    wait_for(lambda: len(scene.files.fetched) == 6)
    early = list(scene.files.fetched)
    scene.now_s = 60.0
    scene.files.fetch_gate.release(45)
    wait_for(lambda: all(scene.models.state(name) is not Residency.LOADING for name in names[-40:]))

    assert "bolt.one" in early
    assert len(scene.files.fetched) <= 6 + 4


def test_few_names_are_fetched_before_memory_is_free_for_them() -> None:
    """While no model may be unloaded, further names wait without a fetch, unless they are wanted more than those."""
    scene = Scene(min_stay_s=5.0)
    names = [f"cold-{number}" for number in range(30)]
    scene.files.sizes |= dict.fromkeys(names, 4)
    scene.files.gate.set()
    scene.models.start()
    for name in "ab":
        scene.models.acquire(name)
        scene.wait_for(name, Residency.RESIDENT)
    for name in names:
        scene.models.acquire(name)
    wait_for(lambda: sum(scene.models.state(name) is Residency.WAITING for name in names) >= 8)
    assert len(scene.files.fetched) == 2 + 8

    scene.models.acquire(names[-1])
    wait_for(lambda: names[-1] in scene.files.fetched)
    assert len(scene.files.fetched) == 2 + 8 + 1
    scene.models.stop()


def test_a_request_for_a_waiting_name_has_it_loaded_once_a_model_may_be_unloaded() -> None:
    """The least stay of a model ends between two polls: the next request does not leave the load to the later poll."""
    scene = Scene(poll_s=60.0, min_stay_s=5.0)
    scene.files.gate.set()
    scene.models.start()
    for name in "ab":
        scene.models.acquire(name)
        scene.wait_for(name, Residency.RESIDENT)
    scene.models.acquire("c")
    scene.wait_for("c", Residency.WAITING)
    scene.now_s = 6.0

    scene.models.acquire("c")
    scene.wait_for("c", Residency.RESIDENT)
    scene.models.stop()
