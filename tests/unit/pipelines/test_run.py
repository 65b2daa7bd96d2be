"""The refusals of a pipeline run before its first stage."""

from pathlib import Path

import pytest
from rich.console import Console

from pipelines.foreign.options import ForeignOptions
from pipelines.options import PipelineOptions
from pipelines.places import Places
from pipelines.run import run_pipeline
from pipelines.training.options import AdapterOptions
from services.errors import TailraceError
from services.settings.settings import Settings

UNKNOWN = {
    "decoder": PipelineOptions(foreign=ForeignOptions(decoder="nope")),
    "index": PipelineOptions(foreign=ForeignOptions(index=Path("nope"))),
    "adapter": PipelineOptions(adapter=AdapterOptions(adapter_of="nope")),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_start_is_refused_before_the_first_stage(name: str, tmp_path: Path) -> None:
    """A mistyped import, index or parent costs no reading of events."""
    places = Places.from_settings(Settings(state_dir=tmp_path, cache_dir=tmp_path / "cache"))

    with pytest.raises(TailraceError, match="nope"):
        run_pipeline(UNKNOWN[name], places, Console(quiet=True))

    assert not list(tmp_path.glob("pipeline/ingest/*"))
