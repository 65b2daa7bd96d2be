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
from services.errors import ConfigError

RULES = st.builds(
    TypeRule, role=st.sampled_from(Role), min_value=st.none() | st.integers(1, 5), below=st.sampled_from(Role)
)
TYPES = st.sampled_from(["click", "rating", "dislike", "buy"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("role = [", "events.toml: not TOML"),
        ("[type.view]", "events.toml: unknown entry 'type'; the entries are other, types"),
        (
            "[types.view]\nroles = 'weak'",
            "types.view: unknown entry 'roles'; the entries are role, weight, min_value, below",
        ),
        (
            "[types.view]\nrole = 'bad'",
            "types.view.role: 'bad' is no role; give one of positive, weak, negative, ignored",
        ),
        ("[types.view]\nweight = 20", "types.view.weight: 20.0 for the role positive; give 0 to 10"),
        ("[types.no]\nrole = 'negative'\nweight = -1", "types.no.weight: -1.0 for the role negative; give 0 to 10"),
        (
            "[types.no]\nrole = 'ignored'\nweight = 1",
            "types.no.weight: 1.0 for the role ignored; give 0 to 10, and to no",
        ),
        ("[types.rating]\nmin_value = 'four'", "types.rating.min_value: 'four' is no number"),
        ("[types.rating]\nbelow = 'negative'", "types.rating.below: has no meaning without min_value"),
        ("types = 3", "events.toml: types: 3 is no table"),
        ("[types]\nview = 'weak'", "types.view: 'weak' is no table"),
    ],
)
def test_what_is_wrong_is_named_with_its_fix(text: str, words: str) -> None:
    """The error names the entry and its allowed values."""
    with pytest.raises(ConfigError, match=r"events.toml") as refused:
        parse_event_roles(text)

    assert words in str(refused.value)


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
    with pytest.raises(ConfigError, match="cannot be read"):
        read_event_roles(tmp_path / "absent.toml")


@given(st.dictionaries(TYPES, RULES), RULES, st.lists(st.tuples(TYPES, st.integers(0, 6)), min_size=1))
def test_a_table_has_the_roles_of_its_rows(
    rules: dict[str, TypeRule], other: TypeRule, rows: list[tuple[str, int]]
) -> None:
    """The pipeline's table expression gives each event the same role as the stream worker."""
    roles = EventRoles(rules, other)
    table = pl.DataFrame(rows, schema={"event_type": pl.String, "value": pl.Float64}, orient="row")

    assert table.with_columns(role=role_of(roles))["role"].to_list() == [roles.role(*row).value for row in rows]
