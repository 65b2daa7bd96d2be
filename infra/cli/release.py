"""`tailrace release`: start a canary, show it, advance it, end it."""

import re
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from infra.cli.bundles import describe_move
from infra.cli.session import audited, if_named, out, print_line, running_settings, user_name
from services.errors import CanaryError, ConfigError, InvalidRequest

if TYPE_CHECKING:
    from rich.table import Table

    from models.registry.canary import Canary, CanaryStage
    from models.registry.release_report import GuardReport, ReleaseReport
    from models.registry.store import BundleStore
    from services.settings.settings import Settings

USUAL_STAGES = "1%:10m,5%:30m,25%:1h,100%"
_HOLD_OF_SHARE = "1h"
_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


def release(
    version: Annotated[str | None, typer.Argument(help="Version of `tailrace bundles`.", show_default="status")] = None,
    name: Annotated[str, typer.Option(help="The name under which the version serves.")] = "default",
    share: Annotated[
        str, typer.Option(help=f"A single stage of {_HOLD_OF_SHARE} with this fraction of users, as 5%.")
    ] = "",
    stages: Annotated[
        str, typer.Option(help="Traffic fractions with their minimum durations.", show_default=USUAL_STAGES)
    ] = "",
    by_hand: Annotated[
        bool, typer.Option("--by-hand", help="Advance only by `--next`; without VERSION: from now on.")
    ] = False,
    budget: Annotated[
        list[str] | None,
        typer.Option(help="Largest loss of a guard, as latency=10%; repeat it.", show_default=False),
    ] = None,
    lists: Annotated[
        bool | None,
        typer.Option(
            "--lists/--no-lists",
            help="Store the candidate's lists before the release starts.",
            show_default="yes for the name default",
        ),
    ] = None,
    events: Annotated[Path | None, typer.Option(help="Your own events, for --lists, as for `precompute`.")] = None,
    items: Annotated[Path | None, typer.Option(help="Your own items, with --events.")] = None,
    go_on: Annotated[
        bool, typer.Option("--next", help="Advance to the next stage; after the last stage, promote.")
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End the release without withdrawing the version.")] = False,
    reason: Annotated[str, typer.Option(help="Reason of the stop.")] = "",
) -> None:
    """Release a version to a traffic fraction. Canary analysis advances or ends it; without VERSION: show its state."""
    from models.registry.store import BundleStore

    settings = running_settings()
    store = BundleStore.of(settings, name)
    if version is None:
        _refuse_without_version(stages=stages, share=share, budget=budget, lists=lists, events=events, items=items)
    if reason and not stop:
        raise ConfigError("--reason: applies to the end of a release; give --stop, too")
    if sum((go_on, stop, by_hand and version is None)) > 1:
        raise ConfigError("--next: give one of --next, --stop and --by-hand")
    if version is not None:
        if go_on or stop:
            raise ConfigError("VERSION: --next and --stop apply to the current release; omit VERSION")
        planned = parse_stages(stages, share)
        budgets = parse_budgets(budget or ())
        _begin(settings, store, version, planned, by_hand, budgets, _lists_wanted(lists, name), (events, items))
    elif stop:
        _stop(settings, store, reason)
    elif go_on:
        _go_on(settings, store)
    elif by_hand:
        _pause(settings, store)
    _show(store)


def _refuse_without_version(**given: object) -> None:
    """Raise ConfigError for an option that applies only to the start of a release."""
    for option, value in given.items():
        if value not in (None, "", []):
            raise ConfigError(f"--{option}: applies to the start of a release; give VERSION, too")


def parse_stages(stages: str, share: str) -> "tuple[CanaryStage, ...]":
    """Return the stages that the options describe. Raises ConfigError."""
    from models.registry.canary import CanaryStage, check_stages

    if stages and share:
        raise ConfigError("--share: --stages is given too; give one of them")
    option = "--share" if share else "--stages"
    parts = [f"{share}:{_HOLD_OF_SHARE}"] if share else (stages or USUAL_STAGES).split(",")
    parsed = []
    for part in parts:
        text, _, hold = part.strip().partition(":")
        parsed.append(CanaryStage(parse_percent(option, text), parse_duration_s(option, hold) if hold else 0.0))
    try:
        return check_stages(parsed)
    except InvalidRequest as error:
        raise ConfigError(f"{option}: {error}") from error


def parse_percent(option: str, text: str) -> float:
    """Return a percentage, such as 5%, as a fraction. Raises ConfigError naming the option."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%", text.strip())
    if not match or not 0 < float(match[1]) <= 100:
        raise ConfigError(f"{option}: {text!r} is not a percentage; give above 0% to 100%, such as 5%")
    return float(match[1]) / 100


def parse_duration_s(option: str, text: str) -> float:
    """Return a duration, such as 90s, 10m, 1h or 2d, in seconds. Raises ConfigError naming the option."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if not match:
        raise ConfigError(f"{option}: {text!r} is not a duration; give for example 90s, 10m, 1h or 2d")
    return float(match[1]) * _UNITS_S[match[2]]


def parse_budgets(texts: "list[str] | tuple[str, ...]") -> dict[str, float]:
    """Return budgets by guard. Raises ConfigError for bad syntax and unknown guards."""
    from pipelines.release.guards import check_budgets

    budgets = {}
    for part in (part for text in texts for part in text.split(",")):
        guard, is_given, text = part.partition("=")
        if not is_given:
            raise ConfigError(f"--budget: {part!r} has no percentage; give for example latency=10%")
        zero = text.strip() in ("0", "0%")
        budgets[guard.strip()] = 0.0 if zero else parse_percent(f"--budget {guard.strip()}", text)
    check_budgets(budgets)
    return budgets


def _lists_wanted(lists: bool | None, name: str) -> bool:
    """Whether lists are made first. Stored lists exist only for the default name."""
    if lists and name != "default":
        raise ConfigError(f"--lists: stored lists belong to the default name, not to {name}; omit --lists")
    return name == "default" if lists is None else lists


def _begin(
    settings: "Settings",
    store: "BundleStore",
    version: str,
    stages: "tuple[CanaryStage, ...]",
    by_hand: bool,
    budgets: dict[str, float],
    with_lists: bool,
    tables: tuple[Path | None, Path | None],
) -> None:
    _refuse(store, version)
    if with_lists:
        _make_lists(settings, version, tables)
    details = {"version": version, "stages": ",".join(f"{stage.share:.4g}" for stage in stages), **if_named(store.name)}
    with audited(settings.state_dir, "release", **details):
        since_ms = _now_ms() + _lead_ms(settings)
        store.release(version, stages, since_ms, by=user_name(), by_hand=by_hand, budgets=budgets)


def _refuse(store: "BundleStore", version: str) -> None:
    """Raise the release's own errors before lists are made for it."""
    store.open(version)
    record = store.record()
    if record.live == version:
        raise CanaryError(f"{version} is already live; name another version")
    if record.canary is not None:
        raise CanaryError(f"a release of {record.canary.version} is under way: end it with `tailrace release --stop`")


def _make_lists(settings: "Settings", version: str, tables: tuple[Path | None, Path | None]) -> None:
    from infra.local.store import feature_store
    from pipelines.options import PipelineOptions
    from pipelines.places import Places
    from pipelines.refresh import refresh_lists

    options = PipelineOptions(events=tables[0], items=tables[1])
    with feature_store(settings, print_line) as running:
        refresh_lists(options, Places.from_settings(running), out, (version,))


def _go_on(settings: "Settings", store: "BundleStore") -> None:
    canary = _under_way(store)
    details = {"version": canary.version, "stage": str(canary.stage + 1), **if_named(store.name)}
    with audited(settings.state_dir, "release-next", **details):
        if canary.is_last_stage:
            store.promote(canary.version, by=user_name(), release=canary)
        else:
            now_ms = _now_ms()
            since_ms = now_ms + _lead_ms(settings)
            store.move_canary(canary.version, canary.stage + 1, since_ms, now_ms, by=user_name(), release=canary)


def _stop(settings: "Settings", store: "BundleStore", reason: str) -> None:
    canary = _under_way(store)
    details = {"version": canary.version, **({"reason": reason} if reason else {}), **if_named(store.name)}
    with audited(settings.state_dir, "release-stop", **details):
        store.end_canary(canary.version, by=user_name(), note=reason, release=canary)
    out.print(f"the release of {canary.version} is stopped", markup=False)


def _pause(settings: "Settings", store: "BundleStore") -> None:
    canary = _under_way(store)
    with audited(settings.state_dir, "release-by-hand", version=canary.version, **if_named(store.name)):
        store.pause_canary(canary.version, by=user_name(), release=canary)


def _under_way(store: "BundleStore") -> "Canary":
    canary = store.record().canary
    if canary is None:
        raise CanaryError(f"no release is under way as {store.name}; `tailrace release VERSION` begins one")
    return canary


def _show(store: "BundleStore") -> None:
    """Print the state of a name: the current release with its guards, or how the last release ended."""
    record = store.record()
    canary = record.canary
    if canary is None:
        out.print(f"no release is under way as {store.name}; {record.live or 'nothing'} is live", markup=False)
        for move in record.history[-1:]:
            out.print(f"last move: {describe_move(move)}", markup=False)
        return
    now_ms = _now_ms()
    stage = canary.stages[canary.stage]
    out.print(
        f"{canary.version} beside {record.live} as {store.name}: stage {canary.stage + 1} of {len(canary.stages)}, "
        f"{stage.share:.3g} of users, {_since(canary, now_ms)}; by {canary.by} at {canary.at}",
        markup=False,
    )
    _show_report(canary, now_ms)


def _since(canary: "Canary", now_ms: int) -> str:
    seconds = round((now_ms - canary.since_ms) / 1_000)
    hold = timedelta(seconds=canary.stages[canary.stage].hold_s)
    return f"begins in {-seconds} s" if seconds < 0 else f"for {timedelta(seconds=seconds)} of at least {hold}"


def _show_report(canary: "Canary", now_ms: int) -> None:
    from models.registry.release_report import ReleaseReport

    report = ReleaseReport.decode(canary.report)
    if report is None or not report.act:
        out.print(
            report.reason if report else "not looked at yet: the process `release` looks once a minute", markup=False
        )
        return
    ago_s = round((now_ms - (canary.looked_ms or now_ms)) / 1_000)
    lists = " and ".join(f"{count:,}" for count in report.lists)
    out.print(f"looked at {ago_s} s ago, {lists} lists of it and of the live version: {report.outcome}", markup=False)
    if report.guards:
        out.print(report_table(report))
    out.print(f"{report.act}: {report.reason}", markup=False)


def report_table(report: "ReleaseReport") -> "Table":
    """Return the guards of a look as a table."""
    from rich.table import Column, Table

    columns = ("guard", Column("state", no_wrap=True), Column("worse by", justify="right"), "interval")
    table = Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for guard in report.guards:
        table.add_row(escape(guard.name), escape(guard.state), _percent(guard.worse_by), _interval(guard))
    return table


def _interval(guard: "GuardReport") -> str:
    if guard.low is None:
        return "-"
    return f"{_percent(guard.low)} to {'any' if guard.high is None else _percent(guard.high)}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def _lead_ms(settings: "Settings") -> int:
    return round(settings.release_lead_s * 1_000)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
