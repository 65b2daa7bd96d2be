"""The test labels of a run: read here alone, at most once a run, and each time with a line in `test_set.jsonl` beside the stages.

Whoever chooses among many models by their test scores fits the test set, so the record says how often it was opened, when and by which command.
A line names its test set by a hash of users and label items: with other labels counting begins anew. A run whose models were scored
before, and which has no live bundle to compare with, opens nothing. Of more than `MOST_USERS` users some are taken, evenly and always the same: to rank
10^6 items for a user with every model takes 16 ms.
"""

import hashlib
import json
import os
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from models.catalogue import load_item_ids
from pipelines.data.examples import Cases, Split, read_cases, sample_cases

LEDGER = "test_set.jsonl"
MOST_USERS = 50_000
_NUM_LISTED = 20


class HeldOut:
    """The test labels of one run, and the record of all openings. `folder` holds the record, `command` is what runs."""

    def __init__(self, tokenized: Path, folder: Path, command: str, most_users: int = MOST_USERS) -> None:
        self._tokenized, self._ledger, self._command = tokenized, folder / LEDGER, command
        self._most_users = most_users
        self._is_open = False

    def open(self, purpose: str) -> Cases:
        """Return the labels with their histories; the first call in a run is recorded with its purpose."""
        cases, _ = self._test_set
        if not self._is_open:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self._append({"test_set": self._name(cases), "at": now, "command": self._command, "purpose": purpose})
            self._is_open = True
        return cases

    def record(self) -> dict[str, Any]:
        """Return {sha256, num_users, num_labelled: users with a label, num_openings, openings: the newest ones with at, command and purpose} of this test set."""
        cases, num_labelled = self._test_set
        name = self._name(cases)
        openings = [
            {key: line[key] for key in ("at", "command", "purpose")}
            for line in read_ledger(self._ledger)
            if line["test_set"] == name
        ]
        return {
            "sha256": name,
            "num_users": len(cases),
            "num_labelled": num_labelled,
            "num_openings": len(openings),
            "openings": openings[-_NUM_LISTED:],
        }

    @cached_property
    def _test_set(self) -> tuple[Cases, int]:
        """Return the users who are ranked, and how many have a label."""
        labelled = read_cases(self._tokenized, Split.TEST)
        return sample_cases(labelled, self._most_users), len(labelled)

    def _name(self, cases: Cases) -> str:
        """Return the hash of who is tested on which item."""
        item_ids = load_item_ids(self._tokenized / "catalogue.parquet")
        pairs = sorted((user, item_ids[item]) for user, item in zip(cases.user_ids, cases.targets, strict=True))
        return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()

    def _append(self, line: dict[str, str]) -> None:
        self._ledger.parent.mkdir(parents=True, exist_ok=True)
        with self._ledger.open("a+b") as out:
            out.seek(max(0, out.tell() - 1))
            begin = b"" if out.read(1) in b"\n" else b"\n"  # of a line that a power loss cut off
            out.write(begin + json.dumps(line).encode() + b"\n")
            out.flush()
            os.fsync(out.fileno())


def read_ledger(path: Path) -> list[dict[str, str]]:
    """Read all lines, oldest first; one that a power loss cut off is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found
