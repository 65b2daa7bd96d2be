"""The first training of a stack without models: when it is due, and what `tailrace up` reports of it."""

import shutil
from pathlib import Path

import pytest

from infra.local.commands.first_training import FirstTraining, fault_of_live, is_due, log_of
from infra.local.commands.status import is_training
from infra.local.supervisor.part import Part
from infra.local.supervisor.stackfile import PartRecord, StackFile, StackRecord
from models.registry.store import BundleStore
from services.errors import EnvironmentFault
from services.settings.settings import Settings
from tests.support.training.bundles import live_store


class Scripted:
    """A supervisor of a pipeline that publishes at its second tick or never, writes lines, and ends with a code."""

    def __init__(self, settings: Settings, code: int, *, publishes: bool) -> None:
        self.settings, self.code, self.publishes = settings, code, publishes
        self.num_ticks, self.began, self.lowered_at = 0, "", list[int]()

    def begin(self, part: Part) -> None:
        self.began = part.name

    def tick(self) -> None:
        """Write lines, and publish when it is time."""
        self.num_ticks += 1
        with log_of(self.settings).open("a") as log:
            log.write(f"tokenize {self.num_ticks} s\n" if self.num_ticks % 2 else "training: about 2 minutes left\n")
        if self.publishes and self.num_ticks == 2:
            go_live(self.settings.bundle_root, trained=False, dataset="ml-100k")

    def lower_priority(self, name: str, by: int) -> None:
        """Record the tick."""
        assert (name, by > 0) == (self.began, True)
        self.lowered_at.append(self.num_ticks)

    def ended(self, name: str) -> int | None:
        """End after four ticks."""
        assert name == self.began
        return self.code if self.num_ticks >= 4 else None

    def why_down(self, name: str) -> str:
        return name


def go_live(root: Path, **about: object) -> BundleStore:
    """Return a store whose live bundle has this manifest."""
    folder = root.parent / "made"
    folder.mkdir(exist_ok=True)
    return live_store(root, folder, "v1", about)


def test_a_live_bundle_that_cannot_be_served_is_named_at_the_start(tmp_path: Path) -> None:
    """A missing folder names the version and the command; the wait for an answer would end without a reason."""
    none = fault_of_live(BundleStore(tmp_path / "bundles"))
    store = go_live(tmp_path / "bundles")
    whole = fault_of_live(store)
    shutil.rmtree(tmp_path / "bundles" / "v1")

    assert (none, whole) == ("", "")
    assert fault_of_live(store).startswith("v1 is live, but no bundle v1 ")
    assert "`tailrace rollback --to VERSION`" in fault_of_live(store)


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [
        (None, True),
        ({"trained": False, "dataset": "ml-100k"}, True),
        ({"trained": False, "dataset": "items"}, False),
        ({"dataset": "ml-100k"}, False),
    ],
)
def test_it_is_due_without_models_of_the_data_set(
    tmp_path: Path, manifest: dict[str, object] | None, expected: bool
) -> None:
    """Also after an interrupted first training; a shop's own items wait for events."""
    root = tmp_path / "bundles"
    store = BundleStore(root) if manifest is None else go_live(root, **manifest)

    assert is_due(store) is expected


@pytest.mark.parametrize(("code", "stage"), [(0, "ready"), (1, "untrained")])
def test_the_stack_starts_with_the_first_bundle_and_reports_estimates_and_end(
    tmp_path: Path, code: int, stage: str
) -> None:
    """The wait ends as soon as a bundle is live; a failed training does not stop the stack, and its log is named."""
    settings = Settings(state_dir=tmp_path)
    log_of(settings).parent.mkdir()
    log_of(settings).write_text("training: of an earlier run\n")
    lines: list[str] = []
    supervisor = Scripted(settings, code, publishes=True)
    training = FirstTraining(supervisor, settings, lines.append)  # type: ignore[arg-type]

    training.begin()
    assert supervisor.lowered_at == [2]  # the stack waits for the bundle, not for the training
    begun = (supervisor.num_ticks, training.stage)
    while not training.observe():
        supervisor.tick()

    assert begun == (2, "training")
    assert training.stage == stage
    assert [line for line in lines if line.endswith("left")] == ["training: about 2 minutes left"] * 2
    assert "earlier" not in "".join(lines)
    assert (str(log_of(settings)) in lines[-1]) is (code != 0)


def test_a_training_that_fails_before_its_first_bundle_ends_the_start(tmp_path: Path) -> None:
    """Without any bundle there is nothing to serve."""
    settings = Settings(state_dir=tmp_path)
    log_of(settings).parent.mkdir()
    supervisor = Scripted(settings, 1, publishes=False)

    with pytest.raises(EnvironmentFault):
        FirstTraining(supervisor, settings, print).begin()  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", ["starting", "answering", "training"])
def test_status_reports_the_training_from_its_first_moment(tmp_path: Path, stage: str) -> None:
    """The first training is reported while other parts still start, and no longer once it has ended."""
    settings, stack_file = Settings(state_dir=tmp_path), StackFile(tmp_path)
    part = PartRecord(phase="starting", keeper_pid=1, num_restarts=0)
    (tmp_path / "run").mkdir()

    stack_file.write(StackRecord(supervisor_pid=1, stage=stage, parts={"pipeline": part}))
    assert is_training(settings)

    stack_file.write(StackRecord(supervisor_pid=1, stage=stage, parts={"serve": part}))
    assert not is_training(settings)
