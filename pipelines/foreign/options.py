"""The options of an import, and of a pipeline run on imported codes or an imported decoder. Imports no torch."""

from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path
from typing import Annotated, get_args

from models.search import MAX_BEAM_WIDTH, Scores
from pipelines.declaration import InvalidOption, Option, check_bounds
from pipelines.foreign.refused import Refused
from services.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignOptions:
    """Imported codes, with or without an imported decoder, that replace a run's own."""

    decoder: Annotated[
        str, Option("Name of an imported decoder (`tailrace import model`), instead of training a decoder.")
    ] = ""
    index: Annotated[Path | None, Option("SIDs of the items from elsewhere; our decoder learns on these codes.")] = None
    distil_positions: Annotated[
        int,
        Option(
            "History positions, newest first, at which an imported decoder gives the student its targets.", at_least=1
        ),
    ] = 10_000

    def __post_init__(self) -> None:
        """Validate the options. Raises ConfigError naming the option."""
        check_bounds(self)
        if self.decoder and self.index is not None:
            raise ConfigError("--index: the import of --decoder has its own index; give one of them")

    def check_training(self, *, warm_start: bool, code_depth: int | None) -> None:
        """Reject options of a training that does not run. Raises ConfigError naming the option."""
        if not (self.decoder or self.index):
            return
        option = "--decoder" if self.decoder else "--index"
        if code_depth is not None:
            raise ConfigError(f"--code-depth: {option} has its own codes; remove one of them")
        if warm_start:
            raise ConfigError(
                f"--warm-start: not with {option}, whose codes replace the live bundle's; remove one of them"
            )


def _read_date(given: str) -> date:
    try:
        return date.fromisoformat(given)
    except ValueError as error:
        raise InvalidOption("--seen-until", f"{given!r} is not a date", "give a date such as 2026-01-31") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportArguments:
    """The options of `tailrace import model`."""

    index: Annotated[
        Path,
        Option(
            "Items' SIDs: .index.json, sid2pid.json, id2sid.json, JSON Lines with token_ids, a TorchEasyRec folder."
        ),
    ]
    examples: Annotated[Path | None, Option("Test rows of the framework; the prompt is derived from them.")] = None
    prompt: Annotated[Path | None, Option("Prompt file (TOML), instead of --examples.")] = None
    name: Annotated[str | None, Option("Name of the import.", names=("--as",), shown="the checkpoint folder's")] = None
    beam_width: Annotated[
        int | None,
        Option("Beams of a request.", at_least=1, at_most=MAX_BEAM_WIDTH, shown="the framework's, usually 50"),
    ] = None
    scores: Annotated[
        Scores | None,
        Option(
            "Log-probabilities among the whole vocabulary or the catalogue's codes.",
            choices=get_args(Scores),
            shown="vocabulary",
        ),
    ] = None
    seen_until: Annotated[
        date | None,
        Option("Date of the newest event that the checkpoint may have learned, as YYYY-MM-DD.", parse=_read_date),
    ] = None
    base: Annotated[Path | None, Option("Folder of a LoRA adapter's base.")] = None
    count_close: Annotated[
        bool, Option("Count the closing tokens after a code, as the framework's evaluation does.")
    ] = True

    def of(self, checkpoint: Path) -> "ImportOptions":
        """Return the options of the import of a checkpoint. Raises ConfigError naming the option."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return ImportOptions(checkpoint=checkpoint, **given)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions(ImportArguments):
    """The options of an import.

    Args:
        checkpoint: Folder in Hugging Face layout, or of a LoRA adapter.
        max_measured: Test rows on which scores and strides are compared.
    """

    checkpoint: Path
    max_measured: int = 500

    def __post_init__(self) -> None:
        """Validate the options. Raises InvalidOption, or Refused for options that exclude each other."""
        from models.documents import is_version

        check_bounds(self)
        if (self.examples is None) == (self.prompt is None):
            raise Refused("--examples", "", "give either --examples or --prompt", "the prompt comes from one of them")
        if not is_version(self.import_name):
            fix = "give --as with letters, digits, '.', '_' and '-'"
            raise Refused("--as", "", f"{self.import_name!r} is invalid", fix)

    @property
    def import_name(self) -> str:
        return self.name or self.checkpoint.resolve().name
