"""Prepare the text checkpoint before the stack starts, so that a download or conversion is visible and fails early."""

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from services.errors import CheckpointError
from services.settings.settings import Settings


def ready_text(settings: Settings, out: Console, source: str = "TAILRACE_TEXT_PATH") -> Settings:
    """Return the settings with `text_path` as a checkpoint folder, after a download or conversion if needed.

    Raises CheckpointError naming `source`, the option or setting that gave the path, or EnvironmentFault. Without
    `text_path` the settings are returned unchanged.
    """
    if not settings.text_path:
        return settings
    from services.llm.text.checkpoint import check_folder, checkpoint_folder

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=out, transient=True) as bar:
            task = bar.add_task("text", total=None)
            folder = checkpoint_folder(
                settings.text_path,
                settings.cache_dir,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
                say=lambda line: bar.update(task, description=line),
            )
        check_folder(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{source}: {error}") from error
    return settings.model_copy(update={"text_path": str(folder.absolute())})


def describe_text(settings: Settings) -> tuple[str, bool]:
    """Return a description of the text model's source, and whether it exists."""
    if settings.text_url:
        return f"from {settings.text_url}", True
    from services.llm.text.checkpoint import PACKAGES

    named = settings.text_path
    if named in PACKAGES and not Path(named).exists():
        return f"package {named}", True
    return named, Path(named).exists()
