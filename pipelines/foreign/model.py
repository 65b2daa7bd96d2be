"""Imports a recommender that was trained elsewhere: checkpoint, items' codes, prompt and search, in one folder.

    decoder/         the checkpoint with its tokenizer
    codes.parquet    item_id and code
    import.json      framework, levels, prompt, search, and measurements

`tailrace pipeline --decoder NAME` uses the folder in place of training.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from tokenizers import Tokenizer

from models.catalogue import Catalogue
from models.decoder.config import DecoderConfig
from models.decoder.weights import load_decoder
from models.errors import CheckpointError
from models.files import scratch_of
from models.prompt import Prompt, prompt_of, text_encoder
from models.search import MAX_CLOSING_TOKENS, Search, search_of
from pipelines.foreign import checkpoint, measure
from pipelines.foreign.examples import EOS, read_examples
from pipelines.foreign.index import ItemIndex, read_index
from pipelines.foreign.options import ImportOptions
from pipelines.foreign.prompts import Derived, Template, compile_template, derive, read_template
from pipelines.foreign.refused import Refused
from pipelines.foreign.tokens import ItemCodeTable, describe_shared, describe_splitting, read_tokenizer, resolve
from services.llm.text.chat_template import load_chat_template, read_tokenizer_config, special_tokens_of

FOLDER = "imported"
ABOUT, _CODES = "import.json", "codes.parquet"
_WIDTHS = {"lc-rec": 20, "openonerec": 32}
_WIDTH = 50
"""Beams of the frameworks' own evaluations."""


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """A finished import."""

    folder: Path
    about: Mapping[str, Any]

    @property
    def decoder_dir(self) -> Path:
        return self.folder / "decoder"

    @property
    def prompt(self) -> Prompt:
        """The prompt, with its encoder if it is a text template."""
        return prompt_of(self.about, self.decoder_dir)

    @property
    def search(self) -> Search:
        return search_of(self.about)

    @property
    def seen_until(self) -> date | None:
        """Date of the newest label that the decoder may have seen; None: unknown."""
        given = self.about["imported"]["seen_until"]
        return None if given is None else date.fromisoformat(given)

    @property
    def seen_until_us(self) -> int:
        """Unix microseconds at the end of that date (UTC)."""
        assert self.seen_until is not None
        end = datetime.combine(self.seen_until + timedelta(days=1), time.min, UTC)
        return int(end.timestamp() * 1e6)

    @property
    def distil_positions(self) -> int:
        """Positions at which the student gets targets. Of a pipeline's import."""
        return int(self.about["distil_positions"])

    def codes(self) -> ItemCodeTable:
        """Read the items' codes."""
        rows = pl.read_parquet(self.folder / _CODES)
        codes = np.array(rows["code"].to_list(), dtype=np.int32)
        return ItemCodeTable(
            tuple(rows["item_id"]), codes, tuple(self.about["level_sizes"]), tuple(self.about["first_tokens"])
        )


def read_imported(root: Path, name: str) -> ImportedModel:
    """Read an import by its name. Raises Refused."""
    path = root / FOLDER / name / ABOUT
    if not path.is_file():
        known = sorted(path.parent.name for path in (root / FOLDER).glob(f"*/{ABOUT}"))
        fix = f"imported are {', '.join(known)}" if known else "run `tailrace import model` first"
        raise Refused("--decoder", "", f"{name!r} is not imported", fix)
    return ImportedModel(path.parent, json.loads(path.read_text()))


def read_about(folder: Path) -> dict[str, Any]:
    """Read the description of an import, or of the stage `import`."""
    about: dict[str, Any] = json.loads((folder / ABOUT).read_text())
    return about


def import_model(options: ImportOptions, root: Path, say: Callable[[str], object] = print) -> ImportedModel:
    """Import a checkpoint into `root`, and report on it in sentences. Raises Refused or CheckpointError."""
    target = root / FOLDER / options.import_name
    scratch = scratch_of(target)
    try:
        about = _write(options, scratch, say)
        (scratch / ABOUT).write_text(json.dumps(about, indent=1))
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(str(scratch / "decoder"), str(options.checkpoint))) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    say(
        f"imported as {options.import_name}; train its student and publish: "
        f"tailrace pipeline --decoder {options.import_name}"
    )
    return ImportedModel(target, about)


def _write(options: ImportOptions, out: Path, say: Callable[[str], object]) -> dict[str, Any]:
    config = checkpoint.copy_checkpoint(options.checkpoint, options.base, out / "decoder")
    tokenizer, index = read_tokenizer(out / "decoder"), read_index(options.index)
    table = resolve(index, tokenizer, config.vocab_size)
    derived, template = _prompt(options, out / "decoder", tokenizer, table)
    close = _close(options, derived, template, tokenizer, out / "decoder")
    scores = options.scores or (template.scores if template and template.scores else "vocabulary")
    width = options.beam_width or (template.beam_width if template else None) or _WIDTHS.get(index.framework, _WIDTH)
    search = Search(beam_width=width, scores=scores, close=close, popular_first=True)  # type: ignore[arg-type]
    _refuse_long(derived.prompt, search, table, config)
    num_parameters = checkpoint.check_loads(out / "decoder")
    sentences = _described(options, index, table, derived.prompt, search, num_parameters)
    for sentence in (*sentences, *describe_splitting(out / "decoder")):
        say(sentence)
    measured = _measured(options, out / "decoder", table, derived, search)
    prompt = derived.prompt
    if measured is not None:
        for sentence in measure.describe(measured):
            say(sentence)
        if template is None or template.stride is None:
            prompt = replace(prompt, stride=measured["stride"])
    rows = {"item_id": list(table.item_ids), "code": table.codes.tolist()}
    pl.DataFrame(rows, schema={"item_id": pl.String, "code": pl.List(pl.Int32)}).write_parquet(out / _CODES)
    return {
        "imported": {
            "framework": index.framework,
            "source_sha256": checkpoint.source_hash(out / "decoder"),
            "seen_until": options.seen_until.isoformat() if options.seen_until else None,
        },
        "level_sizes": list(table.level_sizes),
        "first_tokens": list(table.first_tokens or ()),
        "prompt": prompt.record(),
        "search": search.record(),
        "num_parameters": num_parameters,
        "measured": measured,
        "stride_given": template is not None and template.stride is not None,
    }


def _prompt(
    options: ImportOptions, decoder_dir: Path, tokenizer: Tokenizer, table: ItemCodeTable
) -> tuple[Derived, Template | None]:
    chat = load_chat_template(decoder_dir)
    if options.examples is not None:
        named = special_tokens_of(read_tokenizer_config(decoder_dir)).get("bos_token", "")
        bos = tokenizer.token_to_id(named) if named else None
        return derive(read_examples(options.examples, chat), tokenizer, table, options.examples.name, bos=bos), None
    assert options.prompt is not None
    template = read_template(options.prompt, chat)
    derived = compile_template(template, tokenizer, table, options.prompt.name)
    if derived.prompt.text is not None:
        encoder, name_of = text_encoder(decoder_dir)
        derived = replace(derived, prompt=replace(derived.prompt, encoder=encoder, name_of=name_of))
    return derived, template


def _close(
    options: ImportOptions, derived: Derived, template: Template | None, tokenizer: Tokenizer, decoder_dir: Path
) -> tuple[int, ...]:
    if not options.count_close or (template is not None and not template.count_close):
        return ()
    eos = special_tokens_of(read_tokenizer_config(decoder_dir)).get("eos_token", "")
    tokens: list[int] = []
    for text in derived.close:
        token_id = tokenizer.token_to_id(eos if text == EOS else text)
        ids = [token_id] if token_id is not None else tokenizer.encode(text, add_special_tokens=False).ids
        if not ids or (text == EOS and token_id is None):
            fix = "name eos_token in tokenizer_config.json, or give --no-count-close"
            raise Refused("tokenizer_config.json", "eos_token", f"{text} not found", fix)
        tokens += ids
    if len(tokens) > MAX_CLOSING_TOKENS:
        problem = f"{len(tokens)} tokens exceed the maximum of {MAX_CLOSING_TOKENS}"
        raise Refused("--prompt", "codes.close", problem, "give fewer closing texts")
    return tuple(tokens)


def _refuse_long(prompt: Prompt, search: Search, table: ItemCodeTable, config: DecoderConfig) -> None:
    depth = len(table.level_sizes)
    longest = prompt.num_tokens(prompt.max_items, depth) + depth + len(search.close) - 1
    if longest > config.max_position_embeddings:
        problem = f"prompts of {longest} tokens, the decoder has {config.max_position_embeddings} positions"
        raise Refused("config.json", "max_position_embeddings", problem, "give a smaller max_items with --prompt")


def _measured(
    options: ImportOptions, decoder_dir: Path, table: ItemCodeTable, derived: Derived, search: Search
) -> dict[str, Any] | None:
    """Compare scores and strides on the examples with a label; None without labels."""
    labels = np.array(derived.labels, dtype=np.int64)
    rows = np.flatnonzero(labels >= 0) if len(labels) else labels
    if not len(rows):
        return None
    cases = measure.Labelled(histories=[derived.histories[row] for row in rows], labels=labels[rows])
    decoder = load_decoder(decoder_dir, torch.float32, "cpu")
    catalogue = catalogue_of(table, np.concatenate(derived.histories))
    return measure.compare(decoder, catalogue, derived.prompt, search, cases.sample(options.max_measured))


def catalogue_of(table: ItemCodeTable, seen: np.ndarray) -> Catalogue:
    """Return a catalogue of these codes, without titles, in the table's order; `seen` are rows of training events."""
    num_items = len(table.item_ids)
    return Catalogue(
        item_ids=table.item_ids,
        titles=("",) * num_items,
        categories=((),) * num_items,
        codes=table.codes,
        level_sizes=table.level_sizes,
        popularity=np.bincount(seen, minlength=num_items).astype(np.float64),
        first_tokens=table.first_tokens,
    )


def _described(
    options: ImportOptions,
    index: ItemIndex,
    table: ItemCodeTable,
    prompt: Prompt,
    search: Search,
    num_parameters: int,
) -> list[str]:
    levels = " x ".join(map(str, table.level_sizes))
    kind = (
        "encoded for each request" if prompt.text is not None else f"{prompt.num_tokens(0, index.depth)} fixed tokens"
    )
    sentences = [
        (
            f"{index.framework}: {num_parameters / 1e6:,.1f} million weights, {len(table.item_ids)} items, "
            f"codes {levels}; {describe_shared(table.codes)}"
        ),
        (
            f"prompt: {kind}, at most {prompt.max_items} items; beams {search.beam_width}, "
            f"scores over the {search.scores}, {len(search.close)} closing tokens"
        ),
        *table.warnings,
    ]
    if unused := checkpoint.unused_settings(options.checkpoint):
        sentences.append(
            f"generation_config.json: {', '.join(unused)} not used in ranking; if your own evaluation did not switch "
            "them off, its lists differ"
        )
    if options.seen_until is None:
        sentences.append(
            "--seen-until is not given: the decoder may have seen its labels, so a measurement cannot route to it"
        )
    return sentences
