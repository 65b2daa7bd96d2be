"""Versions with a known fault: copies of the live version with another student, like bad data or training."""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from models.registry.bundle import Bundle
from models.registry.store import BundleStore

_SLOW_SIZE = 900
"""Size of the matrices that the slow student multiplies for nothing: about 5 ms on one core."""
_STUDENT = "student.onnx"
Change = Callable[[onnx.ModelProto], None]


def make_candidates(store: BundleStore) -> dict[str, str]:
    """Publish a version for each of `CHANGES`; return them by change. Runs make new versions, as some are withdrawn."""
    live, made = store.live(), f"{datetime.now(UTC):%H%M%S}"
    versions = {name: f"{name}-{made}" for name in CHANGES}
    for name, version in versions.items():
        publish_changed(store, live, version, CHANGES[name])
    return versions


def publish_changed(store: BundleStore, live: Bundle, version: str, change: Change) -> None:
    """Publish a copy of the live bundle with another student as this version.

    A changed student serves without the mixer's sources, which may outvote it.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / version
        shutil.copytree(live.path, source)
        (source / "manifest.json").unlink()
        model = onnx.load(source / _STUDENT)
        model.doc_string = version  # else two versions have equal content, and withdrawing one withdraws both
        change(model)
        onnx.save(model, source / _STUDENT)
        left_out = {"version", "files", "lists"} | (set() if change is _as_it_is else {"mixer"})
        about = {key: value for key, value in live.manifest.items() if key not in left_out}
        store.publish(source, version, json.loads(json.dumps(about)))


def _as_it_is(_model: onnx.ModelProto) -> None:
    """Change nothing."""


def _slow(model: onnx.ModelProto) -> None:
    """Make the student multiply large matrices, which add 0 to the scores."""
    weight = np.random.default_rng(0).normal(0, 1 / _SLOW_SIZE, (_SLOW_SIZE, _SLOW_SIZE)).astype(np.float32)
    _weights(model, slow_weight=weight, slow_zero=np.zeros(1, np.float32))
    _add(model, "Cast", ["rows"], "slow_rows", to=onnx.TensorProto.FLOAT)
    _add(model, "ReduceMax", ["slow_rows"], "slow_max", keepdims=0)
    _add(model, "Mul", ["slow_max", "slow_zero"], "slow_nothing")
    _add(model, "Add", ["slow_weight", "slow_nothing"], "slow_matrix")
    _add(model, "MatMul", ["slow_matrix", "slow_weight"], "slow_product")
    _add(model, "ReduceMax", ["slow_product"], "slow_most", keepdims=0)
    _add(model, "Mul", ["slow_most", "slow_zero"], "slow_added")
    _to_scores(model, "slow_added")


def failing(model: onnx.ModelProto, one_of: int = 100) -> None:
    """Make the student read beyond a table for this fraction of newest items."""
    table = np.zeros(1, np.float32)
    _weights(model, table=table, last=np.array([-1]), divisor=np.array([one_of]), half=np.array([one_of // 2]))
    _add(model, "Gather", ["rows", "last"], "newest", axis=0)
    _add(model, "Mod", ["newest", "divisor"], "remainder")
    _add(model, "Equal", ["remainder", "half"], "is_bad")
    _add(model, "Cast", ["is_bad"], "bad_place", to=onnx.TensorProto.INT64)
    _add(model, "Gather", ["table", "bad_place"], "nothing", axis=0)
    _to_scores(model, "nothing")


def _weights(model: onnx.ModelProto, **arrays: np.ndarray) -> None:
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())


def _add(model: onnx.ModelProto, operator: str, inputs: list[str], output: str, **attributes: Any) -> None:
    model.graph.node.append(helper.make_node(operator, inputs, [output], **attributes))


def _to_scores(model: onnx.ModelProto, added: str) -> None:
    """Add a value to the scores, the output of the student's last node."""
    (own,) = [node for node in model.graph.node if list(node.output) == ["scores"]]
    own.output[0] = "own_scores"
    _add(model, "Add", ["own_scores", added], "scores")


CHANGES: Mapping[str, Change] = {
    "slow": _slow,
    "failing": failing,
    "fewer-clicks": _as_it_is,
    "equal": _as_it_is,
    "equal-2": _as_it_is,
}
"""Changes by name; simulated users click fewer of the lists of `fewer-clicks`."""
