"""Tables of users' rows outside the log: base histories, point-in-time table, and the outputs of the pipeline's stages.

The pipeline replaces the first two as a whole, from tables that may still hold an erased user, and the worker erases
users from them: both under one lock, so that the later writer has read the ledger. Outputs of stages are a cache, and
are removed together with the user's rows. Imports and recipe searches hold locks of their own: what killed runs of them
left is removed, whoever is in it.
"""

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import structlog
from filelock import FileLock, Timeout

from models.files import each_file, file_sha256, rename_durably
from services.contracts.erasure import precedes
from services.stream.log.ledger import Erased

STAGES_LOCK = "LOCK"
"""A file in the folder of stage outputs; a run of the pipeline holds it."""
SCRATCH = "scratch"
"""A folder of users' rows in the folder of imports or searches, whose lock a run of them holds."""
_BASE_ID = b"tailrace.base_id"
_LOCK_TIMEOUT_S = 600.0
_log = structlog.get_logger()


@contextmanager
def replacing_tables(offline_log_dir: Path) -> Iterator[None]:
    """Hold the lock under which the base histories and the point-in-time table are replaced.

    Raises OSError after ten minutes of waiting.
    """
    offline_log_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(offline_log_dir / "TABLES.lock", timeout=_LOCK_TIMEOUT_S):
        yield


def base_id(table: Path) -> str:
    """Return the id of these base tables, which survives erasures; empty if there are none."""
    if not table.exists():
        return ""
    try:
        kept = (pq.read_schema(table).metadata or {}).get(_BASE_ID, b"")
    except pa.ArrowException:
        kept = b""
    return kept.decode() or file_sha256(table)


def write_without(source: Path, target: Path, erased: Erased, now_ms: int, *, keeps_id: bool = False) -> bool:
    """Copy a table without rows that precede their user's erasure by `row_time_us`; return whether there were any.

    Without such rows, a target that is the source stays unchanged or absent. Holds one row group in memory. With
    `keeps_id` the source's base id is kept. Raises OSError, also if the source is not such a table.
    """
    scratch = target.with_suffix(".tmp")
    scratch.unlink(missing_ok=True)  # a killed writer's copy may hold erased users
    if source == target and not source.exists():
        return False
    try:
        has_gone = bool(erased) and any(
            _gone(batch, erased, now_ms) for batch in _columns(source, ["user_id", "row_time_us"])
        )
        if not has_gone and source == target:
            return False
        if has_gone:
            _write(source, scratch, erased, now_ms, {_BASE_ID: base_id(source).encode()} if keeps_id else {})
        else:
            shutil.copyfile(source, scratch)
        rename_durably(scratch, target)
    except pa.ArrowException as error:
        raise OSError(f"{source} cannot be read: {error}") from error
    return has_gone


def remove_outputs(stages_dir: Path, is_erased: Callable[[str], bool]) -> bool:
    """Remove the outputs of stages that hold rows of these users, and all scratch; False while a run uses its folder.

    Raises OSError.
    """
    has_no_scratch = remove_scratch(stages_dir)
    try:
        with FileLock(stages_dir / STAGES_LOCK, timeout=0):
            tables: dict[Path, list[Path]] = defaultdict(list)
            for path in each_file(stages_dir):
                stage, *inner = path.relative_to(stages_dir).parts
                if path.suffix == ".parquet" and len(inner) > 1 and inner[0] != SCRATCH:
                    tables[stages_dir / stage / inner[0]].append(path)
            for output, own in tables.items():
                if any(_holds(table, is_erased) for table in own):
                    _log.info("erasure.output_removed", path=str(output))
                    shutil.rmtree(output)
    except Timeout:
        return False
    return has_no_scratch


def remove_scratch(stages_dir: Path) -> bool:
    """Remove what killed imports and searches left; False while one of them runs. Raises OSError."""
    is_free = True
    for scratch in stages_dir.glob(f"*/{SCRATCH}"):
        try:
            with FileLock(scratch.with_name(STAGES_LOCK), timeout=0):
                if scratch.exists():  # the run may have ended meanwhile
                    shutil.rmtree(scratch)
        except Timeout:
            is_free = False
    return is_free


def _write(source: Path, scratch: Path, erased: Erased, now_ms: int, metadata: dict[bytes, bytes]) -> None:
    with pq.ParquetFile(source) as file:
        schema = file.schema_arrow.with_metadata({**(file.schema_arrow.metadata or {}), **metadata})
        with pq.ParquetWriter(scratch, schema, compression="zstd") as writer:
            for number in range(file.num_row_groups):
                table = file.read_row_group(number).cast(schema)
                kept = [not is_erased for is_erased in _gone_rows(table, erased, now_ms)]
                writer.write_table(table.filter(pa.array(kept, pa.bool_())))


def _gone(table: pa.Table, erased: Erased, now_ms: int) -> bool:
    return any(_gone_rows(table, erased, now_ms))


def _gone_rows(table: pa.Table, erased: Erased, now_ms: int) -> Iterator[bool]:
    """Yield for each row whether it precedes its user's erasure."""
    users = table["user_id"].to_pylist()
    until_ms = {user_id: tombstone.accepted_time_ms for user_id in set(users) if (tombstone := erased.of(user_id))}
    for user_id, time_us in zip(users, table["row_time_us"].to_pylist(), strict=True):
        yield user_id in until_ms and precedes(time_us // 1_000, until_ms[user_id], now_ms)


def _holds(path: Path, is_erased: Callable[[str], bool]) -> bool:
    """Return whether a table has a row of such a user. An unreadable file counts too: it is only a cache."""
    try:
        if "user_id" not in pq.read_schema(path).names:
            return False
        users = {
            user_id for batch in _columns(path, ["user_id"]) for user_id in pc.unique(batch["user_id"]).to_pylist()
        }
    except pa.ArrowException:
        return True
    return any(is_erased(str(user_id)) for user_id in users)


def _columns(path: Path, columns: list[str]) -> Iterator[pa.Table]:
    with pq.ParquetFile(path) as file:
        for number in range(file.num_row_groups):
            yield file.read_row_group(number, columns=columns)
