"""The stage cache: equal keys share an output, and failed work leaves no output."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.data import examples
from pipelines.evaluation import gate
from pipelines.runner.stage import StageCache, content_key, remove_outputs_of, sources
from pipelines.training import train_decoder


def write(text: str, calls: list[Path]) -> Callable[[Path], None]:
    """Return work that writes a file and records that it ran."""

    def work(out: Path) -> None:
        calls.append(out)
        (out / "out.txt").write_text(text)

    return work


def test_done_stage_is_skipped(tmp_path: Path) -> None:
    """With an equal key the work runs once."""
    calls: list[Path] = []
    stages = StageCache(tmp_path)

    first = stages.run("train", "k1", write("a", calls))
    again = stages.run("train", "k1", write("b", calls))

    assert len(calls) == 1
    assert (again.path / "out.txt").read_text() == "a"
    assert (first.skipped, again.skipped) == (False, True)


def test_failed_work_leaves_its_checkpoints_alone(tmp_path: Path) -> None:
    """Failed work leaves only its checkpoints, which the next run with the key finds and removes when finished."""

    def breaks(out: Path) -> None:
        (out / "half.txt").write_text("half")
        kept = StageCache(tmp_path).checkpoint_dir("train", "k1")
        kept.mkdir()
        (kept / "1").write_text("half")
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError):
        StageCache(tmp_path).run("train", "k1", breaks)
    stages = StageCache(tmp_path)
    left = list((tmp_path / "train").rglob("*"))
    again = stages.run("train", "k1", write("a", []))

    kept = stages.checkpoint_dir("train", "k1")
    assert left == [kept, kept / "1"]
    assert not again.skipped
    assert [path.name for path in (tmp_path / "train").iterdir()] == ["k1"]


def test_two_runs_at_once_share_what_the_first_one_made(tmp_path: Path) -> None:
    """The run that finishes second uses the existing output."""

    def overtaken(out: Path) -> None:
        StageCache(tmp_path / "elsewhere").run("train", "k1", write("first", [])).path.rename(tmp_path / "train" / "k1")
        write("second", [])(out)

    output = StageCache(tmp_path).run("train", "k1", overtaken)

    assert (output.path / "out.txt").read_text() == "first"
    assert [path.name for path in (tmp_path / "train").iterdir()] == ["k1"]


def test_outputs_that_nobody_used_for_longest_are_removed(tmp_path: Path) -> None:
    """The five most recently used outputs stay in addition to this run's; other stages are not affected."""
    for age_s, key in enumerate(("used", "k6", "k5", "k4", "k3", "k2", "k1")):
        output = StageCache(tmp_path).run("train", key, write(key, []))
        os.utime(output.path, (1_000 + age_s, 1_000 + age_s))
    StageCache(tmp_path).run("ingest", "k0", write("a", []))
    (tmp_path / "train" / ".killed.1").mkdir()

    StageCache(tmp_path).run("train", "used", write("again", []))
    StageCache(tmp_path).run("train", "new", write("b", []))

    assert {path.name for path in (tmp_path / "train").iterdir()} == {"new", "used", "k1", "k2", "k3", "k4"}
    assert (tmp_path / "ingest" / "k0").exists()


def test_a_deleted_tenants_outputs_are_removed_whole(tmp_path: Path) -> None:
    """Outputs of its runs, also failed and killed, and others' outputs that it used; other tenants' outputs stay."""

    def breaks(out: Path) -> None:
        StageCache(tmp_path).checkpoint_dir("train", "k3").mkdir()
        raise RuntimeError("power cut")

    StageCache(tmp_path).run("ingest", "shared", write("a", []))
    for tenant, key in (("", "k0"), ("acme", "k1"), ("acme-2", "k2")):
        StageCache(tmp_path, tenant).run("ingest", key, write(key, []))
    with pytest.raises(RuntimeError):
        StageCache(tmp_path, "acme").run("train", "k3", breaks)
    (tmp_path / "train" / ".k3.99").mkdir()
    StageCache(tmp_path, "acme").run("ingest", "shared", write("b", []))

    remove_outputs_of(tmp_path, "acme")

    assert {path.name for path in (tmp_path / "ingest").iterdir()} == {"k0", "k2", ".k2.tenant-acme-2"}
    assert list((tmp_path / "train").iterdir()) == []


def test_the_mark_of_a_removed_output_is_removed(tmp_path: Path) -> None:
    """Nightly runs leave no marks behind."""
    for number in range(9):
        StageCache(tmp_path, "acme").run("train", f"k{number}", write("a", []))

    names = {path.name for path in (tmp_path / "train").iterdir()}
    assert {name for name in names if name[0] == "."} == {f".{key}.tenant-acme" for key in names if key[0] != "."}


def test_sources_of_a_stage_are_all_that_it_is_made_of() -> None:
    """The key covers all modules of a stage, such as losses, masks and attention."""
    names = {module.__name__ for module in sources([train_decoder])}

    wanted = {"training.train_decoder", "training.target.softmax", "training.batches", "scoring.metrics"}
    assert {f"pipelines.{name}" for name in wanted} < names
    assert {"models.decoder.decoder", "models.decoder.rope", "models.catalogue"} < names
    assert not names & {"pipelines.training.train_student", "pipelines.run", "models.student"}


def test_key_depends_on_parameters_inputs_and_code_and_on_nothing_else() -> None:
    """Each of the three inputs changes the key; the order of parameters does not."""
    key = content_key({"a": 1, "b": 2}, ["in"], [examples])

    assert key == content_key({"b": 2, "a": 1}, ["in"], [examples])
    others = [
        ({"a": 1, "b": 3}, ["in"], examples),
        ({"a": 1, "b": 2}, ["x"], examples),
        ({"a": 1, "b": 2}, ["in"], gate),
    ]
    assert len({key, *(content_key(parameters, inputs, [code]) for parameters, inputs, code in others)}) == 4
