"""A simulated cluster: gateways with the product's `Placement`, replicas with the product's `ResidencyTable`.

    python -m benchmarks.many simulated --json OUT [--names 10000] [--replicas 100] [--seconds 120]

Simulated are time, requests (Poisson, names by Zipf), loads (one at a time on each replica) and answers. Nothing of the
network, the engine or the object store is: the figures show what the two state machines decide, not how fast they are.
"""

import heapq
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np

from benchmarks.load.command import ReportOptions, about_run, write_report
from pipelines.declaration import Option, parsed
from pipelines.planner.names import zipf_shares
from services.residency.state import Residency, ResidencyTable
from services.router.placement import Placement

_LOAD_PER_HOME = 4.0
_MIN_STAY_S = 10.0
_NOTICE_S = 1.0
"""Time after which gateways know that a replica has ended or started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Sizes of a simulated cluster. `room`: models that a replica has memory for; `rate`: requests per second."""

    num_names: int
    num_replicas: int
    room: int
    num_gateways: int = 4
    rate: float = 400.0
    answer_s: float = 0.02
    load_s: float = 1.5
    zipf: float = 1.0
    seed: int = 0


@dataclass(slots=True)
class _Replica:
    """A replica: its models, and the time when its loader is free."""

    table: ResidencyTable
    loader_free_s: float = 0.0
    num_loads: Counter[str] = field(default_factory=Counter)


class Simulation:
    """A run of a cluster.

    The name `hot` gets `hot_rate` further requests per second in a time span, and `calm_hot_rate` after it.
    """

    def __init__(
        self,
        cluster: Cluster,
        hot_rate: float = 0.0,
        hot_span_s: tuple[float, float] = (0.0, 0.0),
        calm_hot_rate: float = 0.0,
    ) -> None:
        self._calm_hot_rate = calm_hot_rate
        self._cluster = cluster
        self._random = np.random.default_rng(cluster.seed)
        self._cumulated = np.cumsum(zipf_shares(cluster.num_names, cluster.zipf))
        self._hot_rate, self._hot_span_s = hot_rate, hot_span_s
        self.replicas = {f"replica-{number}": self._new_replica() for number in range(cluster.num_replicas)}
        self.known = tuple(self.replicas)
        self._answering = frozenset(self.known)
        self.placements: list[dict[str, Placement]] = [{} for _ in range(cluster.num_gateways)]
        self._in_flight: list[Counter[str]] = [Counter() for _ in range(cluster.num_gateways)]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.now_s = 0.0
        self.outcomes: list[tuple[float, bool]] = []
        """Time of each request, and whether its model answered; otherwise the student did."""
        self.hot_homes: list[tuple[float, int]] = []
        """Time, and the number of replicas that hold the hot name."""

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        """Call a function at a time of the simulation."""
        heapq.heappush(self._events, (time_s, next(self._numbers), act))

    def run(self, until_s: float) -> None:
        """Send requests until this time."""
        for time_s, name in self._requests(until_s):
            while self._events and self._events[0][0] <= time_s:
                self.now_s, _, act = heapq.heappop(self._events)
                act()
            self.now_s = time_s
            self._request(name)

    def kill(self, replica: str) -> None:
        """End a replica now; gateways notice a second later."""
        del self.replicas[replica]
        self.at(self.now_s + _NOTICE_S, self._notice)

    def start(self, replica: str) -> None:
        """Start an empty replica now."""
        self.replicas[replica] = self._new_replica()
        self.at(self.now_s + _NOTICE_S, self._notice)

    def answered_share(self, from_s: float, to_s: float) -> float:
        """Return the fraction of the requests of a time span that their model answered."""
        answered = [is_answered for time_s, is_answered in self.outcomes if from_s <= time_s < to_s]
        return float(np.mean(answered)) if answered else 1.0

    def _notice(self) -> None:
        self.known = tuple(self.replicas)
        self._answering = frozenset(self.known)

    def _new_replica(self) -> _Replica:
        return _Replica(ResidencyTable(self._cluster.room, _MIN_STAY_S, max_loading=1))

    def _requests(self, until_s: float) -> Iterator[tuple[float, str]]:
        time_s = 0.0
        while True:
            begins_s, ends_s = self._hot_span_s
            hot_rate = 0.0 if time_s < begins_s else self._hot_rate if time_s < ends_s else self._calm_hot_rate
            rate = self._cluster.rate + hot_rate
            time_s += self._random.exponential(1.0 / rate)
            if time_s >= until_s:
                return
            is_hot = self._random.random() < hot_rate / rate
            yield time_s, "hot" if is_hot else self._name()

    def _name(self) -> str:
        return f"name-{np.searchsorted(self._cumulated, self._random.random())}"

    def _request(self, name: str) -> None:
        gateway = int(self._random.integers(self._cluster.num_gateways))
        placement = self.placements[gateway].setdefault(name, Placement(name, _LOAD_PER_HOME))
        in_flight, now_s = self._in_flight[gateway], self.now_s
        placement.observe(in_flight[name], len(self.known), now_s)
        chosen = placement.order(str(self._random.integers(10_000)), self.known, self._answering, now_s)[0]
        replica = self.replicas.get(chosen)
        is_answered = replica is not None and replica.table.acquire(name, now_s)
        self.outcomes.append((now_s, is_answered))
        if name == "hot":
            holders = sum(holder.table.state(name) is Residency.RESIDENT for holder in self.replicas.values())
            self.hot_homes.append((now_s, holders))
        if replica is None:
            return
        if not is_answered:
            placement.loading(chosen, now_s)
            self._want(replica, name)
            return
        placement.answered(chosen)
        in_flight[name] += 1
        self.at(now_s + self._random.exponential(self._cluster.answer_s), lambda: self._end(gateway, replica, name))

    def _end(self, gateway: int, replica: _Replica, name: str) -> None:
        self._in_flight[gateway][name] -= 1
        replica.table.release(name)
        self._act(replica)

    def _want(self, replica: _Replica, name: str) -> None:
        replica.table.want(name, 1, self.now_s)
        replica.table.still_wanted(name, self.now_s)
        self._act(replica)

    def _act(self, replica: _Replica) -> None:
        actions = replica.table.next_actions(self.now_s)
        for name in actions.unload:
            replica.table.unloaded(name)
        for name in actions.load:
            replica.num_loads[name] += 1
            replica.loader_free_s = max(replica.loader_free_s, self.now_s) + self._cluster.load_s
            self.at(replica.loader_free_s, lambda name=name: self._loaded(replica, name))  # type: ignore[misc]
        if actions.unload:
            self._act(replica)

    def _loaded(self, replica: _Replica, name: str) -> None:
        replica.table.loaded(name, self.now_s)
        self._act(replica)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationOptions(ReportOptions):
    """Options of the simulation."""

    names: Annotated[int, Option("Names.")] = 10_000
    replicas: Annotated[int, Option("Replicas, which together have room for half of the names.")] = 100
    seconds: Annotated[float, Option("Simulated seconds of each row.")] = 120.0


def main() -> None:
    """Simulate, print each row, write the JSON."""
    options = parsed(SimulationOptions, __doc__, sys.argv[1:])
    rows = simulate(options.names, options.replicas, options.seconds)
    for row in rows:
        sys.stdout.write(f"{row}\n")
    write_report(options.json, {**about_run("many simulated"), "rows": rows})


def simulate(num_names: int, num_replicas: int, seconds: float) -> list[dict[str, Any]]:
    """Return the rows: steady load, a hot name, killed replicas, a rolling restart."""
    cluster = Cluster(num_names=num_names, num_replicas=num_replicas, room=num_names // (2 * num_replicas))
    about = {"simulated": True, "names": num_names, "replicas": num_replicas, "room": cluster.room}
    return [{**about, **row(cluster, seconds)} for row in (_steady, _hot, _killed, _restarted)]


def _steady(cluster: Cluster, seconds: float) -> dict[str, Any]:
    run = Simulation(cluster)
    run.run(seconds)
    loads = [replica.num_loads.total() for replica in run.replicas.values()]
    return {
        "row": "steady",
        "answered_first_quarter": run.answered_share(0, seconds / 4),
        "answered_last_quarter": run.answered_share(3 * seconds / 4, seconds),
        "loads_per_s": sum(loads) / seconds,
        "most_loads_of_a_replica_per_s": max(loads) / seconds,
    }


def _hot(cluster: Cluster, seconds: float) -> dict[str, Any]:
    """A new name gets four times as many requests as all other names together, for an eighth of the time."""
    begins_s, ends_s = seconds / 2, 5 * seconds / 8
    run = Simulation(cluster, hot_rate=4 * cluster.rate, hot_span_s=(begins_s, ends_s), calm_hot_rate=5.0)
    run.run(seconds)
    two_s = next((time_s for time_s, holders in run.hot_homes if holders >= 2), None)
    return {
        "row": "hot name",
        "two_replicas_after_s": None if two_s is None else two_s - begins_s,
        "most_replicas": max(holders for _, holders in run.hot_homes),
        "homes_at_the_end": max(placements["hot"].num_homes for placements in run.placements),
        "others_answered": run.answered_share(begins_s, ends_s),
    }


def _killed(cluster: Cluster, seconds: float) -> dict[str, Any]:
    """A tenth of the replicas is killed at half of the time."""
    run, half_s = Simulation(cluster), seconds / 2
    killed = list(run.replicas)[: max(1, cluster.num_replicas // 10)]
    for replica in killed:
        run.at(half_s, lambda replica=replica: run.kill(replica))  # type: ignore[misc]
    run.run(seconds)
    return {"row": "killed", "replicas_killed": len(killed), **_around(run, half_s, half_s + 10, seconds)}


def _restarted(cluster: Cluster, seconds: float) -> dict[str, Any]:
    """All replicas are replaced one after another, in half of the time."""
    run, begins_s = Simulation(cluster), seconds / 4
    step_s = seconds / 2 / cluster.num_replicas
    for index, replica in enumerate(list(run.replicas)):
        run.at(begins_s + index * step_s, lambda replica=replica: run.kill(replica))  # type: ignore[misc]
        run.at(begins_s + index * step_s, lambda replica=replica: run.start(f"{replica} again"))  # type: ignore[misc]
    run.run(seconds)
    return {"row": "rolling restart", **_around(run, begins_s, 3 * seconds / 4, seconds)}


def _around(run: Simulation, begins_s: float, ends_s: float, seconds: float) -> dict[str, float]:
    return {
        "answered_before": run.answered_share(begins_s - 10, begins_s),
        "answered_during": run.answered_share(begins_s, ends_s),
        "answered_after": run.answered_share(max(ends_s, seconds - 10), seconds),
    }
