"""Each input that cannot be served is refused by file and row before anything is published."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import Qwen2Tokenizer

from models.errors import CheckpointError
from models.prompt import Prompt
from pipelines.declaration import InvalidOption, parsed
from pipelines.foreign.index import read_index
from pipelines.foreign.measure import choose_stride
from pipelines.foreign.model import ImportedModel, catalogue_of, import_model, read_imported
from pipelines.foreign.options import ImportArguments, ImportOptions
from pipelines.foreign.refused import Refused
from pipelines.foreign.stage import judged_labels
from pipelines.foreign.tokens import describe_splitting
from tests.support.foreign.recommenders import Recommender, write_csv_rows, write_recommender


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Recommender:
    """A MiniOneRec folder with test rows."""
    root = tmp_path_factory.mktemp("made")
    made = write_recommender(root, "qwen3", num_items=40)
    write_csv_rows(made, root / "test.csv", 6)
    return made


@dataclass
class Broken:
    """A copy of a folder, to break."""

    made: Recommender
    options: ImportOptions
    root: Path

    @property
    def folder(self) -> Path:
        return self.options.checkpoint

    def edit(self, name: str, **changes: Any) -> None:
        """Change keys of a JSON file of the checkpoint."""
        path = self.folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    def sids(self, change: Callable[[dict[str, list[str]]], object]) -> None:
        """Change the index."""
        sids = json.loads(self.options.index.read_text())
        change(sids)
        self.options.index.write_text(json.dumps(sids))

    def write_prompt(self, text: str) -> None:
        """Use a prompt file instead of examples."""
        path = self.root / "prompt.toml"
        path.write_text(text)
        self.options = replace(self.options, examples=None, prompt=path)


@pytest.fixture
def broken(made: Recommender, tmp_path: Path) -> Broken:
    """A copy that imports as it is."""
    shutil.copytree(made.folder.parent, tmp_path / "source")
    source = tmp_path / "source"
    options = ImportOptions(
        checkpoint=source / "model",
        index=source / made.index.name,
        examples=source / "test.csv",
        name="toys",
        max_measured=2,
    )
    return Broken(made, options, tmp_path)


def no_weights(broken: Broken) -> None:
    (broken.folder / "model.safetensors").rename(broken.folder / "pytorch_model.bin")


def an_extra_head(broken: Broken) -> None:
    """Add a head that ranks candidates."""
    path = broken.folder / "model.safetensors"
    save_file(load_file(path) | {"ctr_head.weight": torch.zeros(1, 4)}, path)


def a_pickled_index(broken: Broken) -> None:
    broken.options = replace(broken.options, index=broken.options.index.rename(broken.root / "item-sid-mapping.pt"))


def a_row_of_another_format(broken: Broken) -> None:
    """Give two rows of different text."""
    rows = [{"prompt": f"seen: {broken.made.text_of(0)} next:"}, {"prompt": f"saw: {broken.made.text_of(1)} next:"}]
    path = broken.root / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    broken.options = replace(broken.options, examples=path)


def a_slow_tokenizer(broken: Broken) -> None:
    """Keep the SentencePiece model only."""
    (broken.folder / "tokenizer.json").rename(broken.folder / "tokenizer.model")


def an_adapter_without_its_base(broken: Broken) -> None:
    """Name a base that is not a folder."""
    (broken.folder / "model.safetensors").unlink()
    (broken.folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen2.5-0.5B"}))


def a_joining_token(broken: Broken) -> None:
    """Let a SID token join the blanks before it."""
    path = broken.folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    next(token for token in raw["added_tokens"] if token["content"] == broken.made.sids["i000"][0])["lstrip"] = True
    path.write_text(json.dumps(raw))


def an_adapter(broken: Broken, **about: Any) -> Path:
    """Import an adapter of the checkpoint, without weights."""
    adapter = broken.root / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": str(broken.folder), **about}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    broken.options = replace(broken.options, checkpoint=adapter)
    return adapter


def an_adapter_of(broken: Broken, module: str, size: int = 64, kind: str = "lora_{}.weight") -> None:
    """Import an adapter of one module."""
    names = [f"base_model.model.{module}.{kind.format(side)}" for side in "AB"]
    tensors = dict(zip(names, (torch.zeros(2, size), torch.zeros(size, 2)), strict=True))
    save_file(tensors, an_adapter(broken) / "adapter_model.safetensors")


def codes_without_tokens(broken: Broken) -> None:
    """Give code numbers of a framework whose tokens the checkpoint lacks."""
    broken.options.index.write_text(json.dumps({"7": [900, 901, 902]}))


def a_history_of_another_training(broken: Broken) -> None:
    """Remove the items of one code, which the first row's history has."""
    code = broken.made.sids[broken.made.item_ids[0]]
    text = "".join(code)
    assert broken.options.examples is not None
    broken.options.examples.write_text(f"history_item_sid,item_sid\n\"['{text}']\",{text}\n")
    broken.sids(lambda sids: [sids.pop(item_id) for item_id, sid in list(sids.items()) if sid == code])


def a_missing_shard(broken: Broken) -> None:
    """Name a shard that was not copied."""
    (broken.folder / "model.safetensors").rename(broken.folder / "model-00001-of-00002.safetensors")
    shards = {f"tensor{number}": f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    (broken.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))


def a_broken_link(broken: Broken) -> None:
    """Link to a blob that was removed."""
    (broken.folder / "model.safetensors").unlink()
    (broken.folder / "model.safetensors").symlink_to("../blobs/0123")


def a_wrapped_model(broken: Broken) -> None:
    """Save the model from within torch.compile's wrapper."""
    path = broken.folder / "model.safetensors"
    save_file({f"_orig_mod.{name}": tensor for name, tensor in load_file(path).items()}, path)


def ordinary_tokens(one: Broken) -> None:
    """Give token ids of the base's vocabulary, which text does not name, and a prompt as text."""
    rows = [{"item_id": row, "token_ids": [300 + row % 8, 320 + row // 8, 340 + row % 3]} for row in range(40)]
    one.options.index.write_text("\n".join(map(json.dumps, rows)))
    one.write_prompt('[prompt]\nuser = "seen {history} next:"\nseparator = ", "\nmax_items = 5')


def move_sid_tokens(broken: Broken, shift: int = 0) -> None:
    """Leave the base's tokenizer.json, and name the SID tokens in added_tokens.json only."""
    path = broken.folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    sids = [token for token in raw["added_tokens"] if not token["special"]]
    path.write_text(json.dumps(raw | {"added_tokens": [token for token in raw["added_tokens"] if token["special"]]}))
    by_name = {token["content"]: token["id"] + shift for token in reversed(sids)}
    (broken.folder / "added_tokens.json").write_text(json.dumps(by_name))


REFUSALS: dict[str, tuple[Callable[[Broken], object], str, str]] = {
    "pickled weights": (no_weights, "pytorch_model.bin", ""),
    "an encoder and decoder": (lambda broken: broken.edit("config.json", model_type="t5"), "config.json", "model_type"),
    "weights as .pt": (
        lambda broken: (broken.folder / "model.safetensors").rename(broken.folder / "model.pt"),
        "model.pt",
        "",
    ),
    "weights of junk": (
        lambda broken: (broken.folder / "model.safetensors").write_bytes(b"junk"),
        "model.safetensors",
        "",
    ),
    "a folder without a config": (lambda broken: (broken.folder / "config.json").unlink(), "config.json", ""),
    "settings that are not JSON": (
        lambda broken: (broken.folder / "generation_config.json").write_text("{"),
        "generation_config.json",
        "",
    ),
    "a tokenizer of junk": (lambda broken: (broken.folder / "tokenizer.json").write_text("{"), "tokenizer.json", ""),
    "no end of text": (
        lambda broken: (broken.folder / "tokenizer_config.json").write_text("{}"),
        "tokenizer_config.json",
        "eos_token",
    ),
    "an adapter's settings that are not JSON": (
        lambda broken: (an_adapter(broken) / "adapter_config.json").write_text("{"),
        "adapter_config.json",
        "",
    ),
    "another kind of adapter": (
        lambda broken: an_adapter(broken, peft_type="IA3"),
        "adapter_config.json",
        "peft_type",
    ),
    "an adapter's pickled weights": (an_adapter, "adapter_model.safetensors", ""),
    "an adapter of embeddings": (
        lambda broken: an_adapter_of(broken, "model.embed_tokens", kind="lora_embedding_{}"),
        "adapter_model.safetensors",
        "module model.embed_tokens",
    ),
    "an adapter of another base": (
        lambda broken: an_adapter_of(broken, "model.layers.7.self_attn.q_proj"),
        "adapter_model.safetensors",
        "module model.layers.7.self_attn.q_proj",
    ),
    "an adapter of another size": (
        lambda broken: an_adapter_of(broken, "model.layers.0.self_attn.q_proj", 32),
        "adapter_model.safetensors",
        "module model.layers.0.self_attn.q_proj",
    ),
    "code numbers without tokens": (codes_without_tokens, "Toys.index.json", ""),
    "a history of another training": (a_history_of_another_training, "test.csv", "row 1"),
    "an unknown family": (lambda broken: broken.edit("config.json", model_type="gpt2"), "config.json", "model_type"),
    "a delta": (lambda broken: (broken.folder / "README.md").write_text("These are delta weights."), "model", ""),
    "an extra head": (an_extra_head, "model.safetensors", "tensor ctr_head.weight"),
    "a wrapped model": (a_wrapped_model, "model.safetensors", "tensor _orig_mod.lm_head.weight"),
    "added tokens with other ids": (
        lambda broken: move_sid_tokens(broken, shift=3),
        "added_tokens.json",
        "token <a_0>",
    ),
    "codes of ordinary tokens by text": (ordinary_tokens, "prompt.toml", "prompt.item"),
    "an adapter without matrices": (
        lambda broken: save_file({}, an_adapter(broken) / "adapter_model.safetensors"),
        "adapter_model.safetensors",
        "",
    ),
    "a shard outside the folder": (
        lambda broken: (
            (broken.folder / "model.safetensors").rename(broken.root / "other.safetensors"),
            (broken.folder / "model.safetensors.index.json").write_text(
                '{"weight_map": {"x": "../../other.safetensors"}}'
            ),
        ),
        "model.safetensors.index.json",
        "weight_map",
    ),
    "an adapter without its base": (an_adapter_without_its_base, "adapter_config.json", "base_model_name_or_path"),
    "a slow tokenizer": (a_slow_tokenizer, "tokenizer.json", ""),
    "a token that joins blanks": (a_joining_token, "tokenizer.json", "token <a_12>"),
    "a pickled index": (a_pickled_index, "item-sid-mapping.pt", ""),
    "a token outside the vocabulary": (
        lambda broken: broken.sids(lambda sids: sids.update(i007=["<a_3>", "<b_1>", "<c_300>"])),
        "Toys.index.json",
        "item i007",
    ),
    "a SID of several tokens": (
        lambda broken: broken.sids(lambda sids: sids.update(i007=["<a_3>", "<b_1>", "[C:5]"])),
        "Toys.index.json",
        "item i007",
    ),
    "an unequal depth": (
        lambda broken: broken.sids(lambda sids: sids.update(i007=["<a_3>", "<b_1>"])),
        "Toys.index.json",
        "item i007",
    ),
    "an empty index": (lambda broken: broken.options.index.write_text("{}"), "Toys.index.json", ""),
    "an item twice": (
        lambda broken: broken.options.index.write_text('{"1": ["<a_1>"], "1": ["<a_2>"]}'),
        "Toys.index.json",
        "item 1",
    ),
    "crowded codes": (
        lambda broken: broken.sids(lambda sids: sids.update({f"x{n}": ["<a_3>", "<b_1>", "<c_1>"] for n in range(70)})),
        "Toys.index.json",
        "",
    ),
    "an example of another format": (a_row_of_another_format, "rows.jsonl", "row 2"),
    "two places for the history": (
        lambda broken: broken.write_prompt('[prompt]\nuser = "{history} and {history}:"'),
        "prompt.toml",
        "prompt.user",
    ),
    "an unknown key of a prompt": (
        lambda broken: broken.write_prompt('[prompt]\nuser = "{history}"\nusr = "x"'),
        "prompt.toml",
        "prompt.usr",
    ),
    "a prompt that is too long": (
        lambda broken: broken.write_prompt('[prompt]\nuser = "{history}:"\nmax_items = 400'),
        "config.json",
        "max_position_embeddings",
    ),
    "settings that are no object": (
        lambda broken: (broken.folder / "generation_config.json").write_text("[]"),
        "generation_config.json",
        "",
    ),
    "a config that is no object": (
        lambda broken: (broken.folder / "config.json").write_text("null"),
        "config.json",
        "",
    ),
    "an index of flags": (
        lambda broken: broken.sids(lambda sids: sids.update({item_id: [True, False, True] for item_id in sids})),
        "Toys.index.json",
        "item i000",
    ),
    "an index nested too deeply": (
        lambda broken: broken.options.index.write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
        "Toys.index.json",
        "",
    ),
    "one item as text and as a floating-point number": (
        lambda broken: broken.options.index.write_text('{"1": ["<a_1>"], "1.0": ["<a_2>"]}'),
        "Toys.index.json",
        "item 1",
    ),
    "weights of a smaller vocabulary": (
        lambda broken: broken.options.index.write_text('{"item_id": "1", "token_ids": [1, 2, 900000]}'),
        "Toys.index.json",
        "item 1",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_an_import_is_refused_by_file_and_row(broken: Broken, name: str) -> None:
    """The error names the file, the row and a fix; no import is written."""
    break_it, file, row = REFUSALS[name]
    break_it(broken)

    with pytest.raises(Refused) as caught:
        import_model(broken.options, broken.root, lambda _: None)

    assert (caught.value.file, caught.value.row) == (file, row)
    assert caught.value.fix
    assert not list((broken.root / "imported").glob("*")), "no folder stays behind"


@pytest.mark.parametrize(
    ("break_it", "problem"), [(a_missing_shard, "model-00002-of-00002.safetensors"), (a_broken_link, "link")]
)
def test_a_folder_that_is_not_whole_is_refused_by_its_own_path(
    broken: Broken, break_it: Callable[[Broken], object], problem: str
) -> None:
    """The error names the caller's file, not the import's own copy of it, and the missing part."""
    break_it(broken)

    with pytest.raises(CheckpointError, match=problem) as caught:
        import_model(broken.options, broken.root, lambda _: None)

    assert str(caught.value).startswith(f"{broken.folder}/model.safetensors")


@pytest.mark.parametrize(
    ("about", "key"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"lora_alpha": "x"}, "lora_alpha"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern"),
        ({"rank_pattern": {"(": 3}}, "rank_pattern"),
    ],
)
def test_an_adapter_whose_sum_would_be_another_is_refused(broken: Broken, about: dict[str, Any], key: str) -> None:
    """PiSSA changed the base too; a factor that is not a number has no sum."""
    an_adapter(broken, **about)

    with pytest.raises(CheckpointError, match=rf"adapter_config.json: {key}: .*; "):
        import_model(broken.options, broken.root, lambda _: None)


def test_an_adapter_of_junk_is_refused_by_its_path(broken: Broken) -> None:
    """A truncated file causes an error with its path, without a traceback."""
    path = an_adapter(broken) / "adapter_model.safetensors"
    path.write_bytes(b"junk")

    with pytest.raises(CheckpointError) as caught:
        import_model(broken.options, broken.root, lambda _: None)

    assert str(caught.value).startswith(f"{path}: ")


@pytest.mark.parametrize("subfolder", ["", "shards/"])
def test_a_merged_checkpoint_of_shards_is_no_adapter(broken: Broken, subfolder: str) -> None:
    """A training that merged its adapter leaves adapter_config.json; shards keep their folder."""
    whole = broken.folder / "model.safetensors"
    shard = broken.folder / subfolder / "model-00001-of-00001.safetensors"
    shard.parent.mkdir(exist_ok=True)
    names = [*load_file(whole)]
    whole.rename(shard)
    index = {"weight_map": dict.fromkeys(names, str(shard.relative_to(broken.folder)))}
    (broken.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (broken.folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen2.5-0.5B"}))

    model = import_model(broken.options, broken.root, lambda _: None)

    assert (model.decoder_dir / shard.relative_to(broken.folder)).read_bytes() == shard.read_bytes()


def test_tokens_beside_the_tokenizer_get_the_ids_of_the_training(broken: Broken) -> None:
    """transformers adds them from added_tokens.json, and the end of text from special_tokens_map.json."""
    whole = import_model(broken.options, broken.root, lambda _: None)
    codes, prompt, search = whole.codes(), whole.prompt, whole.search
    move_sid_tokens(broken)
    broken.edit("tokenizer_config.json", eos_token=None)
    (broken.folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))

    model = import_model(broken.options, broken.root, lambda _: None)

    assert (model.codes().first_tokens, model.prompt, model.search) == (codes.first_tokens, prompt, search)


def test_the_beginning_of_text_precedes_rows_of_minionerec(broken: Broken) -> None:
    """MiniOneRec puts it there itself, also where the tokenizer adds none."""
    head = import_model(broken.options, broken.root, lambda _: None).prompt.head
    broken.edit("tokenizer_config.json", bos_token="<|im_start|>")

    begun = import_model(broken.options, broken.root, lambda _: None).prompt.head

    bos = Tokenizer.from_file(str(broken.folder / "tokenizer.json")).token_to_id("<|im_start|>")
    assert begun == (bos, *head)


@pytest.mark.parametrize("inner", ["snapshots/0123", "checkpoint-500"])
def test_a_folder_above_the_checkpoint_is_refused_with_the_checkpoint(broken: Broken, inner: str) -> None:
    """The hub's cache and a training keep checkpoints one or two folders below; the fix names the newest."""
    above = broken.root / "above"
    shutil.copytree(broken.folder, above / inner)

    with pytest.raises(Refused) as caught:
        import_model(replace(broken.options, checkpoint=above), broken.root, lambda _: None)

    assert caught.value.fix == f"give {above / inner}"


def test_an_import_survives_the_next_training_of_its_folder(broken: Broken) -> None:
    """A training overwrites its checkpoint in place; the import keeps the weights that it checked."""
    model = import_model(broken.options, broken.root, lambda _: None)
    weights = model.decoder_dir / "model.safetensors"
    before = weights.read_bytes()
    with (broken.folder / "model.safetensors").open("r+b") as file:
        file.truncate(100)

    assert weights.read_bytes() == before


def test_ids_and_text_are_read_as_in_tables(broken: Broken) -> None:
    """A byte order mark is not part of the text, and a data frame's 7.0 is the item 7 of events and items."""
    rows = [{"item_id": float(row), "tokens": sid} for row, sid in enumerate(broken.made.sids.values())]
    broken.options.index.write_text("\ufeff" + "\r\n".join(map(json.dumps, rows)))

    assert [*read_index(broken.options.index).sids][:3] == ["0", "1", "2"]


def test_the_nearest_token_is_named(broken: Broken) -> None:
    """An index of another training differs in a few tokens; the fix names a token of this checkpoint."""
    broken.sids(lambda sids: sids.update(i007=["<a_3>", "<b_1>", "<c_155>"]))

    with pytest.raises(Refused) as caught:
        import_model(broken.options, broken.root, lambda _: None)

    assert "<c_15>" in caught.value.fix


def test_sampling_settings_are_reported_and_not_used(broken: Broken) -> None:
    """generation_config.json of an Instruct base is named in the report."""
    sentences: list[str] = []
    model = import_model(broken.options, broken.root, sentences.append)

    assert any("repetition_penalty 1.05" in sentence for sentence in sentences)
    assert read_imported(broken.root, "toys").prompt == model.prompt
    with pytest.raises(Refused):
        read_imported(broken.root, "others")


def test_a_tokenizer_that_transformers_reads_otherwise_is_reported(broken: Broken) -> None:
    """The checkpoint's own split of blanks is not Qwen's, which AutoTokenizer takes for this family."""
    sentences: list[str] = []
    import_model(broken.options, broken.root, sentences.append)
    path = broken.folder / "tokenizer.json"
    Qwen2Tokenizer().save_pretrained(broken.root / "qwen")
    raw, qwen = (json.loads((where / "tokenizer.json").read_text()) for where in (broken.folder, broken.root / "qwen"))
    path.write_text(json.dumps(raw | {"pre_tokenizer": qwen["pre_tokenizer"]}))

    assert any("AutoTokenizer" in sentence for sentence in sentences)
    assert describe_splitting(broken.folder) == []


def test_an_adapter_is_folded_into_its_base(broken: Broken) -> None:
    """The import of base + adapter has the sum of both weights: W + (alpha / r) B A."""
    adapter, name = broken.root / "adapter", "model.layers.0.self_attn.q_proj"
    adapter.mkdir()
    about = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "base_model_name_or_path": str(broken.folder)}
    (adapter / "adapter_config.json").write_text(json.dumps(about))
    draw = torch.Generator().manual_seed(0)
    low, high = torch.randn(2, 64, generator=draw), torch.randn(64, 2, generator=draw)
    save_file(
        {f"base_model.model.{name}.lora_A.weight": low, f"base_model.model.{name}.lora_B.weight": high},
        adapter / "adapter_model.safetensors",
    )
    model = import_model(replace(broken.options, checkpoint=adapter), broken.root, lambda _: None)

    before = load_file(broken.folder / "model.safetensors")[f"{name}.weight"]
    weight = load_file(model.decoder_dir / "model.safetensors")[f"{name}.weight"]
    torch.testing.assert_close(weight, before + 3.0 * high @ low)


def test_a_prompt_with_titles_is_encoded_for_each_request(broken: Broken) -> None:
    """Titles merge with the text around them, so the whole text is encoded, as its framework does."""
    broken.write_prompt(
        '[prompt]\nuser = "seen {history} next:"\nitem = "{code} {title}"\nseparator = ", "\nmax_items = 5\n'
    )
    model = import_model(broken.options, broken.root, lambda _: None)
    catalogue = replace(catalogue_of(model.codes(), np.zeros(0, int)), titles=("a red lamp",) * 40)

    text = "seen " + ", ".join(f"{broken.made.text_of(row)} a red lamp" for row in (3, 4)) + " next:"
    expected = Tokenizer.from_file(str(broken.folder / "tokenizer.json")).encode(text).ids
    assert model.prompt.tokens(catalogue, [3, 4]) == expected
    assert len(expected) <= model.prompt.num_tokens(2, 3)


LAYOUTS: dict[str, tuple[str, object, str, tuple[Any, ...]]] = {
    "minionerec": ("Toys.index.json", {"7": ["<a_3>", "<b_9>", "<c_5>"]}, "minionerec", ("<a_3>", "<b_9>", "<c_5>")),
    "lc-rec": (
        "Games.index.json",
        {"7": ["<a_3>", "<b_9>", "<c_5>", "<d_2>"]},
        "lc-rec",
        ("<a_3>", "<b_9>", "<c_5>", "<d_2>"),
    ),
    "mimigenrec": ("id2sid.json", {"7": ["<a_3>", "<b_9>", "<c_5>"]}, "mimigenrec", ("<a_3>", "<b_9>", "<c_5>")),
    "text sids": ("sids.json", {"7": "<a_3><b_9><c_5>"}, "minionerec", ("<a_3>", "<b_9>", "<c_5>")),
    "openonerec": (
        "sid2pid.json",
        {str(3 * 8192**2 + 9 * 8192 + 5): [{"pid": 7, "count": 4}]},
        "openonerec",
        (3, 9, 5),
    ),
    "nvidia": ("map.jsonl", [{"item_id": "7", "token_ids": [100, 200, 300]}], "nvidia-sid-gr", (100, 200, 300)),
    "plain": ("items.jsonl", [{"item_id": 7, "sid": "<a_3><b_9>"}], "jsonl", ("<a_3>", "<b_9>")),
    "numbers": ("items.jsonl", [{"item_id": 7, "codes": [3, 9, 5]}], "jsonl", (3, 9, 5)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_recognised_by_itself(name: str, tmp_path: Path) -> None:
    """Names and content of the file tell the framework."""
    file, content, framework, sid = LAYOUTS[name]
    lines = [json.dumps(row) for row in content] if isinstance(content, list) else [json.dumps(content)]
    (tmp_path / file).write_text("\n".join(lines))

    index = read_index(tmp_path / file)

    assert (index.framework, index.sids["7"]) == (framework, sid)


def test_tables_of_two_frameworks_are_recognised(tmp_path: Path) -> None:
    """OpenOneRec's pid2sid and TorchEasyRec's newest generation are Parquet."""
    pl.DataFrame({"pid": [7], "sid": [[3, 9, 5]]}).write_parquet(tmp_path / "video_pid2sid.parquet")
    for generation, code in (("g1", [0, 0]), ("g2", [3, 9])):
        folder = tmp_path / "bundle" / generation
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"codebook": [256, 256], "capacity": 4}))
        pl.DataFrame({"item_id": [7], "codebook": [code], "index": [0]}).write_parquet(folder / "item_to_sid.parquet")

    assert read_index(tmp_path / "video_pid2sid.parquet").sids == {"7": (3, 9, 5)}
    index = read_index(tmp_path / "bundle")
    assert (index.framework, index.sids, index.sizes) == ("torcheasyrec", {"7": (3, 9)}, (256, 256))


@pytest.mark.parametrize(
    ("ndcg", "stride"),
    [({1: 0.2, 2: 0.2, 5: 0.199, 10: 0.197}, 5), ({1: 0.2, 2: 0.19}, 1), ({1: 0.2, 2: 0.1, 5: 0.2}, 5)],
)
def test_the_largest_stride_under_one_percent_of_loss_is_chosen(ndcg: dict[int, float], stride: int) -> None:
    """A larger stride keeps the prefix cache longer."""
    assert choose_stride(ndcg) == stride


def test_only_labels_after_the_date_are_judged() -> None:
    """Without a date no label of an imported decoder is judged."""
    day_us = 86_400 * 10**6
    labels = np.array([0, day_us - 1, day_us], dtype=np.int64)
    about = {"imported": {"seen_until": "1970-01-01"}}

    assert judged_labels(ImportedModel(Path(), about), labels, 3).tolist() == [False, False, True]
    unknown = {"imported": {"seen_until": None}}
    assert not judged_labels(ImportedModel(Path(), unknown), labels, 3).any()
    assert ImportedModel(Path(), about).seen_until == date(1970, 1, 1)


def test_the_manifest_keeps_prompt_and_our_own_stays_two_numbers() -> None:
    """Bundles of our own decoder have the manifest that they had."""
    assert Prompt(7, 3).record() == {"max_items": 7, "stride": 3}
    assert Prompt(7, 3, (5,), (6,), (8,)).record()["between"] == [6]


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--beam-width", "0"], "--beam-width"),
        (["--scores", "items"], "--scores"),
        (["--seen-until", "2026-02-30"], "--seen-until"),
    ],
)
def test_an_option_beyond_its_bounds_is_named(words: list[str], field: str) -> None:
    """The command's declared options name the wrong value's option."""
    given = ["--index", "x.json", "--examples", "test.csv", *words]

    with pytest.raises(InvalidOption) as refused:
        parsed(ImportArguments, None, given).of(Path("model"))

    assert refused.value.field == field
