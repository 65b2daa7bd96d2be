"""An adapter learns on a frozen decoder, is written next to links to it, and continues on the decoder that serves."""

import shutil

import pytest
import torch

from models.catalogue import load_catalogue
from models.decoder.adapter import ADAPTER, read_adapter
from models.decoder.weights import load_decoder
from models.registry.bundle import open_bundle
from models.registry.store import BundleStore
from pipelines.codes.tokenize import items_of
from pipelines.options import PipelineOptions
from pipelines.runner.stage import silent
from pipelines.training.options import AdapterOptions
from pipelines.training.recipes import Recipe
from pipelines.training.start.warm_start import WarmStart
from pipelines.training.train_decoder import train
from services.errors import ConfigError
from tests.unit.pipelines.conftest import CPU, SMALL_DECODER, SMALL_STUDENT, checkpoints_in, ndcg_of

RECIPE = Recipe(train=SMALL_DECODER, distill=SMALL_STUDENT).for_adapter({"max_items": 10, "stride": 5}, 2, 4.0)


@pytest.fixture(scope="module")
def adapted(built, tmp_path_factory):
    """An adapter of rank 2 that was trained on the decoder of the ring, and its base with other weights."""
    base, out = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("adapted")
    shutil.copytree(built.trained.decoder_dir, base / "decoder")
    shutil.copyfile(built.trained.tokenized / "catalogue.parquet", base / "catalogue.parquet")
    train(built.trained.tokenized, RECIPE.train, out, checkpoints_in(out), CPU, silent, WarmStart(base, "parent"))
    return base, out


def test_only_the_adapter_is_learned(built, adapted) -> None:
    """The base's files are linked unchanged; the folder loads as their sum with an adapter of the wanted rank."""
    base, out = adapted
    weights = "model.safetensors"
    assert (base / "decoder" / weights).samefile(out / "decoder" / weights)
    frozen = load_decoder(out / "decoder", torch.float32, CPU, with_adapter=False)
    summed = load_decoder(out / "decoder", torch.float32, CPU)
    adapter = read_adapter(out / "decoder" / ADAPTER, frozen.config)

    assert (adapter.rank, adapter.base) == (2, "parent")
    assert torch.equal(frozen.embedding.weight, summed.embedding.weight)
    for name, pair in adapter.pairs.items():
        assert pair.scale == 2.0
        assert pair.b_NR.any()
        changed, before = summed.get_submodule(name).weight, frozen.get_submodule(name).weight
        torch.testing.assert_close(changed, before + pair.delta_NI)
    assert ndcg_of(out / "decoder", built.trained.tokenized) > 0.5 * ndcg_of(base / "decoder", built.trained.tokenized)


def test_a_published_child_shares_its_parents_files(built, adapted, tmp_path) -> None:
    """The folder store keeps the decoder of parent and child once: the child's files are links to the parent's."""
    base, out = adapted
    store = BundleStore(tmp_path)
    store.publish(base, "parent", {"prompt": {}})
    folder = tmp_path / "child"
    shutil.copytree(out / "decoder", folder / "decoder")
    shutil.copyfile(base / "catalogue.parquet", folder / "catalogue.parquet")
    child = store.publish(folder, "child-1", {"prompt": {}, "adapter": {"of": "parent"}})

    parent = open_bundle(tmp_path / "parent")
    assert (child.path / "decoder/model.safetensors").samefile(parent.path / "decoder/model.safetensors")
    assert not (child.path / "manifest.json").samefile(parent.path / "manifest.json")
    child.verify()


def test_items_of_a_catalogue_make_the_same_catalogue(built) -> None:
    """The items that an adapter's data gets from its parent have the parent's order, titles and categories."""
    catalogue = load_catalogue(built.trained.tokenized / "catalogue.parquet")
    items = items_of(catalogue)

    assert tuple(items.sort("item_id")["item_id"]) == catalogue.item_ids
    assert tuple(items["title"]) == catalogue.titles


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"warm_start": True}, "--warm-start"),
        ({"refit": False}, "--no-refit"),
    ],
)
def test_options_that_an_adapter_does_not_take_are_refused_by_name(options, field) -> None:
    """The error names the option and the way out."""
    with pytest.raises(ConfigError) as caught:
        PipelineOptions(adapter=AdapterOptions(adapter_of="v1"), **options)

    assert str(caught.value).startswith(f"{field}: ")
    assert "; " in str(caught.value)
