"""One file defines the roles of event types; errors in it are reported by entry."""

from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.data.roles import describe, role_of
from services.contracts.event_roles import (
    DEFAULT_ROLES,
    EventRoles,
    Role,
    TypeRule,
    parse_event_roles,
    read_event_roles,
)
from services.contracts.experiments import read_experiments
from services.errors import ConfigError

RULES = st.builds(TypeRule, role=st.sampled_from(Role)) | st.builds(
    TypeRule, role=st.sampled_from(Role), min_value=st.integers(1, 5), below=st.sampled_from(Role)
)
TYPES = st.sampled_from(["click", "rating", "dislike", "buy"])


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("role = [", "not TOML"),
        ("[type.view]", "type"),
        ("[types.view]\nroles = 'weak'", "types.view.roles"),
        ("[types.view]\nrole = 'bad'", "types.view.role"),
        ("[types.view]\nweight = 20", "types.view.weight"),
        ("[types.no]\nrole = 'negative'\nweight = -1", "types.no.weight"),
        ("[types.no]\nrole = 'ignored'\nweight = 1", "types.no.weight"),
        ("[types.rating]\nmin_value = 'four'", "types.rating.min_value"),
        ("[types.rating]\nmin_value = nan", "types.rating.min_value"),
        ("[types.rating]\nbelow = 'negative'", "types.rating.below"),
        ("types = 3", "types"),
        ("[types]\nview = 'weak'", "types.view"),
    ],
)
def test_an_error_names_its_entry(text: str, field: str) -> None:
    """The error names the file and the entry."""
    with pytest.raises(ConfigError) as refused:
        parse_event_roles(text)

    assert str(refused.value).startswith((f"events.toml: {field}: ", f"events.toml: {field} ("))


def test_an_unknown_role_is_answered_with_the_roles() -> None:
    """The error lists the allowed values."""
    with pytest.raises(ConfigError, match="positive, weak, negative, ignored"):
        parse_event_roles("[types.view]\nrole = 'bad'")


def test_a_file_adds_to_the_defaults(tmp_path: Path) -> None:
    """Types that the file does not name keep their default rule: every rating is positive, a dislike is negative."""
    file = tmp_path / "events.toml"
    file.write_text("[types.rating]\nmin_value = 4\nbelow = 'negative'\n[other]\nrole = 'weak'\nweight = 0.5")

    roles = read_event_roles(file)

    assert [roles.role("rating", value) for value in (3.5, 4)] == [Role.NEGATIVE, Role.POSITIVE]
    assert (roles.role("view", 1), roles.role("dislike", 1)) == (Role.WEAK, Role.NEGATIVE)
    assert DEFAULT_ROLES.role("rating", 1) is Role.POSITIVE
    assert describe(pl.DataFrame({"event_type": ["rating"] * 3, "value": [1.0, 4.0, 5.0]}), roles) == [
        "events of type rating: 1 negative, 2 positive (4 and up are positive, lower ones negative)"
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("[typs.view]", "typs: unknown; "),
        ("[types", r"not TOML \(.*\); correct the text there"),
    ],
)
def test_a_refused_file_is_named_with_its_setting(tmp_path: Path, text: str | None, words: str) -> None:
    """An error of an events or experiments file names the setting, the path, the entry and the fix."""
    file = tmp_path / "rules.toml"
    if text is not None:
        file.write_text(text)

    for setting, read in (("EVENTS", read_event_roles), ("EXPERIMENTS", read_experiments)):
        with pytest.raises(ConfigError, match=f"^TAILRACE_{setting}_FILE: {file}:? {words}"):
            read(file)


@given(st.dictionaries(TYPES, RULES), RULES, st.lists(st.tuples(TYPES, st.integers(0, 6)), min_size=1))
def test_a_table_has_the_roles_of_its_rows(
    rules: dict[str, TypeRule], other: TypeRule, rows: list[tuple[str, int]]
) -> None:
    """The pipeline's table expression gives each event the same role as the stream worker."""
    roles = EventRoles(rules, other)
    table = pl.DataFrame(rows, schema={"event_type": pl.String, "value": pl.Float64}, orient="row")

    assert table.with_columns(role=role_of(roles))["role"].to_list() == [roles.role(*row).value for row in rows]
