"""`tailrace import model`: a recommender that was trained elsewhere, ready for `tailrace pipeline --decoder`."""

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from infra.cli.audit import audited

out = Console(highlight=False, soft_wrap=True)


def model(
    checkpoint: Annotated[
        Path, typer.Argument(help="Checkpoint folder in Hugging Face layout, or of a LoRA adapter.", show_default=False)
    ],
    index: Annotated[
        Path,
        typer.Option(
            help="Items' SIDs: .index.json, sid2pid.json, id2sid.json, JSON Lines with token_ids, a TorchEasyRec folder.",
            show_default=False,
        ),
    ],
    examples: Annotated[
        Path | None, typer.Option(help="Test rows of the framework; the prompt is derived from them.")
    ] = None,
    prompt: Annotated[Path | None, typer.Option(help="Prompt file (TOML), instead of --examples.")] = None,
    name: Annotated[str | None, typer.Option("--as", help="Name of the import.", show_default="the folder's")] = None,
    beam_width: Annotated[
        int | None, typer.Option(help="Beams of a request.", show_default="the framework's, usually 50")
    ] = None,
    scores: Annotated[
        str | None,
        typer.Option(
            help="Log-probabilities among the whole vocabulary or the catalogue's codes.", show_default="vocabulary"
        ),
    ] = None,
    seen_until: Annotated[
        datetime | None,
        typer.Option(formats=["%Y-%m-%d"], help="Date of the newest event that the checkpoint may have learned."),
    ] = None,
    base: Annotated[Path | None, typer.Option(help="Folder of a LoRA adapter's base.")] = None,
    count_close: Annotated[
        bool, typer.Option(help="Count the closing tokens after a code, as the framework's evaluation does.")
    ] = True,
) -> None:
    """Import a generative recommender: check it, prove its prompt on examples, and compare scores and strides."""
    from infra.cli.topic import running_settings
    from pipelines.foreign.model import ImportOptions, import_model
    from pipelines.foreign.options import parse_scores

    settings = running_settings()
    options = ImportOptions(
        checkpoint=checkpoint,
        index=index,
        examples=examples,
        prompt=prompt,
        name=name,
        beam_width=beam_width,
        scores=parse_scores(scores),
        seen_until=seen_until.date() if seen_until is not None else None,
        base=base,
        count_close=count_close,
    )
    with audited(settings.state_dir, "import model", model=options.import_name):
        import_model(options, settings.state_dir, lambda sentence: out.print(sentence, markup=False))
