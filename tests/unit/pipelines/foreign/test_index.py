"""The layouts of SIDs that public recommenders write for their items, read to the same codes."""

import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from pipelines.foreign.index import read_index
from pipelines.foreign.refused import Refused
from pipelines.foreign.tokens import resolve

SIDS = {"11": (340, 6566, 7), "12": (1, 2, 3)}
LISTS = [list(sid) for sid in SIDS.values()]
IDS = [*SIDS]


def parquet(**columns: object) -> Callable[[Path], Path]:
    """Return a writer of a table with these columns."""

    def write(folder: Path) -> Path:
        pl.DataFrame(columns).write_parquet(folder / "items.parquet")
        return folder / "items.parquet"

    return write


def text(name: str, content: object) -> Callable[[Path], Path]:
    """Return a writer of a text, or of a value as JSON."""

    def write(folder: Path) -> Path:
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return folder / name

    return write


def parts(folder: Path) -> Path:
    """Write a table in two parts."""
    for number, (item_id, sid) in enumerate(SIDS.items()):
        pl.DataFrame({"item_id": [item_id], "codes": [list(sid)]}).write_parquet(folder / f"part-{number}.parquet")
    return folder


def generations(folder: Path) -> Path:
    """Write generations 9 and 10 of a bundle, the newer one with the SIDs."""
    for number, lists in ((9, [[5, 5, 5], [6, 6, 6]]), (10, LISTS)):
        own = folder / f"gen_{number}"
        own.mkdir()
        (own / "manifest.json").write_text(json.dumps({"codebook": [8_192] * 3}))
        pl.DataFrame({"item_id": IDS, "codes": lists}).write_parquet(own / "item_to_sid.parquet")
    return folder


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "lists": parquet(item_id=IDS, codes=LISTS),
    "float codes": parquet(item_id=IDS, codes=[[float(code) for code in sid] for sid in LISTS]),
    "a column a level": parquet(item_id=IDS, **{f"sid_{level}": [sid[level] for sid in LISTS] for level in range(3)}),
    "levels in counting order": parquet(
        item_id=IDS, lv10=[sid[2] for sid in LISTS], lv2=[sid[1] for sid in LISTS], lv1=[sid[0] for sid in LISTS]
    ),
    "other names of columns": parquet(parent_asin=IDS, semantic_id=LISTS),
    "two mappings": text("sids.json", {"item_to_sid": SIDS, "sid_to_item": {"340 6566 7": "11"}}),
    "objects by item": text("sids.json", {item_id: {"sid": sid} for item_id, sid in SIDS.items()}),
    "texts by item": text("sids.json", {item_id: ",".join(map(str, sid)) for item_id, sid in SIDS.items()}),
    "tabs": text("sids.tsv", "item_id\tcodes\n11\t340,6566,7\n12\t1,2,3\n"),
    "semicolons": text("sids.csv", 'item_id;codes\n11;"340,6566,7"\n12;"1,2,3"\n'),
    "titles with other separators of lines": text(
        "sids.jsonl",
        "\r\n".join(
            json.dumps({"item_id": item_id, "title": "a\u2028b\x85c\u2029", "codes": sid}, ensure_ascii=False)
            for item_id, sid in SIDS.items()
        ),
    ),
    "a folder of parts": parts,
    "the newest generation": generations,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_codes_of_its_items(layout: str, tmp_path: Path) -> None:
    """Each layout of the same SIDs gives the same codes in the order of the levels."""
    index = read_index(LAYOUTS[layout](tmp_path))

    assert index.sids == SIDS
    assert index.kind == "codes"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "cp1252", "utf-16", "utf-16-le"])
@pytest.mark.parametrize(
    ("name", "content"),
    {
        "sids.csv": '"item_id","title","codes"\r\n"11","Caf\xe9, ""a""","340,6566,7"\r\n"12","b","1,2,3"\r\n',
        "sids.tsv": "item_id\ttitle\tcodes\r11\tCaf\xe9\t340,6566,7\r12\tb\t1,2,3\r",
        "sids.json": '[{"id": "11", "title": "Caf\xe9", "codes": [340, 6566, 7]}, {"id": "12", "codes": [1, 2, 3]}]',
    }.items(),
)
def test_a_file_is_read_in_the_encodings_of_spreadsheets(
    name: str, content: str, encoding: str, tmp_path: Path
) -> None:
    """An index may have the encodings, quotes and line ends that tables of items may have."""
    (tmp_path / name).write_bytes(content.encode(encoding))

    assert read_index(tmp_path / name).sids == SIDS


def test_ids_with_fractions_stay_as_the_tables_read_them(tmp_path: Path) -> None:
    """Of ids such as versions, `1.0` is not 1."""
    index = read_index(text("sids.json", {"1.0": [1, 2], "1.5": [1, 3]})(tmp_path))

    assert [*index.sids] == ["1.0", "1.5"]


def test_tokens_around_a_code_are_none_of_its_levels(tmp_path: Path) -> None:
    """The prompt ends with the first of them, which a beam would otherwise repeat."""
    whole = "<|sid_begin|><s_a_1><s_b_2><|sid_end|>"

    index = read_index(text("sids.csv", f"item_id,sid\n11,{whole}\n")(tmp_path))

    assert index.sids == {"11": ("<s_a_1>", "<s_b_2>")}


@pytest.mark.parametrize("name", ["sid2item.json", "items.json"])
def test_items_by_their_sid_are_read(name: str, tmp_path: Path) -> None:
    """The items of one SID are in a list, as ids or as objects with an id."""
    items = {"<a_1><b_2>": ["11", 12], "<a_1> <b_3>": "13", "<a_2><b_2>": [{"pid": 14, "count": 3}]}

    index = read_index(text(name, items)(tmp_path))

    sids = [("<a_1>", "<b_2>")] * 2 + [("<a_1>", "<b_3>"), ("<a_2>", "<b_2>")]
    assert index.sids == dict(zip(("11", "12", "13", "14"), sids, strict=True))


def test_numbered_tokens_of_levels_of_unequal_size_follow_the_manifest(tmp_path: Path) -> None:
    """A level's tokens begin after the codes of all levels before it, whose sizes the manifest has."""
    pl.DataFrame({"item_id": IDS, "codes": [[0, 0, 0], [1, 4, 2]]}).write_parquet(tmp_path / "item_to_sid.parquet")
    (tmp_path / "manifest.json").write_text(json.dumps({"codebook": [2, 7, 3], "capacity": 5}))
    names = {f"C{number}": number for number in range(12)}

    table = resolve(read_index(tmp_path), Tokenizer(WordLevel(names, unk_token="C0")), 12)

    assert table.first_tokens == (0, 2, 9)
    assert table.codes.tolist() == [[0, 0, 0], [1, 4, 2]]


@pytest.mark.parametrize(("num_tokens", "second"), [(12, 4), (15, 5)])
def test_numbered_tokens_are_counted_in_the_checkpoint(num_tokens: int, second: int, tmp_path: Path) -> None:
    """Items that use few codes of a level do not shift the tokens of the next level."""
    names = {f"<|sid_{number}|>": number for number in range(num_tokens)}
    index = read_index(text("sids.json", {"a": [0, 0, 0], "b": [2, 1, 0]})(tmp_path))

    table = resolve(index, Tokenizer(WordLevel(names, unk_token="<|sid_0|>")), num_tokens)

    assert table.first_tokens == (0, second, 2 * second)


def test_numbered_tokens_that_fill_no_level_are_refused(tmp_path: Path) -> None:
    """13 tokens cannot fill three levels of equal size."""
    names = {f"<|sid_{number}|>": number for number in range(13)}
    index = read_index(text("sids.json", {"a": [0, 0, 0]})(tmp_path))

    with pytest.raises(Refused):
        resolve(index, Tokenizer(WordLevel(names, unk_token="<|sid_0|>")), 13)
