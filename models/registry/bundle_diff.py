"""The differences between two bundles, as rows of a table. Reads the bundles' files; prints nothing."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from models.errors import BundleError
from models.registry.bundle import Bundle, answers_with
from models.registry.withdrawals import content_of

Row = tuple[str, str, str, str]
"""The property, each bundle's value (a dash if missing), and the difference."""

_NUM_NAMED = 5
"""Number of added or removed items that are named."""
_ABSENT = "-"

Read = TypeVar("Read")


def compare(left: Bundle, right: Bundle) -> tuple[list[Row], list[str]]:
    """Return the rows, and a sentence on each unreadable file, whose rows are skipped."""
    notes: list[str] = []
    bundles, manifests = (left, right), (left.manifest, right.manifest)
    item_ids = [_read(bundle, "catalogue.parquet", bundle.item_ids, notes) for bundle in bundles]
    reports = [_read(bundle, "report.json", bundle.report, notes) or {} for bundle in bundles]
    same = content_of(answers_with(left.manifest)) == content_of(answers_with(right.manifest))
    rows = [
        ("files that serve", "", "", "identical" if same else "different"),
        _named("data set", [report.get("dataset") for report in reports]),
        *_data(manifests),
        *_items(*item_ids),
        *_quality(reports),
        *_gate(manifests),
        *_sizes(bundles, manifests),
        *_origin(manifests),
        *_options(manifests),
    ]
    return rows, notes


def _read(bundle: Bundle, file: str, read: Callable[[], Read], notes: list[str]) -> Read | None:
    """Return the content of the file; None if the bundle lacks it, or if it is damaged, which is noted."""
    try:
        return read() if file in bundle.manifest["files"] else None
    except BundleError as error:
        notes.append(str(error))
        return None


def _data(manifests: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    data = [manifest.get("data", {}) for manifest in manifests]
    for name in ("events", "users", "items"):
        yield _number(name, [section.get(f"num_{name}") for section in data])
    for name in ("oldest", "newest"):
        yield _named(f"{name} event", [_time(section.get(f"{name}_event_us")) for section in data])


def _items(left: Sequence[str] | None, right: Sequence[str] | None) -> Iterator[Row]:
    if left is not None and right is not None:
        for name, item_ids in (("added", {*right} - {*left}), ("removed", {*left} - {*right})):
            named = ", ".join(sorted(item_ids)[:_NUM_NAMED]) + (", ..." if len(item_ids) > _NUM_NAMED else "")
            yield f"items {name}", "", "", f"{len(item_ids):,}{f': {named}' if item_ids else ''}"


def _quality(reports: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    yield _number("test users", [report.get("num_test_users") for report in reports])
    measured = [report.get("metrics", {}) for report in reports]
    for model in dict.fromkeys(name for metrics in measured for name in metrics):
        for metric in ("ndcg@10", "hr@10"):
            values = [metrics.get(model, {}).get(metric) for metrics in measured]
            if any(value is not None for value in values):
                yield _number(f"{model} {metric.upper()}", values, ".4f")


def _gate(manifests: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    forced = [manifest.get("forced") for manifest in manifests]
    yield _named(
        "published by force", ["; ".join(reasons) or "no" if reasons is not None else None for reasons in forced]
    )
    yield _number(
        "price of the LLM, NDCG@10 a ms", [manifest.get("llm_price_ndcg_per_ms") for manifest in manifests], "g"
    )
    yield _named("the LLM is called for", [_ranges(manifest.get("llm_pays")) for manifest in manifests])


def _sizes(bundles: Sequence[Bundle], manifests: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    sizes = [sum(path.stat().st_size for path in bundle.path.rglob("*") if path.is_file()) for bundle in bundles]
    yield _number("bytes", sizes)
    yield _number("decoder's parameters", [manifest.get("num_parameters") for manifest in manifests])
    yield _named("weights", [bundle.weight_kind for bundle in bundles])
    yield _number("depth of codes", [manifest.get("depth") for manifest in manifests])


def _origin(manifests: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    lineages = [manifest.get("lineage", {}) for manifest in manifests]
    for name in ("started_from", "compared_with", "reference"):
        yield _named(name.replace("_", " "), [lineage.get("parents", {}).get(name) for lineage in lineages])
    yield _named("items added to", [lineage.get("items_added_to") for lineage in lineages])
    yield _named("optimised from", [lineage.get("optimised_from") for lineage in lineages])
    for name in ("events.parquet", "dislikes.parquet", "items.parquet"):
        yield _named(
            f"hash of {name}", [(lineage.get("data", {}).get(name) or "")[:12] or None for lineage in lineages]
        )
    yield _named("hash of the sources", [lineage.get("code") for lineage in lineages])


def _options(manifests: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Yield the options that differ, including the recipe's."""
    given = [dict(_flat("", manifest.get("lineage", {}).get("options", {}))) for manifest in manifests]
    for name in sorted({*given[0], *given[1]}):
        values = [options.get(name) for options in given]
        if values[0] != values[1]:
            yield _named(f"option {name}", values)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the leaves of JSON objects under their dotted names."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else name, inner)
    else:
        yield prefix, value if isinstance(value, str) else json.dumps(value)


def _named(name: str, values: Sequence[Any]) -> Row:
    left, right = (_ABSENT if value is None else str(value) for value in values)
    return name, left, right, "" if left == right else "different"


def _number(name: str, values: Sequence[float | None], form: str = ",") -> Row:
    left, right = values
    shown = [_ABSENT if value is None else f"{value:{form}}" for value in values]
    difference = "" if left is None or right is None or left == right else f"{right - left:+{form}}"
    return name, shown[0], shown[1], difference


def _time(time_us: int | None) -> str | None:
    return None if time_us is None else f"{datetime.fromtimestamp(time_us / 1e6, UTC):%Y-%m-%d %H:%M}"


def _ranges(llm_pays: Sequence[Sequence[int | None]] | None) -> str | None:
    if llm_pays is None:
        return None
    return (
        ", ".join(f"{first} and more" if last is None else f"{first} to {last}" for first, last in llm_pays) or "none"
    )
