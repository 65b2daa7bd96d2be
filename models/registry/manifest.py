"""Schemas of a bundle's manifest and evaluation report, validated at every read.

File names are relative paths in normal form, so no file outside the version's folder is read or written.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints

from models.documents import MAX_TIME_MS, Count, Finite, Schema, Sha256, Version, decode_plain
from models.errors import BundleCorrupt
from models.mixer import MODEL
from models.search import MAX_BEAM_WIDTH, MAX_CLOSING_TOKENS, Scores

MANIFEST = "manifest.json"
_MAX_FILES = 100_000
MAX_PROMPT_ITEMS = 1_000_000
_MAX_WEIGHT = 1e6
_Tokens = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""A token, or a number of tokens."""


def _file_name(name: str) -> str:
    """Return the name of a bundle's file. Raises ValueError unless it is a relative path in normal form."""
    parts = name.split("/")
    if len(name) > 1_024 or not name.isprintable() or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"{name!r:.100} is not a relative path in normal form")
    if parts[-1] == MANIFEST:
        raise ValueError(f"{name!r:.100}: a manifest does not list a manifest")
    return name


def _files(files: dict[str, str]) -> dict[str, str]:
    """Return the files. Raises ValueError if a path is both a file and a folder."""
    folders = {name[:at] for name in files for at, letter in enumerate(name) if letter == "/"}
    if clash := sorted(folders & files.keys()):
        raise ValueError(f"{clash[0]!r:.100} is a file and a folder")
    return files


_FileName = Annotated[str, AfterValidator(_file_name)]
_TimeUs = Annotated[int, Field(ge=-62_135_596_800 * 10**6, le=1_000 * MAX_TIME_MS)]
"""Unix microseconds of the years 1 to 9999."""
_Numbers = dict[str, float]


class _Parents(Schema):
    started_from: Version | None = None
    compared_with: Version | None = None
    reference: Version | None = None
    optimised_from: Version | None = None


class _Lineage(Schema):
    training: Version | None = None
    weights_of: Version | None = None
    items_added_to: Version | None = None
    optimised_from: Version | None = None
    parents: _Parents = _Parents()
    stages: dict[str, str] = Field(default_factory=dict)
    data: dict[str, str] = Field(default_factory=dict)
    options: dict[str, Any] = Field(default_factory=dict)
    code: str = ""
    command: str = ""


class _Data(Schema):
    num_events: Count = 0
    num_users: Count = 0
    num_items: Count = 0
    oldest_event_us: _TimeUs | None = None
    newest_event_us: _TimeUs | None = None


class _Lists(Schema):
    of: Version
    under: Version


class _Serving(Schema):
    weight_kind: str = "model"


class _PromptText(Schema):
    pieces: Annotated[list[str], Field(min_length=1, max_length=100)]
    item: str
    between: str
    special_tokens: bool
    fixed_tokens: _Tokens
    tokens_per_item: _Tokens


class _Prompt(Schema):
    max_items: Annotated[int, Field(ge=1, le=MAX_PROMPT_ITEMS)] = 200
    stride: Annotated[int, Field(ge=1, le=MAX_PROMPT_ITEMS)] = 50
    head: list[_Tokens] | None = None
    between: list[_Tokens] | None = None
    tail: list[_Tokens] | None = None
    text: _PromptText | None = None


class _Search(Schema):
    beam_width: Annotated[int | None, Field(ge=1, le=MAX_BEAM_WIDTH)] = None
    scores: Scores = "catalogue"
    close: Annotated[list[_Tokens], Field(max_length=MAX_CLOSING_TOKENS)] = Field(default_factory=list)
    popular_first: bool = False


class _Imported(Schema):
    """A decoder that was trained elsewhere: its framework, and the date up to which it may have seen labels."""

    framework: str = ""
    source_sha256: str = ""
    seen_until: str | None = None


class _Reading(Schema):
    newest: Annotated[int, Field(ge=1, le=MAX_PROMPT_ITEMS)]
    decay: Annotated[float, Field(gt=0, le=1)]


class _Blend(Schema):
    history: tuple[Count, Count | None]
    weights: dict[str, Annotated[float, Field(ge=0, le=_MAX_WEIGHT)]]


class _NewItems(Schema):
    """Factors of the scores of items without events, chosen with `num_items` of them."""

    model: Annotated[float, Field(ge=1, le=_MAX_WEIGHT)]
    sources: Annotated[float, Field(ge=1, le=_MAX_WEIGHT)]
    num_items: Annotated[int, Field(ge=1)]


def _mixer(mixer: "_Mixer") -> "_Mixer":
    """Return the mixer. Raises ValueError if a weight is of a source that it does not list."""
    known = {MODEL, *mixer.sources}
    for blends in mixer.blends.values():
        for blend in blends:
            if unknown := sorted(blend.weights.keys() - known):
                raise ValueError(f"{unknown[0]!r:.100} has a weight but is not a source")
    return mixer


class _Mixer(Schema):
    sources: dict[Annotated[str, StringConstraints(pattern=r"^[a-z][a-z_]{0,31}$")], _Reading]
    blends: dict[Literal["decoder", "student"], list[_Blend]]
    new_items: dict[Literal["decoder", "student"], _NewItems] = Field(default_factory=dict)


class _Wishes(Schema):
    """How a reader's scores are mixed with the tiers' (models/wishes/mixing.py)."""

    weight: Annotated[float, Field(ge=0, le=_MAX_WEIGHT)] = 1.0
    floor: Annotated[float, Field(gt=0, lt=1)] = 0.1


class _PopularItem(Schema):
    item_id: str
    title: str
    categories: list[str]
    popularity: Finite


class _Adapter(Schema):
    """The version whose decoder an adapter changes."""

    of: Version


class Manifest(Schema):
    """The manifest fields that code reads. Only `files` is required: older bundles lack the other fields."""

    version: Version | None = None
    files: Annotated[dict[_FileName, Sha256], AfterValidator(_files), Field(max_length=_MAX_FILES)]
    dataset: str | None = None
    trained: bool = True
    repeats: bool = False
    depth: Count | None = None
    num_items: Count | None = None
    num_parameters: Count | None = None
    multiply_adds: dict[str, Count] = Field(default_factory=dict)
    metrics: dict[str, _Numbers] = Field(default_factory=dict)
    decoder_ms: _Numbers = Field(default_factory=dict)
    prompt: _Prompt = _Prompt()
    search: _Search | None = None
    imported: _Imported | None = None
    adapter: _Adapter | None = None
    llm_pays: list[tuple[Count, Count | None]] | None = None
    llm_price_ndcg_per_ms: Finite | None = None
    mixer: Annotated[_Mixer, AfterValidator(_mixer)] | None = None
    wishes: _Wishes | None = None
    popular: Annotated[list[_PopularItem], Field(max_length=1_000)] = Field(default_factory=list)
    lists: _Lists | None = None
    serving: _Serving = _Serving()
    lineage: _Lineage = _Lineage()
    data: _Data | None = None
    forced: list[str] | None = None
    withdrawn: str | None = None
    about_reference: str | None = None
    against_live: list[dict[str, Any]] | None = None
    against_reference: list[dict[str, Any]] | None = None
    training: dict[str, Any] = Field(default_factory=dict)


class _Measured(Schema):
    hr_at_10: Annotated[Finite | None, Field(alias="hr@10")] = None
    ndcg_at_10: Annotated[Finite | None, Field(alias="ndcg@10")] = None
    interval: Annotated[tuple[Finite, Finite] | None, Field(alias="ndcg@10_interval")] = None


class _Gain(Schema):
    slice: str | None = None
    history: tuple[Count, Count | None] | None = None
    num_cases: Count = 0
    llm_minus_student: float | None = None
    low: float | None = None
    high: float | None = None


class ManifestReport(Schema):
    """The fields of an evaluation report that code other than its writer reads."""

    dataset: str | None = None
    protocol: str | None = None
    num_test_users: Count | None = None
    student_share: float | None = None
    metrics: dict[str, _Measured] = Field(default_factory=dict)
    gain: list[_Gain] = Field(default_factory=list)


def decode_manifest(content: bytes, version: str, where: str) -> dict[str, Any]:
    """Return the manifest of this version. Raises BundleCorrupt, also for another version's manifest."""
    manifest = decode_plain(content, Manifest, where)
    if (named := manifest.get("version") or version) != version:
        raise BundleCorrupt(f"{where}: version: names {named} instead of {version}")
    return manifest


def parents_of(manifest: Mapping[str, Any]) -> Mapping[str, str | None]:
    """Return, by role, the bundles that a bundle's training started from and was compared with."""
    parents: Mapping[str, str | None] = manifest.get("lineage", {}).get("parents", {})
    return parents
