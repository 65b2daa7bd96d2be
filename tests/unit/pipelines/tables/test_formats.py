"""Published formats are read unchanged with the options named by errors. The samples' values are made up."""

import re
import shlex
from pathlib import Path

import pytest

from pipelines.data.ingest import IngestSources, open_tables
from pipelines.tables.findings import Findings
from pipelines.tables.options import PLAIN, ItemArguments, TableOptions
from services.errors import DataError
from tests.unit.pipelines.tables.test_reader import events_of, items_of

FORMATS = Path(__file__).parents[4] / "docs" / "formats"
OPTION = re.compile(r"--(column|header) ('[^']*'|\S+)")
MAX_TRIES = 4


def read_by_its_errors(name: str, folder: Path) -> tuple[list[tuple[object, ...]], Findings, list[str]]:
    """Read a sample with both commands, adding the options of each error; return the options too."""
    given: dict[str, list[str]] = {"column": [], "header": []}
    read = items_of if name.endswith((".item", "movies.dat", "products.csv")) else events_of
    for _ in range(MAX_TRIES):
        options = (
            ItemArguments(column=given["column"], header=given["header"]).parsed() if any(given.values()) else PLAIN
        )
        try:
            (piped, findings), (imported, others) = read(FORMATS / name, options, folder)
        except DataError as error:
            for option, value in OPTION.findall(str(error)):
                given[option].append(shlex.split(value)[0])
            continue
        assert (piped, findings.sentences()) == (imported, others.sentences())
        return piped, findings, [f"--{option} {value}" for option, values in given.items() for value in values]
    raise AssertionError(f"{name}: the errors name no options that read it: {given}")


def expected() -> dict[str, tuple[int, list[str], tuple[object, ...]]]:
    """Return for each sample the number of rows, the options, and the first row without its time."""
    header = "--header events="
    return {
        "recbole.inter": (10, [], ("1", "12", "interaction", 1.0)),
        "recbole.item": (10, [], ("12", "12", [])),
        "movielens-1m-ratings.dat": (
            10,
            [f"{header}user_id,item_id,value,event_time"],
            ("1", "12", "interaction", 1.0),
        ),
        "movielens-1m-movies.dat": (
            10,
            ["--header items=item_id,title,categories"],
            ("12", "Second Moon 1 (1990)", ["Drama", "Comedy"]),
        ),
        "retailrocket-events.csv": (10, ["--column visitorid=user_id"], ("257590", "355900", "interaction", 1.0)),
        "yoochoose-clicks.dat": (10, [f"{header}user_id,event_time,item_id,_"], ("1", "214536500", "interaction", 1.0)),
        "diginetica-train-item-views.csv": (
            10,
            ["--column eventdate=event_time", "--column sessionId=user_id"],
            ("1", "81766", "interaction", 1.0),
        ),
        "personalize-interactions.csv": (10, [], ("1", "12", "click", 1.0)),
        "shopify-products.csv": (4, ["--column Handle=item_id"], ("ring-1", "Ring 1", [])),
        "mind-behaviors.tsv": (
            38,
            [f"{header}_,user_id,event_time,history,impressions"],
            ("U100", "N01", "click", 1.0),
        ),
        "predictionio-events.json": (
            9,
            ["--column entityId=user_id", "--column targetEntityId=item_id"],
            ("u0", "i0", "interaction", 1.0),
        ),
    }


@pytest.mark.parametrize("name", expected())
def test_a_published_format_is_read_by_the_options_that_its_errors_name(name: str, tmp_path: Path) -> None:
    """Both commands agree, and unread columns are named with the option that would read them."""
    num_rows, options, first = expected()[name]
    rows, _, given = read_by_its_errors(name, tmp_path)

    assert sorted(given) == sorted(options)
    assert len(rows) == num_rows
    assert (*rows[0][:2], *rows[0][3:]) == first if len(rows[0]) == 5 else rows[0] == first
    assert {path.name for path in FORMATS.iterdir()} == expected().keys()


def test_what_is_ignored_is_named_with_the_option_that_reads_it(tmp_path: Path) -> None:
    """Types and values of the formats are read with the options named by notes."""
    notes = {
        "recbole.inter": "--column rating=value",
        "recbole.item": "--column movie_title=title",
        "retailrocket-events.csv": "--column event=event_type",
        "personalize-interactions.csv": "--column EVENT_VALUE=value",
        "diginetica-train-item-views.csv": "--column timeframe=offset_ms",
        "shopify-products.csv": "--column 'Body (HTML)=text'",
        "predictionio-events.json": "--column event=event_type",
    }
    for name, option in notes.items():
        folder = tmp_path / name
        folder.mkdir()
        _, findings, _ = read_by_its_errors(name, folder)
        assert any(option in str(note) for note in findings.notes), (name, findings.sentences())


def test_an_impression_is_one_event_for_each_item_and_the_history_comes_first(tmp_path: Path) -> None:
    """MIND rows become clicks and impressions by suffix, after the user's history, which is added once."""
    options = ItemArguments(header=["events=_,user_id,event_time,history,impressions"]).parsed()
    (rows, _), _ = events_of(FORMATS / "mind-behaviors.tsv", options, tmp_path)

    own = [(item, kind) for user, item, _, kind, _ in rows if user == "U100"]
    shown = [
        (f"N{row}{number}", kind)
        for number in range(3)
        for row, kind in ((7, "click"), (8, "impression"), (9, "impression"))
    ]
    assert own == [("N01", "click"), ("N02", "click"), *shown]


def test_a_history_is_its_users_also_if_ids_have_fractions(tmp_path: Path) -> None:
    """A user `1.0` among others such as `1.5` keeps the id in the history as in the events."""
    path = tmp_path / "behaviors.tsv"
    lines = ("1.0\t1780000000\ta b\tc-1", "1.5\t1780000000\t\tf-1", "beta\t1780000000\td\te-1")
    path.write_text("\n".join(("user_id\tevent_time\thistory\timpressions", *lines)))
    (rows, _), _ = events_of(path, ItemArguments().parsed(), tmp_path)

    assert [item for user, item, *_ in rows if user == "1.0"] == ["a", "b", "c"]


def test_options_that_two_tables_share_go_to_the_one_that_has_the_column(tmp_path: Path) -> None:
    """A single command line can rename columns of both events and items."""
    options: TableOptions = ItemArguments(column=["movie_title=title", "class=categories", "rating=value"]).parsed()
    items, events = open_tables(
        IngestSources(FORMATS / "recbole.inter", FORMATS / "recbole.item", (), tables=options), tmp_path
    )
    assert events is not None
    catalogue = items.read_catalogue()

    assert catalogue.row(0)[:3] == ("12", "Second Moon 1", ["Drama", "Comedy"])
    assert events.read(catalogue["item_id"])["value"].to_list()[:3] == [1.0, 2.0, 3.0]
