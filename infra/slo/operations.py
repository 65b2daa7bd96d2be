"""Operational alerts in addition to the objectives': unavailable parts, filling queues, degraded answers.

These alerts name causes; the objectives' alerts name symptoms that callers notice. Only the latter and outages page.
"""

from dataclasses import dataclass
from typing import Any

from infra.slo.rules import ENVIRONMENT, JOB, lacking
from services.observability.objectives import Severity

_LAG = "tailrace_stream_lag_events"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert. `expr` must hold for `lasts` before it fires; its runbook is `runbooks/<name>.md`."""

    name: str
    expr: str
    lasts: str
    severity: Severity
    summary: str


_UP = f'up{{job=~"{JOB}"}}'
_SERVING, _WANTED = (
    f"sum by ({ENVIRONMENT}) (tailrace_llm_replicas{{role='live'}})",
    f"max by ({ENVIRONMENT}) (tailrace_llm_replicas_wanted)",
)
_REFUSED_FILES = " or ".join(
    f'label_replace(max by (namespace) (tailrace_{file}_file_state) > 0, "file", "{file}", "", "")'
    for file in ("keys", "surfaces", "experiments")
)

_DEGRADED = " or ".join(
    f'label_replace({expr}, "mode", "{mode}", "", "")'
    for mode, expr in (
        ("the items topic", "max by (namespace) (tailrace_items_unavailable) > 0"),
        ("changes since the snapshot of items", "max by (namespace) (tailrace_items_knowledge) == 1"),
        ("shared counts of calls", "max by (namespace) (tailrace_rate_counts_unavailable) > 0"),
        (
            "some attributes of items",
            "sum by (namespace) (increase(tailrace_item_attributes_left_out_total[15m])) > 0",
        ),
    )
)

ALERTS = (
    Alert(
        name="TailraceTargetDown",
        expr=f"{_UP} == 0 or {lacking(_UP)}",
        lasts="1m",
        severity="page",
        summary="Prometheus cannot scrape {{ $labels.instance }}",
    ),
    Alert(
        name="TailraceNoBundle",
        expr=lacking("tailrace_bundle_info{role='live'} == 1"),
        lasts="2m",
        severity="page",
        summary="No gateway has a live bundle: every recommendation is refused",
    ),
    Alert(
        name="TailraceBundleStoreLost",
        expr="max by (namespace) (tailrace_bundle_store_lost) > 0",
        lasts="10m",
        severity="ticket",
        summary="The bundle store is unavailable: loaded bundles keep serving, and no new bundle is loaded",
    ),
    Alert(
        name="TailraceNameRecordCorrupt",
        expr="max by (namespace, name) (tailrace_name_record_corrupt) > 0",
        lasts="1m",
        severity="ticket",
        summary=(
            "The record of {{ $labels.name }} cannot be decoded: the last valid record serves, and changes are not seen"
        ),
    ),
    Alert(
        name="TailraceWorkerUnavailable",
        expr=(
            f"{lacking(_LAG)} or group by ({ENVIRONMENT}) (group by ({ENVIRONMENT}, partition) "
            f"(max_over_time({_LAG}[1d])) unless group by ({ENVIRONMENT}, partition) ({_LAG}))"
        ),
        lasts="2m",
        severity="page",
        summary="A stream worker is unavailable: the events of its partitions wait in Kafka",
    ),
    Alert(
        name="TailraceFeaturesUnavailable",
        expr=(
            'sum by (namespace) (rate(tailrace_requests_total{reason="features_unavailable"}[5m])) / sum by '
            "(namespace) (rate(tailrace_requests_total[5m])) > 0.05"
        ),
        lasts="2m",
        severity="page",
        summary="{{ $value | humanizePercentage }} of the answers are computed without the user's history",
    ),
    Alert(
        name="TailraceStreamLag",
        expr="sum by (namespace) (tailrace_stream_lag_events) > 1000",
        lasts="2m",
        severity="ticket",
        summary="{{ $value | humanize }} events wait to be applied",
    ),
    Alert(
        name="TailraceStreamStalled",
        expr="time() - max by (namespace, partition) (tailrace_stream_progress_time_seconds) > 120",
        lasts="1m",
        severity="ticket",
        summary="Partition {{ $labels.partition }} has made no progress for {{ $value | humanizeDuration }}",
    ),
    Alert(
        name="TailraceDeadLetters",
        expr="sum by (namespace) (increase(tailrace_stream_dead_lettered_total[15m])) > 0",
        lasts="0s",
        severity="ticket",
        summary="The topic holds records that cannot be read or parsed",
    ),
    Alert(
        name="TailraceOfflineLog",
        expr=(
            "sum by (namespace) (increase(tailrace_stream_log_failures_total[15m])) > 0 or max by (namespace) "
            "(tailrace_stream_log_unreadable_files) > 0"
        ),
        lasts="0s",
        severity="ticket",
        summary="A worker cannot use the offline log, or skips files of it",
    ),
    Alert(
        name="TailraceBreakerOpen",
        expr="max by (namespace) (avg_over_time(tailrace_breaker_open[5m])) > 0.5",
        lasts="1m",
        severity="ticket",
        summary="The LLM's circuit breaker is open most of the time; the student answers",
    ),
    Alert(
        name="TailraceLlmReplicasUnavailable",
        expr=f"{_SERVING} < {_WANTED} or ({_WANTED} > 0 unless {_SERVING}) * 0",
        lasts="2m",
        severity="ticket",
        summary="Only {{ $value | humanize }} LLM replicas are serving",
    ),
    Alert(
        name="TailraceStandbyActive",
        expr="max by (namespace) (tailrace_standby_active) == 1",
        lasts="2m",
        severity="ticket",
        summary="Ray Serve is unavailable for longer than a restart takes; the standby answers without the LLM",
    ),
    Alert(
        name="TailraceKvCacheFull",
        expr=f'max by (namespace) (vllm:kv_cache_usage_perc{{job=~"{JOB}"}}) > 0.95',
        lasts="5m",
        severity="ticket",
        summary="{{ $value | humanizePercentage }} of an engine's KV blocks are held: requests wait for memory",
    ),
    Alert(
        name="TailraceShedding",
        expr="max by (namespace) (tailrace_admission_strain) > 0",
        lasts="5m",
        severity="ticket",
        summary="Traffic exceeds capacity; low-priority requests are answered from memory",
    ),
    Alert(
        name="TailraceBundleSplit",
        expr=(
            "count by (namespace, name, role) (count by (namespace, name, role, version) (tailrace_bundle_info == 1 "
            "or tailrace_llm_replicas > 0)) > 1"
        ),
        lasts="15m",
        severity="ticket",
        summary=(
            "{{ $value | humanize }} versions of {{ $labels.name }} are {{ $labels.role }} for longer than an "
            "upgrade takes"
        ),
    ),
    Alert(
        name="TailraceReleaseRolledBack",
        expr="sum by (namespace, name, version) (increase(tailrace_release_rolled_back_total[1h])) > 0",
        lasts="0s",
        severity="ticket",
        summary="{{ $labels.version }} was worse than the live version of {{ $labels.name }} and was rolled back",
    ),
    Alert(
        name="TailraceReleaseUnjudged",
        expr=(
            "time() - max by (namespace, name) (last_over_time(tailrace_release_look_time_seconds[1d])) > 300 or max "
            "by (namespace, name) (tailrace_release_lost_users) > 0"
        ),
        lasts="1m",
        severity="ticket",
        summary="No canary analysis of {{ $labels.name }} for five minutes, or users of one version are missing",
    ),
    Alert(
        name="TailraceRestarts",
        expr="sum by (namespace, part) (changes(tailrace_process_start_time_seconds[15m])) > 3",
        lasts="0s",
        severity="ticket",
        summary="The {{ $labels.part }} restarts repeatedly",
    ),
    Alert(
        name="TailraceBackgroundFailing",
        expr="sum by (namespace, task) (increase(tailrace_background_failures_total[15m])) > 0",
        lasts="0s",
        severity="ticket",
        summary="{{ $labels.task }} failed in the background of a gateway, so its data is stale",
    ),
    Alert(
        name="TailraceFileRefused",
        expr=_REFUSED_FILES,
        lasts="1m",
        severity="ticket",
        summary=(
            "The file of {{ $labels.file }} is rejected: its last valid content applies, but no gateway starts with it"
        ),
    ),
    Alert(
        name="TailraceItemStatesUnknown",
        expr="max by (namespace) (tailrace_items_knowledge) == 2",
        lasts="1m",
        severity="page",
        summary="A process has no item states: a gateway without them refuses every recommendation",
    ),
    Alert(
        name="TailraceDegraded",
        expr=_DEGRADED,
        lasts="5m",
        severity="ticket",
        summary="A process runs without {{ $labels.mode }}",
    ),
    Alert(
        name="TailraceImpressionsLost",
        expr=(
            'sum by (namespace) (rate(tailrace_impressions_total{outcome!="sent"}[15m])) / sum by (namespace) '
            "(rate(tailrace_impressions_total[15m])) > 0.01"
        ),
        lasts="5m",
        severity="ticket",
        summary="{{ $value | humanizePercentage }} of the impressions are not recorded for training",
    ),
)


def group(runbooks: str) -> dict[str, Any]:
    """Return the alerts as one rule group."""
    return {"name": "tailrace-operations", "rules": [_rule(alert, runbooks) for alert in ALERTS]}


def _rule(alert: Alert, runbooks: str) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.lasts,
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "runbook_url": f"{runbooks}/{alert.name}.md"},
    }
