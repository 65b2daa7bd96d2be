"""Index, test rows and prompt file: a file that cannot be read is refused by file and row, never by a traceback."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.foreign.examples import read_examples
from pipelines.foreign.index import read_index
from pipelines.foreign.prompts import read_template
from pipelines.foreign.refused import Refused

JUNK = b"\xff\xfe\x00"
INDEXES: dict[str, tuple[str, bytes | str, str]] = {
    "a Parquet file of junk": ("items.parquet", JUNK, ""),
    "an empty CSV": ("items.csv", "", ""),
    "a file that is no text": ("items.json", JUNK, ""),
    "a line that is not JSON": ("items.jsonl", '{"item_id": 1, "sid": "<a_1>"}\n{', "line 2"),
    "a row without an item": ("items.jsonl", '{"tokens": ["<a_1>"]}', "row 1"),
    "a row without a SID": ("items.csv", "item_id,sid\n7,\n", "row 1 (item 7)"),
    "a SID that is a number": ("items.jsonl", '{"item_id": 7, "tokens": 5}', "row 1 (item 7)"),
    "token ids that are text": ("items.jsonl", '{"item_id": 7, "token_ids": ["x"]}', "row 1 (item 7)"),
    "codes with a fraction": ("items.jsonl", '{"item_id": 7, "codes": [1.5, 2]}', "row 1 (item 7)"),
    "a level that is text": ("items.csv", "item_id,lv1\n7,x\n", "row 1 (item 7)"),
    "a row of too many cells": ("items.csv", "item_id,sid\n7,<a_1>\n8,<a_2>,x\n", "row 2"),
    "a quote that is not closed": ("items.csv", 'item_id,sid\n7,<a_1>\n8,"<a_2>\n', "row 2"),
    "an item in two rows": ("items.csv", "item_id,sid\n7,<a_1>\n7,<a_2>\n", "row 2 (item 7)"),
    "two forms of SID": ("items.csv", "item_id,codes,sid\n7,1,\n8,,<a_2>\n", "row 2"),
    "an item that is no list": ("Toys.index.json", '{"7": 5}', "item 7"),
    "a token that is no text": ("Toys.index.json", '{"7": [["<a_1>"]]}', "item 7"),
    "numbers and names": ("Toys.index.json", '{"7": [1, 2], "8": ["<a_1>", "<b_1>"]}', "item 8"),
    "an item of no tokens": ("Toys.index.json", '{"7": []}', "item 7"),
    "a packed code that is no number": ("sid2pid.json", '{"x": [1]}', "key x"),
    "an array": ("items.npy", JUNK, ""),
    "a negative code": ("items.jsonl", '{"item_id": 7, "codes": [-1, 2]}', "item 7"),
    "a token id beyond all numbers": (
        "items.jsonl",
        '{"item_id": 7, "token_ids": [10000000000000000000000000]}',
        "item 7",
    ),
    "numbers in lists of lists": ("sids.json", '{"7": "[[1], [2]]"}', "item 7"),
    "half of a surrogate pair": ("Toys.index.json", '{"7": ["<a_\\ud83d>"]}', ""),
    "half of a surrogate pair in a line": (
        "items.jsonl",
        '{"item_id": 7, "sid": "<a_1>"}\n{"item_id": "\\udc00"}',
        "line 2",
    ),
    "an item of two SIDs": ("sid2item.json", '{"<a_1>": ["7"], "<a_2>": ["7"]}', "row 2 (item 7)"),
    "an item of two packed codes": ("sid2pid.json", '{"1": [7], "2": [7]}', "item 7"),
}
ROWS: dict[str, tuple[str, bytes | str, str]] = {
    "an empty CSV": ("test.csv", "", ""),
    "a Parquet file of junk": ("test.parquet", JUNK, ""),
    "a file that is no text": ("test.json", JUNK, ""),
    "no rows": ("test.json", "[]", ""),
    "a list that is cut": ("test.json", "[{", ""),
    "a line that is not JSON": ("test.jsonl", '{"prompt": "x"}\n{', "line 2"),
    "a row that is no object": ("test.json", "[1]", "row 1"),
    "a row of no known form": ("test.jsonl", '{"text": "x"}', "row 1"),
    "half of a surrogate pair": ("test.jsonl", '{"prompt": "\\ud83d", "completion": "x"}', "line 1"),
    "a history that is no list": ("test.csv", "history_item_sid,item_sid\n5,<a_1>\n", "row 1"),
    "token ids that are text": ("test.jsonl", '{"prompt_token_ids": ["a"]}', "row 1"),
    "a chat without a chat template": ("test.jsonl", '{"messages": [{"role": "user", "content": "x"}]}', "row 1"),
}
USER = '[prompt]\nuser = "{history}"\n'
PROMPTS: dict[str, tuple[str, bytes | str, str]] = {
    "a file that is not TOML": ("p.toml", "x =", ""),
    "an unknown section": ("p.toml", "[prompts]\na = 1", "prompts"),
    "no user text": ("p.toml", "[prompt]", "prompt.user"),
    "a user text that is a number": ("p.toml", "[prompt]\nuser = 5", "prompt.user"),
    "no place for the history": ("p.toml", '[prompt]\nuser = "a"', "prompt.user"),
    "a title outside an item": ("p.toml", '[prompt]\nuser = "{history} {title}"', "prompt.user"),
    "an item without its code": ("p.toml", USER + 'item = "{title}"', "prompt.item"),
    "an unknown field of an item": ("p.toml", USER + 'item = "{code} {price}"', "prompt.item"),
    "a chat without a chat template": ("p.toml", USER + "chat = true", "prompt.chat"),
    "a limit that is text": ("p.toml", USER + 'max_items = "x"', "prompt.max_items"),
    "a limit of zero": ("p.toml", USER + "max_items = 0", "prompt.max_items"),
    "a stride of zero": ("p.toml", USER + "stride = 0", "prompt.stride"),
    "a width of zero": ("p.toml", USER + "[search]\nbeam_width = 0", "search.beam_width"),
    "a flag that is text": ("p.toml", USER + 'special_tokens = "no"', "prompt.special_tokens"),
    "a chat flag that is a number": ("p.toml", USER + "chat = 1", "prompt.chat"),
    "a separator that is a number": ("p.toml", USER + "separator = 3", "prompt.separator"),
    "an answer that is a list": ("p.toml", USER + "answer = []", "prompt.answer"),
    "a count flag that is text": ("p.toml", USER + '[search]\ncount_close = "no"', "search.count_close"),
    "unknown scores": ("p.toml", USER + '[search]\nscores = "items"', "search.scores"),
    "a width beyond the manifest's": ("p.toml", USER + "[search]\nbeam_width = 65537", "search.beam_width"),
    "a limit beyond the manifest's": ("p.toml", USER + "max_items = 1000001", "prompt.max_items"),
    "an empty closing text": ("p.toml", USER + '[codes]\nclose = [""]', "codes.close"),
    "closing tokens that are no list": ("p.toml", USER + '[codes]\nclose = "a"', "codes.close"),
}


def read_rows(path: Path) -> object:
    return read_examples(path, None)


def read_prompt(path: Path) -> object:
    return read_template(path, None)


CASES = [
    pytest.param(read, *case, id=f"{read.__name__}: {name}")
    for read, table in ((read_index, INDEXES), (read_rows, ROWS), (read_prompt, PROMPTS))
    for name, case in table.items()
]


@pytest.mark.parametrize(("read", "file", "content", "row"), CASES)
def test_a_file_is_refused_by_name_and_row(
    read: Callable[[Path], object], file: str, content: bytes | str, row: str, tmp_path: Path
) -> None:
    """The error names the file, the row or key, and a fix."""
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(Refused) as caught:
        read(tmp_path / file)

    assert (caught.value.file, caught.value.row) == (file, row)
    assert caught.value.fix


def test_an_answer_is_read_where_reinforcement_learning_has_it(tmp_path: Path) -> None:
    """Rows of verl name the answer `ground_truth` of the reward model."""
    row = {"prompt": "history: <a_1>", "reward_model": {"style": "rule", "ground_truth": "<a_2>"}}
    (tmp_path / "test.jsonl").write_text(json.dumps(row))

    assert [example.answer for example in read_examples(tmp_path / "test.jsonl", None)] == ["<a_2>"]


@pytest.mark.parametrize("read", [read_index, read_rows, read_prompt])
def test_a_missing_file_is_refused(read: Callable[[Path], object], tmp_path: Path) -> None:
    """The error names the path that was given."""
    with pytest.raises(Refused) as caught:
        read(tmp_path / "absent.json")

    assert "absent.json" in caught.value.file


@pytest.mark.parametrize("manifest", [None, "{", "[1]", '{"codebook": [4, 4]}'])
def test_a_folder_that_is_no_bundle_is_refused(manifest: str | None, tmp_path: Path) -> None:
    """A TorchEasyRec folder needs its manifest and the table of items."""
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)

    with pytest.raises(Refused):
        read_index(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9_000) | st.floats() | st.sampled_from(["<a_1>", "x", "7", ""]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["item_id", "tokens", "token_ids", "sid", "codes", "lv1", "7"]), inner)
    ),
    max_leaves=8,
)


@given(values=st.lists(JSON, min_size=1, max_size=3), name=st.sampled_from(["a.index.json", "a.jsonl", "sid2pid.json"]))
def test_any_json_is_an_index_or_is_refused(values: list[object], name: str) -> None:
    """Each item has a SID of the common depth, of texts or of numbers; other files raise Refused only."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text("\n".join(map(json.dumps, values)))
        try:
            index = read_index(path)
        except Refused:
            return

    kind = str if index.kind == "names" else int
    assert all(len(sid) == index.depth and all(isinstance(code, kind) for code in sid) for sid in index.sids.values())
