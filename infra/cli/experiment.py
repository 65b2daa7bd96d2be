"""`tailrace experiment join|report`: impressions with their outcomes, and the value of an experiment or a policy."""

import json
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from infra.cli.session import check_output
from services.errors import ConfigError

experiment_app = typer.Typer(no_args_is_help=True, help="Join impressions with clicks, and report experiments.")
_DAY = "%Y-%m-%d"


@experiment_app.command()
def join(
    impressions: Annotated[Path, typer.Argument(help="Folder of impressions, as Parquet.")],
    events: Annotated[Path, typer.Argument(help="Folder of interactions, as Parquet.")],
    out: Annotated[Path, typer.Argument(help="Folder of the table: a file for each day.")],
    window_s: Annotated[
        int, typer.Option(help="Longest time in seconds from an impression to its click.", min=1)
    ] = 1_800,
    event_type: Annotated[
        list[str] | None, typer.Option(help="A type of event that counts.", show_default="click")
    ] = None,
    since: Annotated[datetime | None, typer.Option(help="First day (UTC).", formats=[_DAY])] = None,
    until: Annotated[datetime | None, typer.Option(help="The day after the last.", formats=[_DAY])] = None,
) -> None:
    """Join clicks to their impressions, without erased users; days whose files exist are joined again."""
    from pipelines.experiments.join import join as join_days
    from services.settings.settings import load_settings
    from services.stream.log.ledger import ErasureLedger

    beside = ErasureLedger(impressions.parent)
    erased = (beside if beside.partitions else ErasureLedger(load_settings().offline_log_dir)).everybody()

    days = join_days(
        impressions,
        events,
        out,
        window_ms=window_s * 1_000,
        event_types=event_type or ["click"],
        since=since.date() if since else None,
        until=until.date() if until else None,
        erased_until=lambda user_id: tombstone.accepted_time_ms if (tombstone := erased.of(user_id)) else None,
    )
    for day in days:
        typer.echo(f"{day.path.name}  {day.num_impressions:,} impressions  {day.num_clicks:,} clicks")


@experiment_app.command()
def report(
    table: Annotated[Path, typer.Argument(help="Folder that `tailrace experiment join` wrote.")],
    experiment: Annotated[
        str, typer.Option(help="Name of the experiment.", show_default="the whole column variant")
    ] = "",
    experiments: Annotated[
        Path | None, typer.Option(help="experiments.toml, with the traffic fractions of --experiment.")
    ] = None,
    by: Annotated[str, typer.Option(help="Column that names the variants.")] = "variant",
    control: Annotated[str, typer.Option(help="Variant to compare with.", show_default="control, or the first")] = "",
    shares: Annotated[
        str, typer.Option(help="Traffic fractions, as control=0.9,fresh=0.1.", show_default="equal")
    ] = "",
    segment: Annotated[list[str] | None, typer.Option(help="Column that divides users, such as surface.")] = None,
    effect: Annotated[
        float, typer.Option(help="Effect that the tests are designed for, as a fraction of the control's value.")
    ] = 0.05,
    aa: Annotated[int, typer.Option(help="A/A: instead split the control this many times at random.", min=0)] = 0,
    off_policy: Annotated[
        Path | None, typer.Option(help="Table of a policy's probabilities; also estimate its value.")
    ] = None,
    reward: Annotated[str, typer.Option(help="Reward of a policy: clicks or value.")] = "clicks",
    surface: Annotated[str | None, typer.Option(help="Surface of the policy's lists.", show_default="all")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the figures.")] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write a page, with its pictures in a folder of the same name.")
    ] = None,
) -> None:
    """Compare the variants of an experiment: intervals and p-values are valid at every look."""
    from pipelines.experiments.describe import as_lines, as_markdown

    check_output(json=json_out, markdown=markdown)
    results: dict[str, Any] = {}
    if off_policy is None or experiment or by != "variant":
        parts = _shares(shares, experiment, experiments)
        results |= _compare(table, experiment, by, control, parts, segment or [], effect, aa)
    if off_policy is not None:
        results["off_policy"] = _estimate(table, off_policy, reward, surface)
    for line in as_lines(results):
        typer.echo(line)
    if json_out is not None:
        json_out.write_text(json.dumps(results, indent=1) + "\n")
    if markdown is not None:
        from pipelines.experiments.picture import write_pictures

        pictures = write_pictures(results, markdown.with_suffix("")) if "differences" in results else {}
        markdown.write_text(as_markdown(results, pictures))


def _shares(given: str, experiment: str, file: Path | None) -> dict[str, float] | None:
    """Return the traffic fractions of the option, else of the experiments file. Raises ConfigError."""
    from services.contracts.experiments import read_experiments

    if given:
        try:
            pairs = (part.split("=") for part in given.split(","))
            return {name: float(share) for name, share in pairs}
        except ValueError as error:
            raise ConfigError(f"--shares: {given!r} cannot be read; give for example control=0.9,fresh=0.1") from error
    if file is None:
        return None
    known = read_experiments(file, "--experiments").by_name
    if experiment not in known:
        raise ConfigError(f"--experiment: {experiment!r} is not in {file}; give one of {', '.join(known)}")
    return known[experiment].shares


def _compare(
    table: Path,
    experiment: str,
    by: str,
    control: str,
    shares: dict[str, float] | None,
    segments: list[str],
    effect: float,
    aa: int,
) -> dict[str, Any]:
    from pipelines.experiments.lists import read_lists
    from pipelines.experiments.report import ExperimentReportOptions, a_a
    from pipelines.experiments.report import report as compare

    if not 0 < effect < 1:
        raise ConfigError(f"--effect: {effect} is out of range; give a fraction between 0 and 1, such as 0.05")
    lists = read_lists(table, by=by, experiment=experiment or None, segments=segments)
    if aa:
        names = lists.variants
        return {"a_a": a_a(lists, control or ("control" if "control" in names else names[0]), aa, 0, effect)}
    return compare(lists, ExperimentReportOptions(control=control, shares=shares, segments=segments, effect=effect))


def _estimate(table: Path, policy: Path, reward: str, surface: str | None) -> dict[str, Any]:
    from pipelines.experiments.off_policy import estimate, read_logged

    if reward not in {"clicks", "value"}:
        raise ConfigError(f"--reward: {reward!r} is unknown; give clicks or value")
    return asdict(estimate(read_logged(table, policy, reward, surface)))
