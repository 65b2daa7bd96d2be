"""Parsers of untrusted bytes raise only Tailrace errors.

Run with `pytest tests/unit/test_foreign_bytes.py`. `-m grid` tries 3,000 inputs per parser, or the number given with
`--foreign-inputs`; 100,000 take a quarter of an hour.
"""

import json
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import gguf
import msgspec
import numpy as np
import psutil
import pyarrow as pa
import pytest
import torch
from google.protobuf.json_format import ParseDict
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from infra.cli.bundles import bundle_row
from infra.cli.release import report_table
from models.decoder.config import read_config
from models.decoder.gguf import convert_gguf
from models.decoder.weights import load_decoder
from models.mixer import mixer_of
from models.prompt import prompt_of
from models.registry.bundle import Bundle, learned_repeats, lists_version, llm_pays
from models.registry.bundle_diff import compare
from models.registry.canary import Canary, CanaryStage
from models.registry.name_record import Move, NameRecord, ReferenceVersion, decode_record
from models.registry.release_report import GuardReport, ReleaseReport
from models.registry.store import BundleStore
from models.registry.withdrawals import Withdrawal
from models.search import search_of
from models.similar import SimilarTable
from services.contracts import message
from services.contracts import recommend_pb2 as pb
from services.contracts.access import ANYONE
from services.contracts.explanation import whose
from services.contracts.items import PutItemsBody, decode_item, item_from
from services.contracts.message import convert, decode_object
from services.contracts.text import ChatMessage
from services.errors import TailraceError
from services.features.page_key import FilePageKey
from services.features.schema import LogPosition
from services.gateway.access.keys import read_keys
from services.gateway.call.path import WITH_PARAMETER, check_path, parameters_of, pattern_of
from services.gateway.console.messages import DrillFields, SurfaceFields
from services.gateway.console.releases import describe_name
from services.gateway.events.record import check_events
from services.gateway.grpc import items as rpc_items
from services.gateway.grpc import schema as rpc
from services.gateway.openai.parse import CallContext, parse_chat, parse_completion
from services.gateway.request.pages import Pages, decode_marks
from services.gateway.rest import schema as rest
from services.gateway.surfaces.editor import FORM_RULES, SurfacesEditor
from services.gateway.surfaces.surfaces import Surfaces
from services.gateway.text.tier import TextLimits
from services.items.live_items import LiveItems
from services.items.snapshot import Positions, read_snapshot, write_snapshot
from services.llm.text.chat_template import load_chat_template
from services.llm.text.guided_decoding import JsonGuide
from services.llm.text.tokenizer import TextTokenizer
from services.settings.topic_reader import Mark
from services.stream.decode import Record, decode, read_impression
from services.stream.impressions.memory import remember
from services.stream.log.kinds import IMPRESSIONS, INTERACTIONS
from tests.support.engine.checkpoints import EOS_ID, TEMPLATE, build_tokenizer, write_checkpoint
from tests.support.foreign_bytes import ODD_VALUES, Maker, json_of, mutations_of

FEW, MANY = 60, 3_000
MOST_SEEDS = 100
MAX_BYTES = 2**20
NOW_MS = 1_800_000_000_000

EVENT = {"event_id": "e", "user_id": "u", "item_id": "i", "event_time_ms": NOW_MS, "event_type": "click", "value": 1.0}
ASKED = {
    "user_id": "u",
    "k": 3,
    "recent_item_ids": ["a", "b"],
    "exclude_item_ids": ["c"],
    "exclude_seen": True,
    "filters": {"categories": ["x"], "allowed_item_ids": ["y"]},
    "deadline_ms": 200,
    "request_id": "r",
    "rationale": True,
}
CLAUSE = {"key": "price", "range": {"gte": 1.0, "lt": 2.5}}
NESTED: dict[str, Any] = {
    "must": [
        CLAUSE,
        {"should": [{"key": "brand", "in": ["a", 2.0, True]}, {"must_not": [{"key": "new", "eq": True}]}]},
    ],
    "must_not": [{"key": "item_id", "exists": True}],
}
RULED: dict[str, Any] = {
    "user_id": "u",
    "filters": NESTED,
    "rules": {
        "boosts": [{"where": NESTED, "factor": 2.0}],
        "pins": [{"item_id": "a", "position": 1}],
        "blocks": [CLAUSE],
        "caps": [{"attribute": "brand", "most": 2}],
        "diversity": 0.5,
        "freshness": {"half_life_h": 2.0, "factor": 3.0},
    },
}
PUT_ITEM: dict[str, Any] = {
    "title": "t",
    "categories": ["a"],
    "attributes": {"x": ["s"], "y": 1.5, "z": True},
    "published_ms": NOW_MS,
}
PUT: dict[str, Any] = {"items": [{"item_id": "a", **PUT_ITEM}, {"item_id": "b", "available": False, "value": 2.0}]}
PATCHED: dict[str, Any] = {
    "changes": {"item_id": "a", "title": "t", "attributes": {"x": {"texts": {"texts": ["s"]}}, "y": {"number": 1.5}}},
    "clear": ["value", "attributes", "attributes.z"],
}
FORM: dict[str, Any] = {
    "k": 3,
    "deadline_ms": 50,
    "tiers": ["student"],
    **{name: RULED["rules"][name] for name in FORM_RULES},
}
CART = "[cart]\nk = 4 # four\n[cart.rules]\ncaps = [{ attribute = 'a', most = 2 }]\n"
PATHS = (
    *tuple(f"{prefix}a%2Fb" for prefix in WITH_PARAMETER),
    "/v1/items/a%20b/similar",
    "/console/names/n/versions/v:stop",
    "/v1/events",
)
PATTERNS = [
    pattern_of(template)
    for template in ("/v1/items/{a}/similar", "/v1/users/{a}", "/console/names/{a}/versions/{b}:stop")
]
SAMPLED = {
    "model": "m",
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.9,
    "n": 2,
    "stop": ["x"],
    "seed": 1,
    "stream": True,
    "logit_bias": {"1": 2.0},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    "stream_options": {"include_usage": True},
    "logprobs": None,
    "min_p": 0.1,
    "stop_token_ids": [1],
    "tools": None,
}
ERASURE = {"erasure_id": "x", "user_id": "u", "accepted_time_ms": NOW_MS}
IMPRESSION = {
    "request_id": "r",
    "user_id": "u",
    "shown_time_ms": NOW_MS,
    "item_ids": ["a", "b"],
    "tier": "llm",
    "reason": "x",
    "bundle_version": "v",
    "history_len": 3,
    "history_digest": "d",
    "newest_event_time_ms": 5,
    "deadline_ms": 200,
    "features_as_of_us": 7,
    "positions": [1, 2],
    "scores": [0.5, 0.25],
    "propensity": [1.0, 0.5],
    "elapsed_ms": 3.5,
}
ITEM = {
    "title": "A",
    "categories": ["x"],
    "available": False,
    "published_ms": NOW_MS,
    "expires_ms": NOW_MS,
    "value": 2.5,
    "attributes": {"colour": ["red", "blue"], "price": 2.5, "sale": True},
}
COMPLETION = {**SAMPLED, "prompt": ["a", "b"], "echo": False}
CHAT = {**SAMPLED, "messages": [{"role": "user", "content": "hi"}], "top_logprobs": 2, "chat_template_kwargs": {"x": 1}}
KEY = {"id": "shop", "hashes": [{"sha256": "0" * 64, "expires_at": None}], "scopes": ["events"], "priority": "high"}
KEYS = {"keys": [{**KEY, "rate_per_s": 5, "burst": 9, "daily_quota": 7, "max_k": 5}]}
CONTEXT = CallContext(request_id="r", caller=ANYONE, deadline_unix_s=NOW_MS / 1_000, limits=TextLimits())
MESSAGES = (ChatMessage(role="user", content="hi"), ChatMessage(role="assistant", content="ho"))
TEMPLATES = (
    TEMPLATE,
    (
        "{% for m in messages[::-1] %}{{ loop.index0 * 2 }}{{ m.content | trim | upper }}{% endfor %}{{ "
        "strftime_now('%Y') }}"
    ),
    (
        "{% set ns = namespace(n=0) %}{% macro f(x) %}{{ x | tojson(indent=2) }}{% endmacro %}{{ f(messages) }}{{ "
        "ns.n + 1 }}"
    ),
)


def stream_row(value: bytes) -> None:
    """Decode a record like the stream worker: an event, an erasure or a dead letter that fits the log's columns."""
    decoded = decode([Record(LogPosition("t", 0, 1), b"u", value, NOW_MS)], 1, NOW_MS)
    assert len(decoded.events) + len(decoded.erasures) + len(decoded.dead) == 1
    INTERACTIONS.table(decoded.events)
    pa.array([logged.erasure.accepted_time_ms for logged in decoded.erasures], pa.int64())


def impression_row(value: bytes) -> None:
    """Process a record like the impressions worker."""
    logged = read_impression(Record(LogPosition("t", 0, 1), b"u", value, NOW_MS), NOW_MS)
    IMPRESSIONS.table([logged])
    remember(None, [logged])


def item_record(value: bytes) -> None:
    """Apply a record of the items topic like every process; the value also serves as a key."""
    for key in (b"i", value):
        with suppress(TailraceError):
            LiveItems().apply([decode_item(key, value)])


def snapshot_document(folder: Path) -> bytes:
    """Return a snapshot of three items."""
    items, path = LiveItems(), folder / "whole.parquet"
    items.apply((f"i{number}", decode_item(b"i", json.dumps(ITEM).encode())[1]) for number in range(3))
    write_snapshot(path, items, Positions("t", {0: Mark(3, 1, (2, "d"))}))
    return path.read_bytes()


def put_items(drafts: list[tuple[str, Mapping[str, Any]]]) -> None:
    """Validate a batch of items like the APIs; single items may be rejected."""
    for item_id, draft in drafts:
        with suppress(TailraceError):
            item_from(item_id, draft).encode()


def patch_item(body: bytes) -> None:
    """Parse and apply a patch like the gRPC API."""
    _, changes = rpc_items.parse_patch(body, MAX_BYTES)
    item_from("a", ITEM).patched(changes)


def path(sent: bytes) -> None:
    """Check and match a path like the HTTP APIs."""
    check_path(sent)
    for pattern in PATTERNS:
        if (match := pattern.fullmatch(sent)) is not None:
            assert all(parameters_of(match).values())


def page_token(body: bytes) -> None:
    """Read a page token like a gateway, under a fixed key."""
    PAGES._key = b"k"
    PAGES._read(body.decode(errors="replace"), b"u")
    content = body[7:]
    decode_marks(content, len(content) % 400)


def console_form(body: bytes) -> None:
    EDITOR.with_fields(
        CART, "cart", convert(SurfaceFields, {"text": "", "surface": "cart", "fields": decode_object(body)}).fields
    )


EDITOR = SurfacesEditor(Surfaces(None))


class _Nothing:
    """A bundle source that loads no bundle."""

    def before_swap(self, _prepare: object) -> None:
        """Do nothing: no bundle is ever swapped."""


PAGES = Pages(_Nothing(), FilePageKey(b"k"), lambda: NOW_MS / 1_000)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Parser:
    """A parser of bytes, or of a file if `file` is set, with a factory of its inputs."""

    parse: Callable[[Any], object]
    inputs: Callable[[Path], Maker]
    file: str = ""


def chat_template(path: Path) -> None:
    """Load and render a template."""
    template = load_chat_template(path.parent)
    if template is not None:
        template.render(MESSAGES)


def gguf_document(folder: Path) -> bytes:
    """Return a small GGUF file."""
    path = folder / "whole.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_types([1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_float32("llama.rope.scaling.factor", 2.0)
    writer.add_string("llama.rope.scaling.type", "yarn")
    writer.add_float32("llama.rope.scaling.attn_factor", 1.0)
    writer.add_uint32("llama.rope.scaling.original_context_length", 32)
    writer.add_tensor("token_embd.weight", np.zeros((3, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def weights_document(folder: Path) -> bytes:
    """Return a small decoder's weights; its config stays in the folder of the parsed file."""
    return (write_checkpoint(folder) / "model.safetensors").read_bytes()


def manifest_document(folder: Path) -> dict[str, Any]:
    """Return a bundle's manifest; the bundle stays in the folder of the parsed file."""
    (folder / "source").mkdir()
    (folder / "source" / "catalogue.parquet").write_text("x")
    bundle = BundleStore(folder / "bundles").publish(folder / "source", "v1", ABOUT)
    manifest: dict[str, Any] = json.loads((bundle.path / "manifest.json").read_text())
    return manifest


class _Tables(dict[str, SimilarTable]):
    """A table of two items for every name."""

    def __missing__(self, name: str) -> SimilarTable:
        return SimilarTable(np.array([[1], [0]], dtype=np.int32), np.ones((2, 1), dtype=np.float16))


def manifest(path: Path) -> None:
    """Read a manifest like gateways, pipeline runs and commands."""
    store = BundleStore(path.parents[1])
    if path.stat().st_size % 50 == 0:  # only for some inputs, since these calls are slow
        store.reference()
        store.prune(3)
    bundle = store.open("v1")
    compare(bundle, bundle)
    prompt_of(bundle.manifest).window(1_000)
    search_of(bundle.manifest)
    for about in (bundle.manifest, {}):
        llm_pays(about, 7), lists_version(about, "v1"), learned_repeats(about)
        if (mixer := mixer_of(about, _Tables())) is not None:
            mixer.added("student", [0, 1, 1])
    assert bundle.prefix_version
    assert all(
        (bundle.path / name).resolve().is_relative_to(bundle.path.resolve()) for name in bundle.manifest["files"]
    )


def name_record(path: Path) -> None:
    """Read a name's record like gateways and the console."""
    record = BundleStore(path.parents[1]).record()
    json.dumps(describe_name("default", record, NOW_MS), allow_nan=False)
    if record.canary is not None:
        record.canary.takes(0.5, NOW_MS)
    assert decode_record(record.encode(), "again") == record


def release_report(body: bytes) -> None:
    """Show a report like the command and the console."""
    report = ReleaseReport.decode(body.decode(errors="replace"))
    if report is not None:
        json.dumps(asdict(report), allow_nan=False)
        report_table(report)


def bundle_report(path: Path) -> None:
    """List a bundle by its report."""
    report = Bundle("v1", path.parent, {"files": {}}).report()
    bundle_row(report)


ABOUT: dict[str, Any] = {
    "dataset": "toy",
    "trained": True,
    "repeats": False,
    "depth": 1,
    "num_items": 9,
    "num_parameters": 9,
    "prompt": {"max_items": 200, "stride": 50, "head": [1, 2], "between": [], "tail": [3]},
    "search": {"beam_width": 50, "scores": "vocabulary", "close": [4], "popular_first": True},
    "imported": {"framework": "minionerec", "source_sha256": "c0de", "seen_until": None},
    "llm_pays": [[0, 5], [9, None]],
    "llm_price_ndcg_per_ms": 0.1,
    "lists": {"of": "v0", "under": "v1"},
    "mixer": {
        "sources": {"text": {"newest": 5, "decay": 0.5}},
        "blends": {"student": [{"history": [0, None], "weights": {"model": 1.0, "text": 0.1}}]},
    },
    "serving": {"weight_kind": "int8"},
    "metrics": {"decoder": {"ndcg@10": 0.1}},
    "multiply_adds": {"decoder": 9},
    "data": {"num_events": 9, "num_users": 3, "num_items": 9, "oldest_event_us": 1, "newest_event_us": 9},
    "forced": [],
    "lineage": {
        "training": "v0",
        "items_added_to": "v0",
        "parents": {"started_from": None, "compared_with": "v0"},
        "stages": {"tokenize": "k"},
        "data": {"events.parquet": "c0de"},
        "options": {"gate": {"x": 1}},
        "code": "c0de",
    },
}
EVALUATION: dict[str, Any] = {
    "dataset": "toy",
    "protocol": "all items",
    "num_test_users": 3,
    "student_share": 0.9,
    "metrics": {"decoder": {"hr@10": 0.2, "ndcg@10": 0.1, "ndcg@10_interval": [0.0, 0.2]}},
    "gain": [{"slice": "1-5", "history": [1, 5], "num_cases": 3, "llm_minus_student": 0.1, "low": 0.0, "high": 0.2}],
}
LOOKED = ReleaseReport(
    act="stay",
    outcome="continue",
    reason="too few",
    users=(3, 4),
    lists=(5, 6),
    guards=(GuardReport(name="errors", state="open", worse_by=0.1, low=-0.2, high=None, lacks="users"),),
)


RECORD = NameRecord(
    live="v1",
    owner="ann",
    reference=ReferenceVersion(version="v1", by="ann", at="2026-11-24T00:00:00Z"),
    withdrawn={"v2": Withdrawal(version="v2", by="ann", at="2026-11-24T00:00:00Z", reason="", content="c0de")},
    history=(Move(act="promote", version="v1", by="ann", at="2026-11-23T00:00:00Z"),),
    canary=Canary(
        version="v3",
        salt="s",
        stages=(CanaryStage(0.1, 60.0), CanaryStage(1.0, 0.0)),
        by="ann",
        at="now",
        report=LOOKED.encode(),
    ),
)


def of_json(*documents: dict[str, Any]) -> Callable[[Path], Maker]:
    """Return a factory of inputs that mutate these documents, including fields that they lack."""
    names = sorted({name for document in documents for name in document} | {"unknown", "model", "request_id"})
    return lambda _: json_of(names, *documents)


def of_templates(_: Path) -> Maker:
    """Return a factory of tokenizer configs with chat templates, and of arbitrary configs."""
    sources = mutations_of(*(source.encode() for source in TEMPLATES))
    configs = json_of(["chat_template", "eos_token", "bos_token"], {"chat_template": TEMPLATE, "eos_token": "<|end|>"})

    def make(random: Random) -> bytes:
        if random.random() < 0.2:
            return configs(random)
        return json.dumps({"chat_template": sources(random).decode(errors="replace"), "eos_token": "</s>"}).encode()

    return make


SCALINGS = (
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "beta_fast": 8, "rope_theta": 5e5},
    {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
    {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0},
)
WINDOWED = {
    "sliding_window": 4,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "layer_types": ["full_attention"] * 2,
}
FLAGS = {"attention_bias": True, "mlp_bias": False, "tie_word_embeddings": True, "attention_sinks": 1, "num_experts": 0}
SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5, "multipleOf": 0.5},
    {"type": ["integer", "null"], "minimum": 1, "exclusiveMaximum": 9, "enum": [1, 2], "const": 1},
    {"type": "string", "minLength": 1, "maxLength": 3, "pattern": r"^\s[\S]$", "format": "date"},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"], "$defs": {"n": {"type": "null"}}},
    {"type": "object", "patternProperties": {"^a": {}}, "additionalProperties": {"type": "null"}, "minProperties": 1},
    {"type": "array", "items": {"type": "null"}, "prefixItems": [{}], "minItems": 1, "maxItems": 2, "$id": "x"},
    {
        "anyOf": [{"type": "null"}],
        "oneOf": [{"type": "null"}],
        "allOf": [{}],
        "$schema": "https://json-schema.org/draft/2020-12/schema",
    },
)


def of_configs(folder: Path) -> Maker:
    """Return a factory of configs of every model family, with each RoPE scaling under both key names."""
    raw = json.loads((write_checkpoint(folder) / "config.json").read_text())
    documents = [
        {**raw, "model_type": family, "architectures": None, key: scaling, **changes}
        for family in ("llama", "mistral", "qwen2", "qwen3")
        for key in ("rope_parameters", "rope_scaling")
        for scaling in SCALINGS
        for changes in (WINDOWED, FLAGS)
    ]
    return of_json(*documents)(folder)


def of_schemas(_: Path) -> Maker:
    """Return a factory of JSON schemas, nested and with odd values at any depth."""
    names = sorted({name for schema in SCHEMAS for name in schema} | {"exclusiveMinimum", "$ref", "definitions", "not"})

    def make(random: Random) -> bytes:
        schema = json.loads(json.dumps(random.choice(SCHEMAS)))
        for _ in range(random.choice((0, 1, 2, 4))):
            inner = random.choice((random.choice(SCHEMAS), {random.choice(names): random.choice(ODD_VALUES)}))
            keyword = random.choice(("properties", "anyOf", "items", "not", "$defs", "additionalProperties", ""))
            wrapped = {"properties": {"a": inner}, "$defs": {"n": inner}, "anyOf": [inner, schema]}.get(keyword, inner)
            schema = {**schema, **({keyword: wrapped} if keyword else inner)}
        if random.random() < 0.2:
            schema = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
        return json_of(names, schema)(random)

    return make


GUIDE = JsonGuide(TextTokenizer(build_tokenizer()), build_tokenizer().get_vocab_size(), frozenset({EOS_ID}))


def compile_schema(body: bytes) -> None:
    """Compile a schema and take a few of the tokens that it allows."""
    mask = GUIDE.compile(body.decode(errors="replace")).masks(1)[0]
    for _ in range(3):
        allowed = np.flatnonzero(np.unpackbits(mask.allowed().view(np.uint8), bitorder="little"))
        if mask.failure is None and not mask.is_complete:
            mask.take(int(allowed[len(allowed) // 2]))
    mask.violation_of('{"a": 1e5}')


def read(parse: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """Return a parser that skips bodies over the size limit, as the HTTP APIs do."""
    return lambda body: parse(body) if len(body) <= MAX_BYTES else None


PARSERS = {
    "gRPC recommend": Parser(
        lambda body: rpc.parse_recommend(body, MAX_BYTES, "r", None),
        lambda _: mutations_of(pb.RecommendRequest(**ASKED).SerializeToString()),
    ),
    "gRPC events": Parser(
        lambda body: check_events(rpc.parse_events(body, MAX_BYTES, 500), 500, NOW_MS),
        lambda _: mutations_of(pb.RecordEventsRequest(events=[EVENT] * 2).SerializeToString()),
    ),
    "gRPC rules": Parser(
        lambda body: rpc.parse_recommend(body, MAX_BYTES, "r", None),
        lambda _: mutations_of(ParseDict(RULED, pb.RecommendRequest()).SerializeToString()),
    ),
    "gRPC items": Parser(
        lambda body: put_items(rpc_items.parse_put(body, MAX_BYTES)),
        lambda _: mutations_of(
            pb.PutItemsRequest(items=[ParseDict(PATCHED["changes"], pb.CatalogueItem())] * 2).SerializeToString()
        ),
    ),
    "gRPC patch": Parser(
        patch_item, lambda _: mutations_of(ParseDict(PATCHED, pb.PatchItemRequest()).SerializeToString())
    ),
    "REST rules": Parser(
        read(lambda body: rest.parse_recommend(body, "r", None)), of_json(RULED, RULED["rules"], NESTED)
    ),
    "REST batch": Parser(read(lambda body: rest.parse_batch(body, "r", None)), of_json({"requests": [RULED, ASKED]})),
    "REST items": Parser(read(lambda body: put_items(convert(PutItemsBody, decode_object(body)).drafts)), of_json(PUT)),
    "path": Parser(path, lambda _: mutations_of(*(path.encode() for path in PATHS))),
    "page token": Parser(
        page_token, lambda _: mutations_of(b"AgAAAAAAAwECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8", bytes(range(60)))
    ),
    "console form": Parser(read(console_form), of_json(FORM)),
    "REST recommend": Parser(lambda body: rest.parse_recommend(body, "r", None), of_json(ASKED)),
    "REST events": Parser(
        lambda body: check_events(rest.parse_events(body, 500), 500, NOW_MS), of_json(EVENT, {"events": [EVENT]})
    ),
    "OpenAI completion": Parser(lambda body: parse_completion(body, CONTEXT), of_json(COMPLETION)),
    "OpenAI chat": Parser(lambda body: parse_chat(body, CONTEXT), of_json(CHAT)),
    "drills": Parser(lambda body: message.decode(DrillFields, body), of_json({"llm": "off", "features": "on"})),
    "event row": Parser(stream_row, of_json(EVENT, ERASURE)),
    "impression row": Parser(impression_row, of_json(IMPRESSION)),
    "item record": Parser(item_record, of_json(ITEM)),
    "snapshot of items": Parser(
        lambda path: read_snapshot(path, LiveItems()),
        lambda folder: mutations_of(snapshot_document(folder)),
        "snapshot.parquet",
    ),
    "stored explanation": Parser(whose, of_json({"user_id": "u", "at_unix_ms": NOW_MS})),
    "keys file": Parser(read_keys, of_json(KEYS, KEY), "keys.json"),
    "config.json": Parser(
        lambda path: read_config(path.parent),
        of_configs,
        "config.json",
    ),
    "JSON schema": Parser(compile_schema, of_schemas),
    "chat template": Parser(chat_template, of_templates, "tokenizer_config.json"),
    "manifest": Parser(
        manifest,
        lambda folder: json_of(["files", "version", *ABOUT], manifest_document(folder)),
        "bundles/v1/manifest.json",
    ),
    "name record": Parser(
        name_record,
        of_json(json.loads(RECORD.encode())),
        "bundles/names/default.json",
    ),
    "release report": Parser(release_report, of_json(json.loads(LOOKED.encode()))),
    "bundle report": Parser(bundle_report, of_json(EVALUATION), "report.json"),
    "safetensors": Parser(
        lambda path: load_decoder(path.parent, torch.float32, "cpu"),
        lambda folder: mutations_of(weights_document(folder)[:3_000], weights_document(folder)),
        "model.safetensors",
    ),
    "GGUF": Parser(
        lambda path: convert_gguf(path, path.parent / "out", lambda _done, _total: None),
        lambda folder: mutations_of(gguf_document(folder)),
        "m.gguf",
    ),
}


@pytest.mark.parametrize("num_inputs", [FEW, pytest.param(MANY, marks=[pytest.mark.grid, pytest.mark.timeout(7_200)])])
@pytest.mark.parametrize("name", PARSERS)
def test_whatever_comes_in_only_our_errors_come_out(
    name: str, num_inputs: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A parser reads mutated or random bytes, or raises a TailraceError that a door can write."""
    parser = PARSERS[name]
    make = parser.inputs(tmp_path)
    wanted = request.config.getoption("--foreign-inputs") if num_inputs == MANY else None
    num_seeds = min(wanted or num_inputs, MOST_SEEDS)
    path = tmp_path / parser.file
    path.parent.mkdir(parents=True, exist_ok=True)

    @settings(max_examples=num_seeds, database=None, phases=[Phase.generate])
    @given(seed=st.integers(0, 2**63))
    def check(seed: int) -> None:
        """Parse several inputs of one seed: a Hypothesis example costs more than most parsers."""
        random = Random(seed)
        for _ in range(-(-(wanted or num_inputs) // num_seeds)):
            content = make(random)
            if parser.file:
                path.write_bytes(content)
            try:
                parse_or_refuse(parser, path if parser.file else content)
            except BaseException as error:
                error.add_note(f"input: {content[:5_000]!r}")
                raise

    with at_most_more(2**31):
        check()


def parse_or_refuse(parser: Parser, content: Any) -> None:
    """Parse, or encode the error's words as a door does."""
    try:
        parser.parse(content)
    except TailraceError as error:
        msgspec.json.encode((error.problem, error.field, error.fix))


@contextmanager
def at_most_more(num_bytes: int) -> Iterator[None]:
    """Limit the process to this much more address space, so an excessive allocation raises MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
