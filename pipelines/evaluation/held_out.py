"""Reads the test labels of a run, at most once a run, and appends a line to `test_set.jsonl` each time.

Choosing among many models by their test scores overfits the test set, so the file records how often each label was
opened, when and by which command. A label is a user and an item: `test_labels/` has the hashes of all labels of each
test set, named as in the lines, so a user's new event resets the count of only that user's label. A run whose models
were scored before, without a live bundle to compare with, does not open the labels. Above `MOST_USERS` users, a fixed,
evenly spaced sample is used: ranking 10^6 items for a user with every model takes 16 ms.
"""

import hashlib
import json
import os
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from models.catalogue import load_item_ids
from models.files import rename_durably, scratch_of
from pipelines.data.examples import Cases, Split, read_cases, sample_cases

LEDGER = "test_set.jsonl"
_LABELS = "test_labels"
MOST_USERS = 50_000
_NUM_LISTED = 20
_SHOWN = ("at", "command", "purpose")
"""One line of the record: an opening of the test set."""


class HeldOut:
    """The test labels of one run, and the record of all openings. `folder` holds the record, `command` is what runs."""

    def __init__(self, tokenized: Path, folder: Path, command: str, most_users: int = MOST_USERS) -> None:
        self._tokenized, self._folder, self._command = tokenized, folder, command
        self._most_users = most_users
        self._is_open = False

    def open(self, purpose: str) -> Cases:
        """Return the labels with their histories; the first call in a run is recorded with its purpose."""
        cases, _ = self._test_set
        if not self._is_open:
            name, labels = self._labels
            self._write_labels(name, labels)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self._append({"test_set": name, "at": now, "command": self._command, "purpose": purpose})
            self._is_open = True
        return cases

    def record(self) -> dict[str, Any]:
        """Return how often these labels were opened, also as part of other test sets.

        {sha256, num_users, num_labelled: users with a label, num_openings: of the label opened most often,
        mean_openings: of a label, openings: the newest ones that opened any, with at, command, purpose and num_labels}
        """
        cases, num_labelled = self._test_set
        name, labels = self._labels
        lines = read_ledger(self._folder / LEDGER)
        opened = {test_set: self._is_opened(test_set) for test_set in {line["test_set"] for line in lines}}
        counts, openings = np.zeros(len(labels), dtype=np.int64), []
        for line in lines:
            is_opened = opened[line["test_set"]]
            if num_labels := int(is_opened.sum()):
                counts += is_opened
                openings.append({**{key: line[key] for key in _SHOWN}, "num_labels": num_labels})
        return {
            "sha256": name,
            "num_users": len(cases),
            "num_labelled": num_labelled,
            "num_openings": int(counts.max(initial=0)),
            "mean_openings": float(counts.mean()) if len(counts) else 0.0,
            "openings": openings[-_NUM_LISTED:],
        }

    @cached_property
    def _test_set(self) -> tuple[Cases, int]:
        """Return the users who are ranked, and how many have a label."""
        labelled = read_cases(self._tokenized, Split.TEST)
        return sample_cases(labelled, self._most_users), len(labelled)

    @cached_property
    def _labels(self) -> tuple[str, np.ndarray]:
        """Return the test set's name, which is a hash of its labels, and each label's hash (uint64), sorted by user."""
        cases, _ = self._test_set
        item_ids = load_item_ids(self._tokenized / "catalogue.parquet")
        pairs = sorted((user, item_ids[item]) for user, item in zip(cases.user_ids, cases.targets, strict=True))
        digests = [hashlib.blake2b(json.dumps(pair).encode(), digest_size=8).digest() for pair in pairs]
        return hashlib.sha256(json.dumps(pairs).encode()).hexdigest(), np.frombuffer(b"".join(digests), dtype="<u8")

    def _is_opened(self, test_set: str) -> np.ndarray:
        """Return which of these labels the test set of this name holds; none where its labels were not kept."""
        name, labels = self._labels
        path = self._folder / _LABELS / f"{test_set}.npy"
        if test_set == name:
            return np.ones(len(labels), dtype=bool)
        return np.isin(labels, np.load(path)) if path.exists() else np.zeros(len(labels), dtype=bool)

    def _write_labels(self, name: str, labels: np.ndarray) -> None:
        """Keep these labels' hashes, in one atomic move."""
        target = self._folder / _LABELS / f"{name}.npy"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            scratch = scratch_of(target)
            with scratch.open("wb") as out:
                np.save(out, labels)
            rename_durably(scratch, target)

    def _append(self, line: dict[str, str]) -> None:
        with (self._folder / LEDGER).open("a+b") as out:
            out.seek(max(0, out.tell() - 1))
            begin = b"" if out.read(1) in b"\n" else b"\n"  # of a line that a power loss cut off
            out.write(begin + json.dumps(line).encode() + b"\n")
            out.flush()
            os.fsync(out.fileno())


def read_ledger(path: Path) -> list[dict[str, str]]:
    """Read all lines, oldest first; a line truncated by a power loss is skipped."""
    openings = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            openings.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return openings
