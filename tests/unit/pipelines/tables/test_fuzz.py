"""For any file, the reader accepts or rejects rows, or rejects the file by name, without other exceptions."""

import gzip
import random
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.tables.cells import printable
from pipelines.tables.findings import Findings
from pipelines.tables.id_files import read_ids
from pipelines.tables.ids import is_bad
from pipelines.tables.options import TableOptions
from pipelines.tables.reader import EventTable, ItemTable, open_table
from services.contracts.message import is_printable, valid_id
from services.errors import ConfigError, DataError
from tests.unit.pipelines.tables.test_reader import CATEGORIES, EVENTS, GOOD, IDS, TABLES, TIMES, VALUES

TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cn")) | st.sampled_from("\u200c\u200d\u200e\u202e\ufeff"))


@given(TEXTS)
def test_the_gateway_and_the_tables_accept_the_same_ids(text: str) -> None:
    """An id that a table accepts is an id in every call, and the other way round."""
    assert pl.DataFrame({"id": [text]}).select(is_bad("id")).item() == (valid_id(text) is None)


@given(TEXTS)
def test_a_text_of_a_table_is_a_text_of_the_gateway(text: str) -> None:
    """The reader's texts are printable, and printable texts stay as they are, apart from their outer blanks."""
    clean = printable(pl.Series([text]), 1_024)[0].item()

    assert clean is None or is_printable(clean)
    if is_printable(text) and text:
        assert clean == text


CELLS = [
    *IDS,
    *TIMES,
    *VALUES,
    *CATEGORIES,
    '"',
    '""',
    "\0",
    "\n",
    "\r",
    "::",
    "\t",
    "a|b",
    "9" * 400,
    "\ud7ff",
    "ü",
    "sNaN",
    "-0",
]
SEEDS = [
    case.content if isinstance(case.content, bytes) else case.content.encode()
    for case in (*EVENTS.values(), *TABLES.values())
]
SIGNS = b'",;|\t\n\r\0\x1f\x80\xff\xed\xa0{}[]:'
KINDS = ("events", "items", "ids")
NUM_QUICK, NUM_WHOLE = 300, 3_000


def made(draw: random.Random) -> bytes:
    """Return a valid file with bytes or cells replaced, removed or doubled, or a file of random cells."""
    if draw.random() < 0.3:
        sign = draw.choice([",", ";", "\t", "|", "::"])
        names = draw.sample(
            ["user_id", "item_id", "event_time", "offset_ms", "event_type", "value", "title", "categories", "price"], 5
        )
        rows = [
            sign.join(draw.choice(CELLS) for _ in range(draw.choice([5, 5, 5, 4, 6]))) for _ in range(draw.randrange(6))
        ]
        content = "\n".join([sign.join(names), *rows]).encode(errors="surrogatepass")
    else:
        content = draw.choice([*SEEDS, GOOD.encode()])
    data = bytearray(content)
    for _ in range(draw.randrange(4)):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(4):
            case 0:
                data[at:at] = bytes([draw.choice(SIGNS)])
            case 1:
                del data[at : at + draw.randrange(1, 9)]
            case 2:
                data[at:at] = draw.choice(CELLS).encode(errors="surrogatepass")
            case _:
                data[at:at] = data[at : at + 20]
    return gzip.compress(bytes(data))[: draw.choice([None, None, 30])] if draw.random() < 0.03 else bytes(data)


def is_accepted(path: Path, kind: str) -> bool:
    """Read a file as events, items or ids; return whether the reader accepts it."""
    try:
        if kind == "ids":
            read_ids(path, "user_id", "--users")
            return True
        table = {"events": EventTable, "items": ItemTable}[kind]
        opened = table(open_table(path, kind, TableOptions()), TableOptions())
        assert_counted(opened.read().height, opened.findings)
    except (DataError, ConfigError):
        return False
    return True


def assert_counted(num_rows: int, findings: Findings) -> None:
    """Assert that every row is accepted, rejected, a duplicate, or merged into another row."""
    assert num_rows
    assert findings.num_set_aside <= findings.num_rows
    assert all(str(note) for note in findings.notes)


@pytest.mark.parametrize(
    "num_inputs", [pytest.param(NUM_QUICK, id="quick"), pytest.param(NUM_WHOLE, id="whole", marks=pytest.mark.grid)]
)
def test_no_file_ends_the_reader(num_inputs: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Each reader in turn reads or refuses mutated tables; with `-m grid`, `--foreign-inputs` sets their number."""
    num_inputs = request.config.getoption("--foreign-inputs") or num_inputs
    path, num_accepted = tmp_path / "table", 0
    for seed in range(num_inputs):
        data = made(random.Random(seed))
        path.write_bytes(data)
        try:
            num_accepted += is_accepted(path, KINDS[seed % len(KINDS)])
        except Exception as error:
            raise AssertionError(f"seed {seed}: {data!r}") from error

    assert num_accepted > num_inputs // 10
