"""experiments.toml: the assignment of users to variants, and the rejection of invalid files."""

import hashlib
import subprocess
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, chisquare

from services.contracts.experiments import (
    Assignment,
    Experiments,
    Variant,
    parse_experiments,
    variant_field,
    variant_in,
)
from services.contracts.recommend import Tier
from services.errors import ConfigError

FILE = """
[layers.ranking]
salt = "ranking-1"
[layers.page]
salt = "page-1"

[experiments.fresher]
layer = "ranking"
surfaces = ["home", "cart"]
from = 0.1
share = {share}
starts = 2026-11-01T00:00:00Z
ends = 2026-12-01T00:00:00+01:00
exclude_users = ["qa-1"]
[experiments.fresher.variants.control]
[experiments.fresher.variants.fresh]
weight = {weight}
rules = "home-fresh"
deadline_ms = 80
tiers = ["student", "popular"]
[experiments.fresher.variants.newest]
rules = "home-newest"

[experiments.layout]
layer = "page"
surfaces = ["home"]
share = 1.0
[experiments.layout.variants.a]
[experiments.layout.variants.b]
name = "fr"
"""
NOW_MS = int(datetime(2026, 11, 15, tzinfo=UTC).timestamp() * 1_000)
USERS = [f"user-{number}" for number in range(100_000)]


def experiments(share: float = 0.3, weight: float = 2.0) -> Experiments:
    """Parse the example with another traffic fraction or weight."""
    return parse_experiments(FILE.format(share=share, weight=weight))


def assigned(name: str = "fresher", **options: float) -> list[str | None]:
    """Return the variant of each of 10^5 users."""
    experiment = experiments(**options).by_name[name]
    return [experiment.variant_of(user) for user in USERS]


def test_what_the_file_says() -> None:
    """A user has at most one variant in each layer, with the settings of the file."""
    assignments = [experiments().assign("home", user, NOW_MS) for user in USERS[:2_000]]

    assert {len(user_assignments) for user_assignments in assignments} == {1, 2}
    settings = {
        (assignment.experiment, assignment.variant): assignment.settings
        for user_assignments in assignments
        for assignment in user_assignments
    }
    fresh = Variant(weight=2.0, rules="home-fresh", deadline_ms=80, tiers=(Tier.STUDENT, Tier.POPULAR))
    assert settings["fresher", "fresh"] == fresh
    assert settings["layout", "b"].changes == {"name"}


def test_users_are_divided_by_the_shares() -> None:
    """30 % of 10^5 users are in the experiment, divided 1 to 2 to 1, by a chi-square test."""
    counts = Counter(assigned())
    wanted = {None: 0.7, "control": 0.075, "fresh": 0.15, "newest": 0.075}

    result = chisquare([counts[name] for name in wanted], [1e5 * share for share in wanted.values()])

    assert result.pvalue > 0.001


def test_layers_do_not_disturb_each_other() -> None:
    """The variants of two layers are independent over 10^5 users, by a chi-square test."""
    pairs = Counter(zip(assigned(), assigned("layout"), strict=True))
    rows = [[pairs[variant, other] for other in ("a", "b")] for variant in (None, "control", "fresh", "newest")]

    assert chi2_contingency(rows).pvalue > 0.001


@given(st.floats(0.05, 0.85), st.floats(0.05, 0.85))
def test_growing_a_share_moves_no_user(first: float, other: float) -> None:
    """A growing traffic fraction keeps every assigned user's variant and only adds users."""
    smaller, larger = (experiments(share=share).by_name["fresher"] for share in sorted((first, other)))

    for user in USERS[:300]:
        assert smaller.variant_of(user) in {None, larger.variant_of(user)}


@given(st.floats(0.1, 10), st.floats(0.1, 10))
def test_growing_a_weight_moves_users_into_that_variant_alone(first: float, other: float) -> None:
    """No user moves between two variants whose weights stay equal."""
    before, after = (experiments(weight=weight).by_name["fresher"] for weight in sorted((first, other)))

    for user in USERS[:300]:
        assert after.variant_of(user) in {before.variant_of(user), "fresh"}


def test_another_process_finds_the_same() -> None:
    """A fresh interpreter with another hash seed assigns 10^5 users identically."""
    script = (
        "import hashlib, sys\nfrom services.contracts.experiments import parse_experiments\n"
        "one = parse_experiments(sys.stdin.read()).by_name['fresher']\n"
        "names = ','.join(str(one.variant_of(f'user-{number}')) for number in range(100_000))\n"
        "print(hashlib.sha256(names.encode()).hexdigest())"
    )
    here = ",".join(map(str, assigned()))

    done = subprocess.run(
        [sys.executable, "-c", script],
        input=FILE.format(share=0.3, weight=2.0),
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(__file__).resolve().parents[3])},
        timeout=120,
    )

    assert done.stdout.strip() == hashlib.sha256(here.encode()).hexdigest()


def test_dates_surfaces_and_excluded_users() -> None:
    """An experiment assigns nothing outside its dates (end exclusive), on other surfaces and to excluded users."""
    parsed = parse_experiments(FILE.format(share=0.9, weight=1).replace('"qa-1"', '"qa-1", "user-1"'))
    fresher = parsed.by_name["fresher"]
    inside = next(user for user in USERS if fresher.variant_of(user))
    starts, ends = fresher.starts_ms, fresher.ends_ms
    assert ends is not None

    def names(surface: str, user: str, now_ms: int) -> list[str]:
        return [assignment.experiment for assignment in parsed.assign(surface, user, now_ms)]

    assert names("cart", inside, starts) == ["fresher"]
    assert names("cart", inside, ends - 1) == ["fresher"]
    assert names("cart", inside, ends) == names("cart", inside, starts - 1) == names("mail", inside, starts) == []
    assert names("cart", "user-1", starts) == []


def test_an_impression_s_field_is_read_back() -> None:
    """The variants of several experiments are encoded in one field, and each can be read from it."""
    given = (Assignment("layout", "b", Variant()), Assignment("fresher", "fresh", Variant()))

    field = variant_field(given)

    assert field == "fresher=fresh,layout=b"
    assert [variant_in(field, name) for name in ("fresher", "layout", "none")] == ["fresh", "b", None]
    assert variant_field(()) is None
    assert variant_in(None, "fresher") is None


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ('layer = "ranking"', 'layer = "none"', "experiments.fresher.layer"),
        ("share = 0.3", "share = 0.95", "experiments.fresher.share"),
        ("share = 0.3", "share = 0", "experiments.fresher.share"),
        ("share = 0.3", "share = nan", "experiments.fresher.share"),
        ("share = 0.3", "", "experiments.fresher.share"),
        ("share = 0.3", "portion = 0.3", "experiments.fresher.portion"),
        ("weight = 2.0", "weight = 0", "experiments.fresher.variants.fresh.weight"),
        ("deadline_ms = 80", "deadline_ms = 0.5", "experiments.fresher.variants.fresh.deadline_ms"),
        ('"student", "popular"', '"oracle"', "experiments.fresher.variants.fresh.tiers[0]"),
        ("2026-11-01T00:00:00Z", "2026-11-01", "experiments.fresher.starts"),
        ("2026-11-01T00:00:00Z", "2026-11-01T00:00:00", "experiments.fresher.starts"),
        ("2026-12-01T00:00:00+01:00", "2026-10-01T00:00:00Z", "experiments.fresher.ends"),
        ('["home", "cart"]', "[]", "experiments.fresher.surfaces"),
        ("variants.newest", 'variants."a=b"', "experiments.fresher.variants.a=b"),
        ('salt = "page-1"', 'salt = "ranking-1"', "layers.page.salt"),
        ("[experiments.layout.variants.b]\nname", "[experiments.layout.variants.b]\nrules", "experiments.layout"),
        ("[experiments.layout.variants.a]\n[", "[", "experiments.layout.variants"),
        ('layer = "page"', 'layer = "ranking"', "experiments.layout.from"),
        ("[layers.ranking]", "[layers.ranking", "not TOML"),
    ],
)
def test_a_bad_file_is_refused_by_entry(old: str, new: str, field: str) -> None:
    """The error names the entry of each mistake."""
    text = FILE.format(share=0.3, weight=2.0)
    assert old in text

    with pytest.raises(ConfigError) as caught:
        parse_experiments(text.replace(old, new, 1))

    assert str(caught.value).startswith((f"experiments.toml: {field}: ", f"experiments.toml: {field} ("))
