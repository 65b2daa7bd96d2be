"""Erasure through a real broker, a real Valkey and a real worker: what goes, what comes back, and what a crash leaves."""

import asyncio
from pathlib import Path

from redis import Redis

from services.contracts.erasure import ErasureReceipt
from services.features.erasing import RedisReceipts
from tests.support.servers import HOST
from tests.support.stream.stream_rig import Rig, click, erasure
from tests.support.wait import wait_for

SECRET = "user-müller/7"
OTHER = "other"


def receipt_of(rig: Rig, erasure_id: str) -> ErasureReceipt | None:
    """Read a receipt as a gateway does."""

    async def read() -> ErasureReceipt | None:
        """Read it on a loop of its own."""
        receipts = RedisReceipts(rig.settings.redis_address)
        try:
            return await receipts.get(erasure_id, 5.0)
        finally:
            await receipts.close()

    return asyncio.run(read())


def is_done(rig: Rig, erasure_id: str) -> bool:
    """Whether an erasure is done everywhere."""
    found = receipt_of(rig, erasure_id)
    return found is not None and found.is_done


def until_done(rig: Rig, *erasure_ids: str) -> None:
    """Wait until erasures are done everywhere."""
    for erasure_id in erasure_ids:
        wait_for(lambda one=erasure_id: is_done(rig, one), 90.0, f"the receipt: {receipt_of(rig, erasure_id)}")


def traces_of(rig: Rig, user_id: str) -> list[str]:
    """Return where a user's id still is: keys and values of Redis, and files of the state folder, raw and in the usual encodings."""
    import base64
    import json
    from urllib.parse import quote

    import pyarrow.parquet as pq

    raw = user_id.encode()
    forms = {raw, quote(user_id, safe="").encode(), json.dumps(user_id)[1:-1].encode(), raw.hex().encode()}
    forms.add(base64.b64encode(raw).rstrip(b"="))
    found = []
    with Redis(host=HOST, port=rig.features.redis.port) as client:
        for key in client.scan_iter():
            if any(form in key + (client.dump(key) or b"") for form in forms):
                found.append(repr(key))
            kind = client.type(key)
            values = client.hgetall(key) if kind == b"hash" else {}
            if any(form in name + value for name, value in values.items() for form in forms):
                found.append(f"a field of {key!r}")
    for path in Path(rig.settings.state_dir).rglob("*"):
        if not path.is_file() or "broker" in path.parts or "valkey" in path.parts:
            continue
        content = path.read_bytes()
        if path.suffix == ".parquet":  # compressed
            content += "\n".join(map(str, pq.ParquetFile(path).read().to_pylist())).encode()
        found += [str(path) for form in forms if form in content]
    return found


def test_what_came_before_leaves_and_what_comes_after_begins_a_new_history(rig: Rig) -> None:
    """A user's past leaves row and log, others' stay; an event behind the erasure is a new history, and the log holds it."""
    rig.start_worker()
    rig.send(*(click(number, SECRET) for number in range(1, 6)), click(6, OTHER))
    wait_for(lambda: len(rig.logged()) == 6, what="the log")
    rig.send(click(7, SECRET), erasure(SECRET), click(8, SECRET), click(9, OTHER))

    wait_for(lambda: rig.rows(SECRET) and rig.rows(SECRET)[SECRET].item_ids == ("i8",), what="the new history")
    until_done(rig, "x")
    rig.stop_worker()

    assert rig.rows(OTHER)[OTHER].item_ids == ("i6", "i9")
    assert sorted(event_id for event_id, _, _ in rig.logged()) == ["e6", "e8", "e9"]


def test_an_erased_user_is_in_no_file_and_no_key(rig: Rig) -> None:
    """After the receipt is done, a scan of Redis and of every file finds no form of the id."""
    rig.start_worker()
    rig.send(*(click(number, SECRET) for number in range(1, 30)), click(30, OTHER))
    wait_for(lambda: len(rig.logged()) == 30, what="the log")
    assert traces_of(rig, SECRET)

    rig.send(erasure(SECRET))
    until_done(rig, "x")
    rig.stop_worker()

    assert traces_of(rig, SECRET) == []
    assert traces_of(rig, OTHER)
