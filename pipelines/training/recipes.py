"""The recipes of decoder and student, read from a file and chosen by measures of the data, never by its name.

The shipped file is recipes.toml, which explains its keys.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

from models.catalogue import load_catalogue
from pipelines.codes.embedding import read_texts, share_of_distinct_texts
from pipelines.data.examples import read_sequences, read_split
from pipelines.training.options import DecoderRecipeOptions, RecipeOptions
from pipelines.training.train_decoder import TrainOptions
from pipelines.training.train_student import DistillOptions
from services.errors import ConfigError

_MEASURES = ("events", "items", "mean_length", "events_per_item", "code_depth")
_MIN_OWN_TEXTS = 0.5
SHIPPED = Path(__file__).with_name("recipes.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSize:
    """Measures of the data for the choice of a recipe.

    They are training events, catalogue items, mean events per user, tokens per item, the fraction of items with a
    distinct text, and whether users repeat items.
    """

    events: int
    items: int
    mean_length: float
    code_depth: int = 1
    own_texts: float = 0.0
    repeats: bool = False

    @property
    def events_per_item(self) -> float:
        return self.events / max(1, self.items)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How both models are trained on data whose measures stay within the limits of `at_most`."""

    name: str = "given"
    at_most: Mapping[str, float] = field(default_factory=dict)
    train: TrainOptions = field(default_factory=TrainOptions)
    distill: DistillOptions = field(default_factory=DistillOptions)

    def fits(self, size: DataSize) -> bool:
        return all(getattr(size, measure) <= limit for measure, limit in self.at_most.items())

    def for_repeats(self) -> "Recipe":
        """Return this recipe for users who repeat items: seen items are learned like others."""
        train, distill = replace(self.train, mask_seen=False), replace(self.distill, mask_seen=False)
        return replace(self, train=train, distill=distill)

    def for_adapter(self, prompt: Mapping[str, int], rank: int, alpha: float) -> "Recipe":
        """Return this recipe for an adapter of a decoder with this prompt."""
        plain = replace(self.train, teacher_weight=0.0, text_size=0, text_start="", text_layers=0, use_start=False)
        plain = replace(plain, max_items=prompt["max_items"], stride=prompt["stride"])
        return replace(self, train=replace(plain, adapter_rank=rank, adapter_alpha=alpha))

    def without_text(self) -> "Recipe":
        """Return this recipe for items whose texts do not distinguish them."""
        return replace(self, train=replace(self.train, text_size=0))

    @property
    def prompt(self) -> dict[str, int]:
        """The prompt's shape, as used by models.prompt and kept in the bundle's manifest."""
        return {"max_items": self.train.max_items, "stride": self.train.stride}


def data_size(tokenized: Path) -> DataSize:
    """Measure the training split and the catalogue."""
    lengths = [len(sequence) for sequence in read_sequences(tokenized)]
    catalogue = load_catalogue(tokenized / "catalogue.parquet")
    return DataSize(
        events=sum(lengths),
        items=len(catalogue.item_ids),
        code_depth=catalogue.depth,
        mean_length=sum(lengths) / max(1, len(lengths)),
        own_texts=share_of_distinct_texts(read_texts(tokenized)),
        repeats=read_split(tokenized)["repeats"],
    )


def choose(recipes: Sequence[Recipe], size: DataSize) -> Recipe:
    """Return the first recipe for data of this size; the last recipe has no limits.

    A recipe that learns from text requires that most items have a distinct text; if no other recipe applies, its text
    part is dropped. Seen items are learned if labels repeat.
    """
    fitting = [recipe for recipe in recipes if recipe.fits(size)]
    has_texts = size.own_texts >= _MIN_OWN_TEXTS
    without = fitting[0].without_text()
    recipe = next((recipe for recipe in fitting if has_texts or not recipe.train.text_size), without)
    return recipe.for_repeats() if size.repeats else recipe


def describe(recipe: Recipe, size: DataSize) -> str:
    """Return a sentence on the measures and the choice."""
    texts = f"{size.own_texts:.0%} of items have a text of their own"
    size_of_text = recipe.train.text_size
    learned = f"{size_of_text} numbers of it are learned from" if size_of_text else "not learned from"
    measured = (
        f"{size.events} training events, {size.items} items, "
        f"{size.mean_length:.1f} events a user, {size.events_per_item:.1f} an item"
    )
    first = f"; the decoder begins as {recipe.train.text_start}" if recipe.train.text_start else ""
    return f"recipe {recipe.name}: {measured}; {texts}: {learned}{first}"


def read_recipes(path: Path | None = None, **changes: Any) -> tuple[Recipe, ...]:
    """Read a file of recipes (None: the shipped one), with the `changes` of RecipeOptions. Raises ConfigError."""
    return recipes_of(RecipeOptions(recipes=path, **changes))


def recipes_of(options: DecoderRecipeOptions) -> tuple[Recipe, ...]:
    """Read the recipes that the options name. Raises ConfigError naming the option or key."""
    path = options.recipes or SHIPPED
    student_epochs = options.student_epochs if isinstance(options, RecipeOptions) else None
    try:
        raw = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--recipes: {path} cannot be read as TOML ({error})") from error
    listed = raw.get("recipe")
    if not isinstance(listed, list) or not listed or raw.keys() != {"recipe"}:
        raise ConfigError(f"--recipes: {path} has to hold [[recipe]] tables and nothing else")
    recipes = tuple(_recipe(entry, f"{path}: recipe {number}") for number, entry in enumerate(listed, start=1))
    if recipes[-1].at_most:
        raise ConfigError(
            f"--recipes: {path}: the last recipe has limits, so larger data has none; take out its at_most"
        )
    return tuple(
        replace(
            recipe,
            train=_changed_fit(recipe.train, options.seed, options.epochs),
            distill=_changed_fit(recipe.distill, options.seed, student_epochs),
        )
        for recipe in recipes
    )


def _recipe(entry: Any, where: str) -> Recipe:
    if not isinstance(entry, dict):
        raise ConfigError(f"--recipes: {where} is no table")
    known = {"name", "at_most", "decoder", "student"}
    if entry.keys() - known or not isinstance(entry.get("name"), str):
        raise ConfigError(
            f"--recipes: {where} has the keys {sorted(entry)}; it needs a name and may have {sorted(known)}"
        )
    limits = entry.get("at_most", {})
    if not isinstance(limits, dict) or limits.keys() - set(_MEASURES) or not all(map(_is_number, limits.values())):
        raise ConfigError(f"--recipes: {where}: at_most holds numbers by {', '.join(_MEASURES)}, and not {limits}")
    return Recipe(
        name=entry["name"],
        at_most=limits,
        train=_changed(TrainOptions(), entry.get("decoder", {}), f"{where}: decoder"),
        distill=_changed(DistillOptions(), entry.get("student", {}), f"{where}: student"),
    )


def _changed(default: Any, given: Any, where: str) -> Any:
    """Return these options with the given values, tables within tables. Raises ConfigError naming the key."""
    if not isinstance(given, dict):
        raise ConfigError(f"--recipes: {where} is {given!r}; give a table of {', '.join(asdict(default))}")
    changes = {}
    for key, value in given.items():
        if key not in asdict(default):
            raise ConfigError(f"--recipes: {where}.{key} is not known; give one of {', '.join(asdict(default))}")
        now = getattr(default, key)
        if is_dataclass(now):
            changes[key] = _changed(now, value, f"{where}.{key}")
        elif type(value) is type(now) or (isinstance(now, float) and _is_number(value)):
            changes[key] = value
        else:
            raise ConfigError(f"--recipes: {where}.{key} is {value!r}; give a value such as {now!r}")
    try:
        return replace(default, **changes)
    except ConfigError as error:  # begins with the field
        raise ConfigError(f"--recipes: {where}.{error}") from error


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _changed_fit(options: Any, seed: int, epochs: int | None) -> Any:
    """Return a model's options with this seed, and with these epochs unless None."""
    fit = options.fit if epochs is None else replace(options.fit, epochs=epochs)
    return replace(options, seed=seed, fit=fit)
