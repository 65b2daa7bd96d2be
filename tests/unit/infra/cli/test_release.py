"""`tailrace release`: parsing of options, errors, and display."""

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infra.cli.main import app
from infra.cli.release import parse_budgets, parse_stages
from models.registry.canary import CanaryStage
from models.registry.release_report import GuardReport, ReleaseReport
from models.registry.store import BundleStore
from services.errors import CanaryError, ConfigError, TailraceError
from tests.unit.gateway.world import add_version, catalogue_of, publish


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BundleStore:
    """A store in the command's state folder with the live version `old` and the version `new`."""
    monkeypatch.setenv("TAILRACE_STATE_DIR", str(tmp_path))
    publish(tmp_path / "bundles", "old", catalogue_of())
    add_version(tmp_path / "bundles", "new", catalogue_of())
    return BundleStore(tmp_path / "bundles")


def tailrace(*words: str) -> str:
    """Run the command and return its output. Raises its TailraceError."""
    result = CliRunner().invoke(app, ["release", *words])
    if isinstance(result.exception, TailraceError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_stages_have_a_share_and_a_time() -> None:
    """The default stages end with all users; a bare `--share` gives a single stage."""
    assert parse_stages("", "") == (
        CanaryStage(0.01, 600),
        CanaryStage(0.05, 1_800),
        CanaryStage(0.25, 3_600),
        CanaryStage(1.0, 0),
    )
    assert parse_stages("2.5%:90s,50%:2d", "") == (CanaryStage(0.025, 90), CanaryStage(0.5, 172_800))
    assert parse_stages("", "5%") == (CanaryStage(0.05, 3_600),)


@pytest.mark.parametrize(
    ("stages", "share", "message"),
    [
        ("", "0.05", "--share: '0.05' is not a percentage; give above 0% to 100%, such as 5%"),
        ("", "0%", "--share: '0%' is not a percentage"),
        ("5%:10", "", "--stages: '10' is not a duration; give for example 90s, 10m, 1h or 2d"),
        (
            "5%:1h,5%:1h",
            "",
            r"--stages: stages\[1\].share: 0.05 is not above the previous stage's; give shares that grow",
        ),
        ("100%", "", r"--stages: stages\[0\].share: 100% of users leaves no users to compare with"),
        ("5%:1h", "5%", "--share: --stages is given too; give one of them"),
    ],
)
def test_wrong_stages_are_refused_by_option(stages: str, share: str, message: str) -> None:
    """The error names the option, its value and the valid values."""
    with pytest.raises(ConfigError, match=message):
        parse_stages(stages, share)


def test_budgets_are_of_guards() -> None:
    """A budget is a percentage for an existing guard."""
    assert parse_budgets(["latency=10%,errors=0%", "clicks=2.5%"]) == {"latency": 0.1, "errors": 0.0, "clicks": 0.025}
    for text, message in (
        ("latency", "has no percentage"),
        ("latency=ten", "not a percentage"),
        ("speed=10%", "--budget speed: unknown guard; give one of errors, "),
        ("latency=100%", "give 0% to below 100%"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_budgets([text])


def test_a_release_begins_goes_on_and_is_stopped(store: BundleStore, tmp_path: Path) -> None:
    """A started release shows its stage; `--next` advances it after a lead time, `--stop` ends it; all are audited."""
    shown = tailrace("new", "--stages", "5%:1h,50%:1h", "--no-lists", "--budget", "latency=20%", "--by-hand")
    canary = store.record().canary
    assert canary is not None
    assert (canary.by_hand, canary.budgets) == (True, {"latency": 0.2})
    assert canary.since_ms > time.time_ns() // 1_000_000 + 5_000
    assert "new beside old as default: stage 1 of 2, 0.05 of users, begins in" in shown
    assert "not looked at yet" in shown

    assert "stage 2 of 2, 0.5 of users" in tailrace("--next")
    assert "the release of new is stopped" in tailrace("--stop", "--reason", "later")
    assert store.record().history[-1].note == "new: later"
    shown = tailrace()
    assert "no release is under way as default; old is live" in shown
    assert shown.endswith(": new: later\n")
    acts = [json.loads(line)["act"] for line in (tmp_path / "audit.log").read_text().splitlines()]
    assert acts == ["release", "release-next", "release-stop"]


def test_after_the_last_stage_next_goes_live(store: BundleStore) -> None:
    """`--next` in the last stage promotes the candidate."""
    tailrace("new", "--share", "50%", "--no-lists")
    tailrace("--next")

    assert (store.live_version(), store.record().canary) == ("new", None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nwe", "--no-lists"), "no bundle nwe .*nearest to it are"),
        (("old", "--no-lists"), "old is already live"),
        (("old",), "old is already live"),
        (("new", "--next"), "VERSION: "),
        (("new", "--name", "mail", "--lists"), "--lists: "),
        (("--next",), "no release is under way as default"),
        (("--stop",), "no release is under way as default"),
        (("--name", "Mail"), "name"),
        (("--reason", "late"), "--reason: .*; give --stop"),
        (("new", "--reason", "late", "--no-lists"), "--reason: .*; give --stop"),
    ],
)
def test_what_cannot_be_is_refused(store: BundleStore, words: tuple[str, ...], message: str) -> None:
    """An invalid release is rejected with the reason, and no release begins."""
    with pytest.raises(TailraceError, match=message):
        tailrace(*words)
    assert store.record().canary is None


def test_a_second_release_is_refused_before_lists_are_made(store: BundleStore) -> None:
    """During a release another release is rejected immediately."""
    tailrace("new", "--share", "5%", "--no-lists")

    with pytest.raises(CanaryError, match="a release of new is under way"):
        tailrace("new", "--share", "5%")


def test_the_guards_are_shown_as_a_table(store: BundleStore) -> None:
    """The analysis report is shown with a row per guard, its interval, and the next step."""
    tailrace("new", "--share", "5%", "--no-lists")
    guards = (
        GuardReport(name="errors", state="open", worse_by=None, low=-1.0, high=None),
        GuardReport(name="latency", state="no worse", worse_by=0.01, low=-0.02, high=0.04),
    )
    report = ReleaseReport(
        act="stay", outcome="continue", reason="errors: too few", lists=(1_000, 9_000), guards=guards
    )
    store.report_canary("new", report.encode(), time.time_ns() // 1_000_000)

    shown = " ".join(tailrace().split())

    assert "1,000 and 9,000 lists of it and of the live version: continue" in shown
    assert "errors open - -100.0% to any latency no worse +1.0% -2.0% to +4.0%" in shown
    assert "stay: errors: too few" in shown
    store.report_canary("new", "looks fine", 1)
    assert tailrace().endswith("\nlooks fine\n")
