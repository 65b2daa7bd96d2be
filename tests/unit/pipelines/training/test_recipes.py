"""Recipes are chosen by the size of the data, and an invalid file is rejected by key."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.training.recipes import DataSize, Recipe, choose, read_recipes
from pipelines.training.train_decoder import TrainOptions
from pipelines.training.train_student import DistillOptions
from services.errors import ConfigError

SMALL = DataSize(events=98_000, items=1_682, mean_length=104.0)
LARGE = DataSize(events=10**7, items=10**6, mean_length=10.0)


def test_the_size_of_the_data_chooses_the_recipe() -> None:
    """A small catalogue gets the defaults and a start from usage; a large catalogue samples items in both models."""
    shipped = read_recipes()

    small, large = choose(shipped, SMALL), choose(shipped, LARGE)

    assert (small.train, small.distill) == (TrainOptions(use_start=True), DistillOptions())
    assert min(large.train.sample_items, large.distill.sample_items) > 0


def test_text_is_learned_from_where_items_have_texts_of_their_own_and_few_events() -> None:
    """Text is used only if most items have their own text and few events."""
    for size in (replace(SMALL, events=20_000), replace(SMALL, events=20_000, mean_length=7.0), LARGE):
        bare, with_texts = choose(read_recipes(), size), choose(read_recipes(), replace(size, own_texts=0.9))
        many = choose(read_recipes(), replace(size, events=100 * size.items, own_texts=0.9))
        assert with_texts.train.text_size > 0
        assert (many.train, many.distill) == (bare.train, bare.distill)
        assert bare.train.text_size == 0


def test_deep_codes_of_short_histories_have_a_teacher() -> None:
    """Short histories with deep codes use a teacher; depth 1 does not."""
    size = replace(SMALL, events=20_000, mean_length=7.0, own_texts=0.9)

    flat, deep = (choose(read_recipes(), replace(size, code_depth=depth)).train.teacher_weight for depth in (1, 3))

    assert flat == 0 < deep


def test_a_recipe_with_text_alone_is_taken_without() -> None:
    """If only a text recipe fits but items have no text, it is used without text."""
    own = Recipe(train=TrainOptions(text_size=32, num_layers=3))

    assert choose([own], SMALL).train == TrainOptions(num_layers=3)
    assert choose([own], replace(SMALL, own_texts=0.9)).train == own.train


def test_seen_items_are_learned_where_users_come_back_to_items() -> None:
    """With repeats, both models learn seen items, and all other options stay the same."""
    without, repeated = choose(read_recipes(), SMALL), choose(read_recipes(), replace(SMALL, repeats=True))

    assert (without.train.mask_seen, without.distill.mask_seen) == (True, True)
    train, distill = (replace(options, mask_seen=False) for options in (without.train, without.distill))
    assert repeated == replace(without, train=train, distill=distill)


def test_epochs_and_seed_change_nothing_else() -> None:
    """The overrides apply to every recipe and leave all other options unchanged."""
    for before, after in zip(read_recipes(), read_recipes(epochs=3, student_epochs=2, seed=7), strict=True):
        train, distill = before.train, before.distill
        assert after.train == replace(train, seed=7, fit=replace(train.fit, epochs=3))
        assert after.distill == replace(distill, seed=7, fit=replace(distill.fit, epochs=2))


def test_a_file_changes_what_it_names(tmp_path: Path) -> None:
    """Nested tables are merged, and integers are accepted for floats."""
    path = tmp_path / "own.toml"
    path.write_text('[[recipe]]\nname = "own"\n[recipe.decoder]\nhidden_size = 128\nfit.descent.learning_rate = 1\n')

    (own,) = read_recipes(path)

    assert own.train.hidden_size == 128
    assert own.train.fit == replace(TrainOptions().fit, descent=replace(TrainOptions().fit.descent, learning_rate=1))


NAMED = '[[recipe]]\nname = "a"'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("recipe = 3", "[[recipe]] tables and nothing else"),
        ("[[recipe]]", "needs a name"),
        (f"{NAMED}\nat_most = {{ items = 9 }}", "the last recipe has limits"),
        (f"{NAMED}\nat_most = {{ users = 9 }}", "at_most holds numbers by events, items, mean_length"),
        (f"{NAMED}\ndecoder.width = 9", "recipe 1: decoder.width is not known; give one of hidden_size"),
        (f'{NAMED}\ndecoder.fit.epochs = "9"', "decoder.fit.epochs is '9'; give a value such as 25"),
        (f"{NAMED}\ndecoder.text_size = -8", "recipe 1: decoder.text_size: -8 is no size; give 0 for none"),
        ("[[recipe", "cannot be read as TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_its_key(text: str, words: str, tmp_path: Path) -> None:
    """The error is raised before training."""
    path = tmp_path / "own.toml"
    path.write_text(text)

    with pytest.raises(ConfigError, match="--recipes") as refused:
        read_recipes(path)

    assert words in str(refused.value)
