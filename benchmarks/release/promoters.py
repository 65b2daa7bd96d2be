"""Twenty promoters of a name at once, each a process with a version of its own: one wins, and each of the others learns what is live now."""

import tempfile
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from models.errors import BundleMoved
from models.registry import BundleStore

NUM = 20


def race(num: int = NUM) -> Mapping[str, Any]:
    """Return how many of the promoters won, and how many were told of the winner."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "bundles"
        store = BundleStore(root)
        for version in ("first", *map(_version, range(num))):
            source = Path(scratch) / version
            source.mkdir()
            (source / "student.onnx").write_text(version)
            store.publish(source, version, {})
        store.promote("first")
        start, told = context.Barrier(num), context.SimpleQueue()
        racers = [context.Process(target=_promote, args=(root, number, start, told)) for number in range(num)]
        for racer in racers:
            racer.start()
        outcomes = [told.get() for _ in racers]
        for racer in racers:
            racer.join()
        live = store.live_version()
    return {
        "num": num,
        "num_won": sum(one == "won" for one in outcomes),
        "num_told": sum(f"the live version is {live} " in one for one in outcomes),
    }


def _version(number: int) -> str:
    return f"v{number:02}"


def _promote(root: Path, number: int, start: Barrier, told: Any) -> None:
    store = BundleStore(root)
    start.wait()
    try:
        store.promote(_version(number), "first", by=f"racer {number}")
    except BundleMoved as error:
        told.put(str(error))
    else:
        told.put("won")
