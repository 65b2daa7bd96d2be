"""Reads the index of a framework: the SID of each item, as names of tokens, token ids or code numbers.

The layout is recognised from names and content: `*.index.json` (MiniOneRec, LC-Rec), `sid2pid.json` and
`*pid2sid.parquet` (OpenOneRec), `id2sid.json` (MIMIGenRec), JSON Lines with `token_ids` (NVIDIA SID-GR), a folder with
`manifest.json` and `item_to_sid` (TorchEasyRec), and plain JSON Lines, CSV or Parquet with `item_id` and a SID, in one
file or in a folder of parts.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import polars as pl

from pipelines.foreign.refused import Refused
from pipelines.foreign.rows import TABLES, check_pairs, json_lines, json_object, table_rows, text_of
from pipelines.tables.ids import IdColumn, whole_form

Kind = Literal["names", "ids", "codes"]
"""What an item's SID holds: names of tokens, ids of tokens, or a code number at each level."""

_PICKLED = {".pt", ".pth", ".ckpt", ".bin", ".pkl", ".pickle", ".joblib"}
_ARRAYS = {".npy", ".npz"}
_PACKED = 8_192
"""Codes of a level in OpenOneRec's packed keys."""
_MAX_CODE = 2**31
_TOKEN = re.compile(r"<[^<>]+>")
_SID = re.compile(r"(?:<[^<>]+>[\s,]*)+")
_NUMBERS = re.compile(r"[\d\s,()\[\]]+")
_LEVEL = re.compile(r"(?:lv|level|sid|code|codebook|semantic_id)_?(\d+)")
_IDS = ("item_id", "pid", "id", "iid", "itemId", "parent_asin", "asin")
_INNER = ("item_to_sid", "item2sid", "id2sid", "item_to_sids")
"""Names of the SIDs by item in a JSON object of several mappings."""
_SIDS: Mapping[str, Kind] = {
    "token_ids": "ids",
    "tokens": "names",
    "sid": "names",
    "item_sid": "names",
    "semantic_id": "names",
    "semantic_ids": "names",
    "codes": "codes",
    "codebook": "codes",
}
_AROUND = frozenset(["<|sid_begin|>", "<|sid_end|>"])
"""Tokens around every SID in OpenOneRec's texts. They belong to the prompt, not to the code."""
_LAYOUT = 'give {"item_id": ..., "tokens": [...]} a line, or the index of your framework'


@dataclass(frozen=True, slots=True)
class ItemIndex:
    """The SID of each item by item id. `sizes` are the numbers of codes by level where the layout fixes them."""

    framework: str
    file: str
    kind: Kind
    sids: Mapping[str, tuple[str, ...] | tuple[int, ...]]
    sizes: tuple[int, ...] | None = None

    @property
    def depth(self) -> int:
        """Number of tokens of a SID."""
        return len(next(iter(self.sids.values())))


def read_index(path: Path) -> ItemIndex:
    """Read an index. Raises Refused naming file, row and fix."""
    if path.is_dir():
        index = _read_torch_easy_rec(path) if any(path.glob("**/manifest.json")) else _read_parts(path)
    elif not path.is_file():
        raise Refused(str(path), "", "no such file", "give the index of your framework")
    elif path.suffix in _PICKLED:
        fix = "write JSON Lines from it: torch.load it where it was made, then a line for each item"
        raise Refused(path.name, "", f"{path.suffix} is pickle, which is not read", fix)
    elif path.suffix in _ARRAYS:
        fix = "write JSON Lines from it, a line for each item with its id and its row of codes"
        raise Refused(path.name, "", "an array has no item ids", fix)
    elif path.suffix in TABLES:
        index = _of_rows(path, path.suffix[1:], table_rows(path, _LAYOUT))
    else:
        index = _read_json(path)
    return _checked(index)


def _checked(index: ItemIndex) -> ItemIndex:
    if not index.sids:
        raise Refused(index.file, "", "no items", _LAYOUT)
    bare: Mapping[str, Any] = {
        item_id: tuple(token for token in sid if token not in _AROUND) for item_id, sid in index.sids.items()
    }
    index = replace(index, sids=_by_table_ids(replace(index, sids=bare)))
    depths = {item_id: len(sid) for item_id, sid in index.sids.items()}
    usual = max(set(depths.values()), key=list(depths.values()).count)
    odd = next((item_id for item_id, depth in depths.items() if depth != usual or not depth), None)
    if odd is not None:
        problem = f"{depths[odd]} tokens, other items have {usual}"
        raise Refused(index.file, f"item {odd}", problem, "give every item a SID of the same depth")
    for item_id, sid in index.sids.items():
        if (
            code := next((token for token in sid if isinstance(token, int) and not 0 <= token < _MAX_CODE), None)
        ) is not None:
            fix = "leave items without a SID out of the index"
            raise Refused(index.file, f"item {item_id}", f"{code} is no code; it is below 0 or too large", fix)
    return index


def _by_table_ids(index: ItemIndex) -> Mapping[str, Any]:
    """Return the SIDs by item ids as the tables of events and items read them: `7.0` is 7."""
    words, column = pl.Series(list(index.sids)).str.strip_chars(), IdColumn()
    column.look_at(words)
    ids = whole_form(words, column).fill_null(words)
    if (twice := ids.filter(ids.is_duplicated())).len():
        raise Refused(index.file, f"item {twice[0]}", "occurs twice", "keep one SID for each item")
    return dict(zip(ids, index.sids.values(), strict=True))


def _read_json(path: Path) -> ItemIndex:
    text = text_of(path, _LAYOUT)
    try:
        whole = json.loads(text, object_pairs_hook=lambda pairs: _object(path, pairs))
    except json.JSONDecodeError:
        whole = None
    except (ValueError, RecursionError) as error:
        raise Refused(path.name, "", f"not JSON ({error})", _LAYOUT) from error
    check_pairs(path, text, whole, _LAYOUT)
    if isinstance(whole, dict) and not _SIDS.keys() & whole.keys():
        return _of_object(path, whole)
    if isinstance(whole, list):
        return _of_rows(path, "json", whole)
    return _of_rows(path, "jsonl", json_lines(path, text, _LAYOUT))


def _object(path: Path, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise Refused(path.name, f"item {name}", "occurs twice", "keep one SID for each item")
        members[name] = value
    return members


def _of_object(path: Path, whole: Mapping[str, Any]) -> ItemIndex:
    """Read a JSON object: of SIDs by item, of items by SID, or (OpenOneRec) of items by packed SID."""
    if _SID.fullmatch(next(iter(whole), "")) and not _TOKEN.search(str(next(iter(whole.values())))):
        items = ((sid, item) for sid, members in whole.items() for item in _listed(members))
        rows = ({**(item if isinstance(item, dict) else {"item_id": item}), "sid": sid} for sid, item in items)
        return _of_rows(path, "json", rows)
    if "sid2" in path.name:
        return _of_packed(path, whole)
    inner = next((whole[name] for name in _INNER if isinstance(whole.get(name), dict)), None)
    if inner is not None:
        return _of_object(path, inner)
    first = next(iter(whole.values()), None)
    if isinstance(first, dict):
        by_item = ({"item_id": key, **value} if isinstance(value, dict) else value for key, value in whole.items())
        return _of_rows(path, "json", by_item)
    if isinstance(first, str):
        whole = {item_id: _listed_tokens(path, item_id, str(sid)) for item_id, sid in whole.items()}
        first = next(iter(whole.values()))
    kind: Kind = "codes" if isinstance(first, list) and first and type(first[0]) is int else "names"
    token = int if kind == "codes" else str
    for item_id, sid in whole.items():
        if not isinstance(sid, list) or not all(type(code) is token for code in sid):
            problem = f"not a list of {'code numbers' if kind == 'codes' else 'tokens'} ({sid!r:.60})"
            raise Refused(path.name, f"item {item_id}", problem, _LAYOUT)
    framework = "mimigenrec" if path.name == "id2sid.json" else "minionerec"
    if isinstance(first, list) and len(first) == 4 and framework == "minionerec":
        framework = "lc-rec"
    return ItemIndex(framework, path.name, kind, {item_id: tuple(sid) for item_id, sid in whole.items()})


def _listed_tokens(path: Path, item_id: str, sid: str) -> list[Any]:
    """Return the tokens of a SID in one text, or its code numbers: "1,2,3". Raises Refused."""
    try:
        return [*_sid_of(sid, "codes")[0]] if _NUMBERS.fullmatch(sid) else _TOKEN.findall(sid) or [sid]
    except ValueError as error:
        raise Refused(path.name, f"item {item_id}", f"not a SID ({sid!r:.60})", _LAYOUT) from error


def _of_packed(path: Path, whole: Mapping[str, Any]) -> ItemIndex:
    sids: dict[str, tuple[int, ...]] = {}
    for key, items in whole.items():
        try:
            packed = int(key)
            ids = [str(item["pid"] if isinstance(item, dict) else item) for item in _listed(items)]
        except (ValueError, KeyError, TypeError) as error:
            fix = "give sid2pid.json: packed code -> items with pid"
            raise Refused(path.name, f"key {key}", f"not a packed code ({error})", fix) from error
        code = packed // _PACKED**2, packed // _PACKED % _PACKED, packed % _PACKED
        for item_id in ids:
            if item_id in sids:
                raise Refused(path.name, f"item {item_id}", "has two codes", "keep one SID for each item")
            sids[item_id] = code
    return ItemIndex("openonerec", path.name, "codes", sids, (_PACKED,) * 3)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _of_rows(path: Path, layout: str, rows: Iterable[Mapping[str, Any]]) -> ItemIndex:
    """Read rows of an item id and a SID. Columns `lv1`, `lv2`, ... or `sid_0`, ... are code numbers."""
    sids: dict[str, tuple[Any, ...]] = {}
    kind: Kind | None = None
    column = ""
    for number, row in enumerate(rows, start=1):
        where = f"row {number}"
        name = next((key for key in _IDS if row.get(key) is not None), None) if isinstance(row, Mapping) else None
        if name is None:
            columns = f" in {', '.join(map(str, row))}" if isinstance(row, Mapping) else ""
            raise Refused(path.name, where, f"no item_id{columns}", _LAYOUT)
        item_id = str(row[name])
        if item_id in sids:
            raise Refused(path.name, f"{where} (item {item_id})", "occurs twice", "keep one SID for each item")
        levels = sorted((key for key in row if _LEVEL.fullmatch(key)), key=_number_in)
        column = next((key for key in _SIDS if row.get(key) is not None), "")
        if not column and not levels:
            problem = f"no SID in {', '.join(map(str, row))}"
            raise Refused(path.name, f"{where} (item {item_id})", problem, f"name its column {', '.join(_SIDS)}")
        value = row[column] if column else [row[level] for level in levels]
        try:
            sid, of_row = _sid_of(value, _SIDS.get(column, "codes"))
        except (TypeError, ValueError) as error:
            raise Refused(path.name, f"{where} (item {item_id})", f"not a SID ({value!r:.60})", _LAYOUT) from error
        kind = kind or of_row
        if of_row != kind:
            raise Refused(path.name, where, f"{of_row}, earlier rows have {kind}", "use one form of SID in all rows")
        sids[item_id] = sid
    framework = {"token_ids": "nvidia-sid-gr", "codebook": "torcheasyrec"}.get(column, layout)
    is_open = "pid2sid" in path.name
    sizes = (_PACKED,) * len(next(iter(sids.values()), ())) if is_open else None
    return ItemIndex("openonerec" if is_open else framework, path.name, kind or "names", sids, sizes)


def _sid_of(value: Any, kind: Kind) -> tuple[tuple[Any, ...], Kind]:
    """Return a SID and its kind. The value is a list, or text of tokens or of numbers separated by commas.

    Raises TypeError or ValueError for any other value.
    """
    if isinstance(value, str):
        names = _TOKEN.findall(value) or [part for part in re.split(r"[\s,]+", value.strip("[]() ")) if part]
    elif isinstance(value, list):
        names = [int(name) if isinstance(name, float) and name.is_integer() else name for name in value]
    else:
        raise TypeError(value)
    if any(isinstance(name, bool) for name in names):
        raise TypeError(value)
    if kind != "ids" and all(isinstance(name, int) or re.fullmatch(r"\d+", str(name)) for name in names):
        return tuple(int(name) for name in names), "codes"
    if kind == "names":
        return tuple(map(str, names)), "names"
    return tuple(int(str(name)) for name in names), kind


def _number_in(column: str) -> int:
    match = _LEVEL.fullmatch(column)
    return int(match[1]) if match else 0


def _in_counting_order(path: Path) -> list[tuple[int, str]]:
    """Return a sort key that has generation 10 after generation 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]


def _read_parts(folder: Path) -> ItemIndex:
    """Read the tables of a folder as one."""
    files = [path for path in sorted(folder.glob("**/*")) if path.suffix in TABLES]
    if not files:
        fix = "give the folder of a TorchEasyRec bundle, a folder of Parquet or CSV parts, or an index file"
        raise Refused(str(folder), "", "no manifest.json and no tables", fix)
    return _of_rows(files[0], "parts", [row for path in files for row in table_rows(path, _LAYOUT)])


def _read_torch_easy_rec(folder: Path) -> ItemIndex:
    """Read the newest generation of a TorchEasyRec bundle: `manifest.json` with `item_to_sid`."""
    manifest = max(folder.glob("**/manifest.json"), key=_in_counting_order)
    about = json_object(manifest, "export the bundle again")
    tables = sorted(manifest.parent.glob("item_to_sid*")) + sorted(manifest.parent.glob("item_to_sid/*"))
    files = [path for path in tables if path.suffix in TABLES]
    if not files:
        raise Refused(
            str(manifest), "", "item_to_sid table missing in its folder", "export item_to_sid as Parquet or CSV"
        )
    rows = [row for path in files for row in table_rows(path, "export item_to_sid again")]
    index = _of_rows(files[0], "torcheasyrec", rows)
    codebook = about.get("codebook")
    sizes = tuple(num_codes for num_codes in codebook if type(num_codes) is int) if isinstance(codebook, list) else ()
    is_whole = bool(index.sids) and len(sizes) == index.depth
    return ItemIndex("torcheasyrec", index.file, index.kind, index.sids, sizes if is_whole else None)
