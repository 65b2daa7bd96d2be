"""`tailrace erase`: writes the erasures of a file of users directly to the interactions log."""

import csv
import io
import os
import time
import uuid
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infra.cli.session import audited, check_output, out, running_settings
from infra.kafka.sender import topic_sender
from services.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from services.contracts.erasure import ErasureStore
    from services.settings.settings import Settings

BATCH_USERS = 1_000
_HEADER = ("user_id", "erasure_id")
_READS_AT_ONCE, _READ_TIMEOUT_S = 64, 5.0


def erase(
    users: Annotated[Path, typer.Option(help="File with one user ID per line, or a table with a column user_id.")],
    out_file: Annotated[
        Path, typer.Option("--out", help="CSV of users and erasure IDs; its users are not erased again.")
    ],
) -> None:
    """Erase many users, and report the progress of the erasures. A killed run resumes; a later run reports again."""
    import asyncio

    from pipelines.publication.user_lists import read_user_ids

    check_output(users, out=out_file)
    settings = running_settings()
    user_ids = [*dict.fromkeys(read_user_ids(users))]
    _check(user_ids)
    accepted = read_accepted(out_file)
    left = [user_id for user_id in user_ids if user_id not in accepted]
    if left:
        with audited(settings.state_dir, "erase", users=str(len(left))):
            accepted |= erase_users(settings, left, out_file)
    before = f" ({len(user_ids) - len(left)} before this run)" if len(left) < len(user_ids) else ""
    out.print(f"erase: {len(user_ids)} users accepted{before}", markup=False)
    num_online, num_done = asyncio.run(count_done(settings, [accepted[user_id] for user_id in user_ids]))
    again = "" if num_done == len(user_ids) else "; run the command again to follow the progress"
    out.print(
        f"{num_online} are erased from the stores that requests read, {num_done} from all stores{again}", markup=False
    )


def _check(user_ids: Sequence[str]) -> None:
    """Validate the ids of a file before any user is erased. Raises ConfigError."""
    from services.contracts.message import check_id

    for user_id in user_ids:
        try:
            check_id("user_id", user_id)
        except InvalidRequest as error:
            raise ConfigError(f"--users: {user_id[:40]!r}: {error.problem}; {error.fix}; no user was erased") from error


def read_accepted(path: Path) -> dict[str, str]:
    """Return the recorded erasures by user; the unfinished line of a killed run is cut off. Raises ConfigError."""
    try:
        if path.exists() and not path.is_file():  # reading a device may never end
            raise ConfigError(f"--out: {path} is not a file; give a file")
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"--out: {path} cannot be read ({error}); give another file") from error
    whole = content[: content.rfind(b"\n") + 1]
    try:
        rows = list(csv.reader(io.StringIO(whole.decode(), newline="")))
    except (UnicodeDecodeError, csv.Error):
        rows = [[]]
    if content and (any(len(row) != len(_HEADER) for row in rows) or (rows and tuple(rows[0]) != _HEADER)):
        raise ConfigError(f"--out: {path} is not a file of erasures; give another or a new file")
    if whole != content:
        os.truncate(path, len(whole))
    return {row[0]: row[1] for row in rows[1:]}


def erase_users(
    settings: "Settings", user_ids: Sequence[str], path: Path, of_visitors: Collection[str] = ()
) -> dict[str, str]:
    """Erase users batch by batch; each is recorded once the broker has it. Of `of_visitors`, see `Erasure`.

    A user may be erased twice if the run is killed in between, which is harmless.
    """
    from pipelines.runner.bars import Bars
    from services.contracts.erasure import Erasure

    erased: dict[str, str] = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        topic_sender(settings, settings.interactions_topic) as send,
        path.open("a", newline="", encoding="utf-8") as file,
        Bars(out) as bars,
    ):
        rows, move = csv.writer(file, lineterminator="\n"), bars.begin("erase")
        if not file.tell():
            rows.writerow(_HEADER)
        for at in range(0, len(user_ids), BATCH_USERS):
            now_ms = time.time_ns() // 1_000_000
            batch = [
                Erasure(
                    erasure_id=uuid.uuid4().hex,
                    user_id=user_id,
                    accepted_time_ms=now_ms,
                    is_of_visitors=user_id in of_visitors,
                )
                for user_id in user_ids[at : at + BATCH_USERS]
            ]
            send([(erasure.key, erasure.encode()) for erasure in batch])
            erased |= {erasure.user_id: erasure.erasure_id for erasure in batch}
            rows.writerows((erasure.user_id, erasure.erasure_id) for erasure in batch)
            file.flush()
            os.fsync(file.fileno())
            move(at + len(batch), len(user_ids), f"{at + len(batch):,} of {len(user_ids):,} users")
    return erased


async def count_done(
    settings: "Settings", erasure_ids: Sequence[str], except_for: frozenset["ErasureStore"] = frozenset()
) -> tuple[int, int]:
    """Return the number of erasures done in the stores that requests read, and in all stores but these.

    Raises DependencyUnavailable.
    """
    import asyncio

    from services.features.erasing import RedisReceipts

    receipts, num_online, num_done = RedisReceipts(settings.redis_address), 0, 0
    try:
        for at in range(0, len(erasure_ids), _READS_AT_ONCE):
            reading = (
                receipts.get(erasure_id, _READ_TIMEOUT_S) for erasure_id in erasure_ids[at : at + _READS_AT_ONCE]
            )
            known = [erasure for erasure in await asyncio.gather(*reading) if erasure is not None]
            num_online += sum(erasure.is_done_online for erasure in known)
            num_done += sum(
                all(erasure.stores[store] for store in erasure.stores.keys() - except_for) for erasure in known
            )
    finally:
        await receipts.close()
    return num_online, num_done
