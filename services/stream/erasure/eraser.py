"""Removes erased users from every store except their rows, which the worker has already removed; updates receipts.

    ledger ─▶ lists, shown, explanations ─▶ Redis' file
           └▶ offline logs ─▶ base histories, point-in-time table ─▶ stage outputs ─▶ the ledger forgets the id

Every step is idempotent: after a crash or a failure it is repeated. Erasures are processed in batches, one batch at a
time, in a separate thread, so that the worker's events do not wait.

A store is done only after it was searched. An absent folder may be a volume that this process does not mount: its store
stays open in the receipt, and the ledger keeps the user's id.
"""

import errno
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from services.contracts.erasure import ONLINE_STORES, ErasureStore, precedes
from services.contracts.tenant import local
from services.errors import DependencyUnavailable
from services.features.erasing import ErasingWriter, FileRewrite
from services.features.schema import LogPosition
from services.stream.erasure.tables import remove_outputs, replacing_tables, write_without
from services.stream.log.ledger import ErasureLedger, Tombstone
from services.stream.log.offline_log import OfflineLog

_log = structlog.get_logger()
_RECEIPTS_KEEP_MS = 90 * 86_400_000
_SCRUB_EVERY_S = 3_600.0
_EVERY_S = 1.0
"""Minimum time between two rounds."""
_LOOK_AGAIN_S = 30.0
"""How often an absent folder is reported."""
_S = ErasureStore


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasingFiles:
    """The files with users' rows: the logs by store, two tables that the pipeline writes, and its stages' folder."""

    logs: Mapping[ErasureStore, OfflineLog[Any]]
    offline_log_dir: Path
    base_histories: Path
    offline_features: Path
    stages_dir: Path


@dataclass(slots=True)
class _Progress:
    """The finished stores of erasures that are not finished everywhere."""

    done: dict[str, set[ErasureStore]] = field(default_factory=dict)

    def lack(self, tombstones: Iterable[Tombstone], *stores: ErasureStore) -> list[Tombstone]:
        return [
            tombstone
            for tombstone in tombstones
            if not self.done.setdefault(tombstone.erasure_id, set()).issuperset(stores)
        ]


class Eraser:
    """Processes the ledger. `begin` is called from the worker's thread; all other work runs in this object's thread.

    Args:
        ledger: The erasures.
        store: Redis, used only from this object's thread.
        files: The files.
        versions: Returns the bundles that may have stored lists.
        settle_s: As `Pace.erasure_settle_s`.
        rewrite_every_s: As `Pace.erasure_rewrite_every_s`.
    """

    def __init__(
        self,
        ledger: ErasureLedger,
        store: ErasingWriter,
        files: ErasingFiles,
        versions: Callable[[], Collection[str]],
        settle_s: float,
        rewrite_every_s: float,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._files = files
        self._versions = versions
        self._settle_s = settle_s
        self._rewrite_every_s = rewrite_every_s
        self._wall_clock = wall_clock
        self._thread = ThreadPoolExecutor(1, "erasure")
        self._round: Future[None] | None = None
        self._next_s = 0.0
        self._progress = _Progress()
        self._restored: set[int] = set()
        self._gone: dict[str, tuple[int, float]] = {}
        """By erasure, when the user's row and lists had left Redis (Unix ms, and monotonic s).

        Answers that began earlier may have read them.
        """
        self._absent_s: dict[Path, float] = {}
        self._rewrite: list[Tombstone] | None = None
        self._rewritten_s = 0.0
        self._scrubbed: tuple[float, float] | None = None
        """When the logs were last scrubbed (monotonic and Unix s)."""

    def begin(self, partitions: Collection[int]) -> BaseException | None:
        """Start a round for these owned partitions, unless a round runs or just ran.

        Return why the last round failed, if it did.
        """
        if (self._round is not None and not self._round.done()) or time.monotonic() < self._next_s:
            return None
        failure = self._round.exception() if self._round is not None else None
        self._next_s = time.monotonic() + _EVERY_S
        self._round = self._thread.submit(self.work, tuple(partitions))
        return failure

    def own(self, partitions: Collection[int]) -> None:
        """Check all of these partitions again: the store may have lost writes."""
        if self._round is not None:
            self._round.exception()  # wait for the running round
        self._progress = _Progress()
        self._restored -= set(partitions)
        self._rewrite = None

    def remove_restored(self, partition: int, position: LogPosition | None) -> None:
        """Remove rows of erased users from a store restored to this position, before it is replayed.

        Raises DependencyUnavailable.
        """
        erased = self._ledger.erased(partition)
        if any(
            position is None or not position.covers(tombstone.position)
            for tombstone in self._ledger.tombstones(partition)
        ):
            self._store.remove_restored(erased.covers_row)

    def close(self) -> None:
        """Wait for the running round, and close the connections."""
        self._thread.shutdown()
        self._store.close()

    def work(self, partitions: Collection[int]) -> None:
        """Advance the erasures of these partitions.

        Raises DependencyUnavailable or OSError after partial work.
        """
        for partition in partitions:
            self._restore_receipts(partition)
        opened = {
            number: [tombstone for tombstone in self._ledger.tombstones(number) if tombstone.user_id]
            for number in partitions
        }
        failures: list[Exception] = []
        for step in (self._erase_online, self._erase_logs, self._erase_tables, self._erase_outputs, self._rewrite_file):
            try:
                step(opened)
            except (DependencyUnavailable, OSError) as error:  # continue with the other stores
                failures.append(error)
        for number, tombstones in opened.items():
            if done := [
                tombstone.erasure_id
                for tombstone in tombstones
                if self._progress.done.get(tombstone.erasure_id, set()) >= set(_S)
            ]:
                self._ledger.close(number, done, self._now_ms())
                self._gone = {erasure_id: at for erasure_id, at in self._gone.items() if erasure_id not in done}
                _log.info("erasure.done", partition=number, num_erasures=len(done))
        self._scrub(partitions)
        for failure in failures:
            raise failure

    def _scrub(self, partitions: Collection[int]) -> None:
        """Rewrite hourly the files of the last two hours: a paused process may have merged erased events into them."""
        now_s = self._wall_clock()
        before_s, before_unix_s = self._scrubbed or (None, now_s - _SCRUB_EVERY_S)
        if before_s is not None and time.monotonic() < before_s + _SCRUB_EVERY_S:
            return
        since_s = min(before_unix_s, now_s) - _SCRUB_EVERY_S
        for log in self._files.logs.values():
            for number in partitions:
                if self._ledger.tombstones(number):
                    log.erase(number, changed_since_s=since_s)
        self._scrubbed = time.monotonic(), now_s

    def _erase_online(self, opened: dict[int, list[Tombstone]]) -> None:
        every = [tombstone for tombstones in opened.values() for tombstone in tombstones]
        if new := self._progress.lack(every, _S.FEATURES):
            users = [str(tombstone.user_id) for tombstone in new]
            self._store.remove_base_rows(users)
            self._store.remove_lists(users, self._versions())
            self._gone |= dict.fromkeys((tombstone.erasure_id for tombstone in new), (self._now_ms(), time.monotonic()))
            self._done(new, _S.FEATURES)
        settled_ids = {name for name, (_, at_s) in self._gone.items() if time.monotonic() >= at_s + self._settle_s}
        settled = [tombstone for tombstone in every if tombstone.erasure_id in settled_ids]
        if new := self._progress.lack(settled, _S.LISTS, _S.SHOWN, _S.EXPLANATIONS):
            until_ms = {str(tombstone.user_id): tombstone.accepted_time_ms for tombstone in new}
            now_ms = self._now_ms()
            answered_ms = {str(tombstone.user_id): self._answered_ms(tombstone) for tombstone in new}
            self._store.remove_leftover_lists(until_ms)
            self._store.remove_shown(until_ms, now_ms)
            self._store.remove_explanations(
                lambda user_id, at_ms: user_id in answered_ms and precedes(at_ms, answered_ms[user_id], now_ms)
            )
            self._done(new, _S.LISTS, _S.SHOWN, _S.EXPLANATIONS)

    def _answered_ms(self, erasure: Tombstone) -> int:
        """Return when the last answer to the erased user ended, by the clock then or now (the later time counts)."""
        gone_ms, gone_s = self._gone[erasure.erasure_id]
        since_ms = int((time.monotonic() - gone_s - self._settle_s) * 1_000)
        return max(gone_ms + int(self._settle_s * 1_000), self._now_ms() - since_ms)

    def _erase_logs(self, opened: dict[int, list[Tombstone]]) -> None:
        for store, log in self._files.logs.items():
            for number, tombstones in opened.items():
                if (new := self._progress.lack(tombstones, store)) and log.erase(number).is_clean:
                    self._done(new, store)

    def _erase_tables(self, opened: dict[int, list[Tombstone]]) -> None:
        every, files = [tombstone for tombstones in opened.values() for tombstone in tombstones], self._files
        if new := self._progress.lack(every, _S.BASE_HISTORIES):
            with replacing_tables(files.offline_log_dir):  # next to the ledger, whose folder was readable
                erased, base = self._ledger.everybody(), files.base_histories
                write_without(base, base, erased, self._now_ms(), keeps_id=True)
            self._done(new, _S.BASE_HISTORIES)
        if (new := self._progress.lack(every, _S.OFFLINE_FEATURES)) and self._is_there(files.offline_features.parent):
            with replacing_tables(files.offline_log_dir):
                # The pipeline writes both tables under this lock. If only the second table is absent,
                # this folder is not the pipeline's.
                if not files.base_histories.exists() or self._is_there(files.offline_features):
                    erased, table = self._ledger.everybody(), files.offline_features
                    write_without(table, table, erased, self._now_ms())
                    self._done(new, _S.OFFLINE_FEATURES)

    def _erase_outputs(self, opened: dict[int, list[Tombstone]]) -> None:
        new = self._progress.lack(
            [tombstone for tombstones in opened.values() for tombstone in tombstones], _S.STAGE_CACHE
        )
        if new and self._is_there(self._files.stages_dir):
            ids = [tombstone.user_id for tombstone in new if tombstone.user_id]
            users = {*ids, *map(local, ids)}  # a tenant's training has the ids of its callers
            if remove_outputs(self._files.stages_dir, users.__contains__):
                self._done(new, _S.STAGE_CACHE)

    def _is_there(self, path: Path) -> bool:
        """Return whether a path exists in this process. Raises OSError for an absent path, twice a minute."""
        if path.exists():
            return True
        now_s = time.monotonic()
        if now_s < self._absent_s.get(path, 0.0):
            return False
        self._absent_s[path] = now_s + _LOOK_AGAIN_S
        problem = "missing, so erasures stay open; mount it, or create the folder if no pipeline ever runs"
        raise FileNotFoundError(errno.ENOENT, problem, str(path))

    def _rewrite_file(self, opened: dict[int, list[Tombstone]]) -> None:
        """Have Redis rewrite its file without the removed data, within the rate limit; then wait for its end."""
        if self._rewrite is not None:
            if (state := self._store.rewrite_state()) is FileRewrite.DONE:
                self._done(self._rewrite, _S.STORE_FILES)
            elif state is FileRewrite.FAILED:
                _log.warning("erasure.file_not_rewritten", reason="the rewrite failed", fix="see the log of Redis")
            self._rewrite = self._rewrite if state is FileRewrite.RUNNING else None
            return
        pending = self._progress.lack(
            [tombstone for tombstones in opened.values() for tombstone in tombstones], _S.STORE_FILES
        )
        lacking = {tombstone.erasure_id for tombstone in self._progress.lack(pending, *ONLINE_STORES)}
        ready = [tombstone for tombstone in pending if tombstone.erasure_id not in lacking]
        if ready and time.monotonic() >= self._rewritten_s + self._rewrite_every_s * bool(self._rewritten_s):
            begun = self._store.begin_rewrite()
            if begun is FileRewrite.NO_FILE:
                self._done(ready, _S.STORE_FILES)
                return
            if begun is FileRewrite.BUSY:  # of another worker or of a deletion: asked again in the next round
                return
            self._rewritten_s = time.monotonic()
            self._rewrite = ready if begun is FileRewrite.RUNNING else None
            if begun is FileRewrite.REFUSED:
                fix = "allow the user TAILRACE_REDIS_USERNAME the commands +info +bgrewriteaof"
                _log.warning("erasure.file_not_rewritten", reason="Redis refuses the rewrite", fix=fix)

    def _restore_receipts(self, partition: int) -> None:
        """Rewrite receipts that the store has lost, once each time that the partition is claimed."""
        if partition in self._restored:
            return
        since_ms = self._now_ms() - _RECEIPTS_KEEP_MS
        done = {
            tombstone.erasure_id: tombstone
            for tombstone in self._ledger.tombstones(partition)
            if (tombstone.done_time_ms or 0) > since_ms
        }
        for erasure_id in self._store.lacking(list(done)):
            tombstone = done[erasure_id]
            self._store.mark([(erasure_id, tombstone.accepted_time_ms)], _S, tombstone.done_time_ms or 0)
        self._restored.add(partition)

    def _done(self, tombstones: Sequence[Tombstone], *stores: ErasureStore) -> None:
        self._store.mark(
            [(tombstone.erasure_id, tombstone.accepted_time_ms) for tombstone in tombstones], stores, self._now_ms()
        )
        for tombstone in tombstones:
            self._progress.done.setdefault(tombstone.erasure_id, set()).update(stores)

    def _now_ms(self) -> int:
        return int(self._wall_clock() * 1_000)
