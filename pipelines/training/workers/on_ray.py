"""Starts the ranks as workers of Ray Train, on a Ray cluster that is used only for training.

Ray places the workers, connects them and ends all if one fails; the state folder is on a volume that all machines
mount. Ranks report over a queue in the cluster, because a failed worker returns nothing.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pipelines.runner.stage import Progress
from pipelines.training.fit.checkpoints import Checkpoints
from pipelines.training.parallel.mesh import Mesh
from pipelines.training.workers.attempts import Left, Needs, fit_again
from pipelines.training.workers.rank import ExitKind, RankExit, RankStart, Shown, run_rank
from services.errors import ConfigError

if TYPE_CHECKING:
    from ray.util.queue import Queue

_OBJECT_STORE_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class _Job:
    start: RankStart
    work: Callable[..., Any]
    queue: "Queue"


def fit_on_ray(
    work: Callable[..., Any],
    address: str,
    mesh: Mesh,
    checkpoints: Checkpoints,
    progress: Progress,
    needs: Needs | None = None,
) -> Any:
    """Return the result of rank 0's work on the cluster at this address, or `local`. Raises as `fit_again`."""
    import ray

    own: dict[str, Any] = {
        "num_cpus": mesh.world_size,
        "include_dashboard": False,
        "object_store_memory": _OBJECT_STORE_BYTES,
    }
    try:
        ray.init(address=address, log_to_driver=True, **(own if address == "local" else {}))
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"--ray: no Ray cluster at {address} ({error}); start it with `ray start --head`, or give --ray local"
        ) from error
    try:
        return fit_again(
            lambda accumulation: _run(work, mesh.accumulating(accumulation), checkpoints, progress), checkpoints, needs
        )
    finally:
        ray.shutdown()


def _run(work: Callable[..., Any], mesh: Mesh, checkpoints: Checkpoints, progress: Progress) -> list[Left]:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.util.queue import Queue

    has_gpu, queue, ended = torch.cuda.is_available(), Queue(), dict[int, RankExit]()
    start = RankStart(mesh=mesh, num_threads=torch.get_num_threads(), has_gpu=has_gpu)
    trainer = TorchTrainer(
        _work,
        train_loop_config={"job": _Job(start, work, queue)},
        scaling_config=ScalingConfig(num_workers=mesh.world_size, use_gpu=has_gpu),
        torch_config=TorchConfig(
            backend="cpu:gloo,cuda:nccl" if has_gpu else "gloo", timeout_s=int(mesh.timeout_s) + 1
        ),
        run_config=RunConfig(
            name="ray", storage_path=str(checkpoints.folder.absolute()), failure_config=FailureConfig(max_failures=0)
        ),
    )
    listening = threading.Thread(target=_listen, args=(queue, ended, progress), daemon=True)
    listening.start()
    seen = "left without a word"
    try:
        trainer.fit()
    except Exception as error:  # noqa: BLE001 - Ray's, whose words are kept; the ranks' own are in the queue
        seen = f"left: {error}"
    queue.put(None)
    listening.join()
    queue.shutdown(force=True)
    return [Left(rank, ended.get(rank), seen) for rank in range(mesh.world_size)]


def _listen(queue: "Queue", ended: dict[int, RankExit], progress: Progress) -> None:
    """Show progress and keep the ranks' last messages until None arrives."""
    while (message := queue.get()) is not None:
        rank, report = message
        if isinstance(report, Shown):
            progress(report.done, report.total, report.words)
        else:
            ended[rank] = report


def _work(config: dict[str, Any]) -> None:
    """Run as one rank: the function that Ray Train runs in each worker."""
    from ray import train

    job: _Job = config["job"]
    context = train.get_context()
    rank, local_rank = context.get_world_rank(), context.get_local_rank()
    start = replace(job.start, mesh=replace(job.start.mesh, rank=rank, local_rank=local_rank))
    ended = run_rank(start, _has_joined, job.work, lambda message: job.queue.put((rank, message)))
    if ended.how != ExitKind.DONE:
        raise RuntimeError(ended.why)


def _has_joined() -> None:
    """Return at once: Ray Train has initialised the process group."""
