"""Model quality: decoder, student and all baselines of pipelines/evaluation over several seeds, and routing to the LLM.

    python -m benchmarks.quality --json OUT [--seeds 3] [--state FOLDER] [--recipes FILE] [--epochs N]
                                 [--code-depth N] [--sequences FOLDER | --events FILE --items FILE]

Default data: ml-100k. `--events` and `--items` are tables as for `tailrace pipeline`; `--sequences` is a folder as
described in benchmarks/quality/sequences.py, whose events have an order but no times, so it allows only leave-one-out.
Histories come from a feature store that the run starts for itself; each seed and split trains decoder, student, its
twin and a student without a decoder from scratch. Stage outputs in the state folder are reused. `--epochs` shortens
training to check that it runs; its numbers mean nothing.
docs/benchmarks.md explains the file.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from rich.console import Console
from torch import nn

from benchmarks.load.command import about_run, exit_on_errors, run_named, write_report
from benchmarks.quality import fresh
from benchmarks.quality.options import SeededOptions, with_own_store
from benchmarks.quality.sequences import as_tables
from benchmarks.quality.summary import QualityRun, summarise
from benchmarks.quality.variants import ALONE, rank_variants, train_alone
from infra.local.store import feature_store
from models.catalogue import load_catalogue
from models.decoder.config import read_config
from models.decoder.decoder import Decoder
from models.student import read_student
from pipelines.codes.options import CodesOptions
from pipelines.data.options import SplitKind
from pipelines.declaration import Option, parsed
from pipelines.evaluation.evaluate import read_ranks, read_slices
from pipelines.evaluation.held_out import HeldOut
from pipelines.options import PipelineOptions
from pipelines.places import Places
from pipelines.run import run_pipeline
from pipelines.runner.bars import Bars
from pipelines.runner.stage import StageCache, content_key
from pipelines.training import train_student
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.fit.device import choose_device
from pipelines.training.recipes import choose, data_size, read_recipes
from services.errors import ConfigError
from services.settings.settings import load_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityOptions(SeededOptions):
    """The options of this benchmark."""

    events: Annotated[Path | None, Option("Your own events, as Parquet, CSV or JSON Lines.")] = None
    items: Annotated[Path | None, Option("Your own items, with --events.")] = None
    recipes: Annotated[Path | None, Option("Recipes other than the shipped ones.")] = None
    code_depth: Annotated[
        int | None,
        Option("Tokens of an item, 1 to 4.", shown="1; from 100,000 items on 1 or 3, by validation"),
    ] = None

    def __post_init__(self) -> None:
        """Raise ConfigError for sequences together with tables."""
        if self.sequences is not None and (self.events is not None or self.items is not None):
            raise ConfigError("--sequences: not together with --events and --items; leave one of them out")

    @property
    def splits(self) -> Sequence[SplitKind]:
        """The splits to run: sequences have no times."""
        return list(SplitKind) if self.sequences is None else [SplitKind.LEAVE_ONE_OUT]


def main() -> None:
    """Train and evaluate each split and seed, then write the summary."""
    console = Console(stderr=True)
    with exit_on_errors():
        options = parsed(QualityOptions, __doc__)
        settings = with_own_store(load_settings(), options.state)
        chosen, places = list(pipeline_options(options, settings.state_dir)), Places.from_settings(settings)
        with feature_store(settings, console.print):
            summary = summarise([measure(seed, places, console) for seed in chosen])
    write_report(options.json, about_run("quality") | summary)


def measure(options: PipelineOptions, places: Places, console: Console) -> QualityRun:
    """Run the pipeline up to its evaluation, train and rank its variants. Raises the pipeline's errors."""
    report = run_pipeline(replace(options, until="evaluate"), places, console)
    assert report.evaluation is not None
    at = {stage.stage: stage.path for stage in report.stages}
    recipe = choose(options.recipes, data_size(at["tokenize"]))
    stages = StageCache(places.stages_dir)
    key = content_key(asdict(recipe.distill), [at["tokenize"].name], [train_student])
    saved, device = Checkpoints(stages.checkpoint_dir(ALONE, key), ALONE, 60.0), choose_device(options.device)
    with Bars(console) as bars:
        show = bars.begin(ALONE)
        alone = stages.run(
            ALONE, key, lambda out: train_alone(at["tokenize"], recipe.distill, out, saved, device, show)
        )
        bars.end(alone)
        key = content_key({}, [at["sources"].name], [fresh])
        refreshed = stages.run(
            fresh.FRESH, key, lambda out: fresh.count_fresh(at["tokenize"], at["distill"], at["sources"], out)
        )
    cases = HeldOut(at["tokenize"], places.stages_dir, "benchmarks.quality").open("variants of decoder and student")
    return QualityRun(
        seed=recipe.train.seed,
        split=options.split,
        evaluation=report.evaluation,
        ranks=read_ranks(at["evaluate"]),
        variants=rank_variants(at["tokenize"], at["distill"], alone.path, at["sources"], refreshed.path, cases),
        earned=train_student.read_earned(at["distill"]),
        slices=read_slices(at["evaluate"]),
        level_sizes=load_catalogue(at["tokenize"] / "catalogue.parquet").level_sizes,
        num_parameters=_num_parameters(at["train"] / "decoder", at["distill"]),
        llm_price_ndcg_per_ms=options.llm_price_ndcg_per_ms,
    )


def _num_parameters(decoder_dir: Path, students_dir: Path) -> dict[str, dict[str, int]]:
    """Return, by model, the number of `all` parameters and of those outside the item table."""
    with torch.device("meta"):
        decoder = Decoder(read_config(decoder_dir))
    student = read_student(students_dir / "student.safetensors")
    return {"decoder": _counts(decoder, decoder.embedding), "student": _counts(student, student.embedding)}


def _counts(model: nn.Module, table: nn.Embedding) -> dict[str, int]:
    total = sum(parameter.numel() for parameter in model.parameters())
    return {"all": total, "without_items": total - table.weight.numel()}


def pipeline_options(options: QualityOptions, state_dir: Path) -> Iterator[PipelineOptions]:
    """Yield the pipeline's options for each split and seed. Raises ConfigError."""
    events, items, codes = options.events, options.items, CodesOptions(depth=options.code_depth)
    if options.sequences is not None:
        events, items = as_tables(options.sequences, state_dir / "tables")
    for split in options.splits:
        for seed in range(options.seeds):
            recipes = read_recipes(options.recipes, epochs=options.epochs, student_epochs=options.epochs, seed=seed)
            yield PipelineOptions(
                events=events, items=items, with_live_log=False, split=split, codes=codes, recipes=recipes
            )


if __name__ == "__main__":
    names = {"warm-start": "warm_start", "cold-items": "cold_items", "linear-state": "linear_state"}
    run_named({name: f"benchmarks.quality.{module}" for name, module in names.items()}, main)
