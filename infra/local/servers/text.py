"""Makes the text checkpoint ready before the stack starts, so that a download or a conversion is seen, and fails, at once."""

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from services.settings.settings import Settings


def ready_text(settings: Settings, out: Console) -> Settings:
    """Return the settings with the folder in place of whatever names it, converting first where needed.

    Raises CheckpointError or EnvironmentFault. Does nothing where no text is served from here.
    """
    if not settings.text_path:
        return settings
    from services.llm.text.checkpoint import checkpoint_folder

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task("text", total=None)
        folder = checkpoint_folder(
            settings.text_path,
            settings.cache_dir,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            say=lambda line: bar.update(task, description=line),
        )
    return settings.model_copy(update={"text_path": str(folder.absolute())})


def describe_text(settings: Settings) -> tuple[str, bool]:
    """Say what text is written from, and whether that can be found without trying."""
    if settings.text_url:
        return f"from {settings.text_url}", True
    from services.llm.text.checkpoint import PACKAGES

    named = settings.text_path
    if named in PACKAGES and not Path(named).exists():
        return f"package {named}", True
    return named, Path(named).exists()
