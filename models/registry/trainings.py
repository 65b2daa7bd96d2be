"""The descent of a store's versions: trainings, bundles that add items to them, and variants made by an optimisation.

    training T ── adds items ── adds items          the same weights: one group
          └────── variant (int8) ── adds items      other weights: a separate group of the same training

Retention and rollback count trainings and groups, not versions: items may be added every ten minutes. Manifests name
their parents and the first version of their group and training, so that versions in between may be pruned. Pure except
for the injected reader of manifests.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

NUM_ADDITIONS_KEPT = 2
"""Newest versions kept of each group, in addition to its first version."""
Lineage = Mapping[str, str | None]


def lineage_of_addition(manifest: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Return the lineage of a bundle that adds items to this version."""
    given: dict[str, Any] = manifest.get("lineage", {})
    names = {"items_added_to": version, "weights_of": given.get("weights_of") or version}
    return {**given, **names, "training": given.get("training") or version}


def lineage_of_variant(manifest: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Return the lineage of a bundle with other weights that is made from this version's weights."""
    given = {
        name: value
        for name, value in manifest.get("lineage", {}).items()
        if name not in ("items_added_to", "weights_of")
    }
    parents = {**given.get("parents", {}), "optimised_from": version}
    return {**given, "optimised_from": version, "parents": parents, "training": given.get("training") or version}


def made_from(lineage: Lineage) -> str | None:
    """Return the version that a bundle was made from without training; None for a training."""
    return lineage.get("items_added_to") or lineage.get("optimised_from")


class Trainings:
    """The descent of versions.

    `read` returns a version's lineage, None if its manifest is absent or unreadable; it is called once per version.
    """

    def __init__(self, read: Callable[[str], Lineage | None]) -> None:
        self._read = read
        self._known: dict[str, Lineage | None] = {}

    def lineage(self, version: str) -> Lineage | None:
        """Return the lineage of a version; None if unknown."""
        if version not in self._known:
            self._known[version] = self._read(version)
        return self._known[version]

    def weights(self, version: str) -> str:
        return self._first(version, "weights_of", lambda lineage: lineage.get("items_added_to"))

    def training(self, version: str) -> str:
        return self._first(version, "training", made_from)

    def ancestors(self, version: str) -> set[str]:
        return set(self._ancestors(version))

    def descendants(self, version: str, among: Sequence[str]) -> list[str]:
        return [other for other in among if other != version and version in self.ancestors(other)]

    def kept(self, versions: Sequence[str], num: int) -> set[str]:
        """Return the versions to keep, oldest first.

        Kept are, for each group of the newest `num` trainings, the first and the newest versions. Versions with an
        unreadable manifest do not count as trainings, and are kept while newer than the oldest kept training.
        """
        known = [version for version in versions if self.lineage(version) is not None]
        trainings = list(dict.fromkeys(self.training(version) for version in known))[-num:]
        groups: dict[str, list[str]] = {}
        for version in known:
            if self.training(version) in trainings:
                groups.setdefault(self.weights(version), []).append(version)
        kept = {version for group in groups.values() for version in (*group[:1], *group[-NUM_ADDITIONS_KEPT:])}
        oldest = min((versions.index(version) for version in kept), default=0)
        return kept | {version for version in versions[oldest:] if self.lineage(version) is None}

    def _first(self, version: str, recorded: str, before: Callable[[Lineage], str | None]) -> str:
        passed = {version}
        while (lineage := self.lineage(version)) is not None:
            if origin := lineage.get(recorded):
                return origin
            parent = before(lineage)
            if parent is None or parent in passed:
                break
            passed.add(parent)
            version = parent
        return version

    def _ancestors(self, version: str) -> Iterator[str]:
        passed, left = {version}, [version]
        while left:
            lineage = self.lineage(left.pop()) or {}
            for name in ("items_added_to", "weights_of", "optimised_from", "training"):
                if (ancestor := lineage.get(name)) and ancestor not in passed:
                    passed.add(ancestor)
                    left.append(ancestor)
                    yield ancestor
