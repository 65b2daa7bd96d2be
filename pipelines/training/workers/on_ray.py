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
from pipelines.training.workers.attempts import Left, Needs, fit_again
from pipelines.training.workers.rank import Ended, Ending, Seat, Shown, group_of, work_at
from pipelines.training.workers.team import Team
from services.errors import ConfigError

if TYPE_CHECKING:
    from ray.util.queue import Queue

_OBJECT_STORE_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class _Job:
    seat: Seat
    work: Callable[..., Any]
    queue: "Queue"


def fit_on_ray(
    work: Callable[..., Any], team: Team, checkpoints: Checkpoints, progress: Progress, needs: Needs | None = None
) -> Any:
    """Return the result of rank 0's work. Raises as `fit_again`."""
    import ray

    own: dict[str, Any] = {
        "num_cpus": team.workers,
        "include_dashboard": False,
        "object_store_memory": _OBJECT_STORE_BYTES,
    }
    team.check_ray()
    try:
        ray.init(address=team.ray, log_to_driver=True, **(own if team.ray == "local" else {}))
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"--ray: no Ray cluster at {team.ray} ({error}); start it with `ray start --head`, or give --ray local"
        ) from error
    try:
        return fit_again(lambda accumulation: _run(work, team, accumulation, checkpoints, progress), checkpoints, needs)
    finally:
        ray.shutdown()


def _run(
    work: Callable[..., Any], team: Team, accumulation: int, checkpoints: Checkpoints, progress: Progress
) -> list[Left]:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.util.queue import Queue

    has_gpu, queue, ended = torch.cuda.is_available(), Queue(), dict[int, Ended]()
    seat = Seat(
        rank=0,
        size=team.workers,
        port=0,
        timeout_s=team.timeout_s,
        num_threads=torch.get_num_threads(),
        accumulation=accumulation,
        has_gpu=has_gpu,
        layout=team.layout,
        method=team.method,
    )
    trainer = TorchTrainer(
        _work,
        train_loop_config={"job": _Job(seat, work, queue)},
        scaling_config=ScalingConfig(num_workers=team.workers, use_gpu=has_gpu),
        torch_config=TorchConfig(
            backend="cpu:gloo,cuda:nccl" if has_gpu else "gloo", timeout_s=int(team.timeout_s) + 1
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
    return [Left(rank, ended.get(rank), seen) for rank in range(team.workers)]


def _listen(queue: "Queue", ended: dict[int, Ended], progress: Progress) -> None:
    """Show progress and keep the ranks' last messages until None arrives."""
    while (message := queue.get()) is not None:
        rank, said = message
        if isinstance(said, Shown):
            progress(said.done, said.total, said.words)
        else:
            ended[rank] = said


def _work(config: dict[str, Any]) -> None:
    """Run as one rank: the function that Ray Train runs in each worker."""
    from ray import train

    job: _Job = config["job"]
    context = train.get_context()
    seat = replace(job.seat, rank=context.get_world_rank())
    at = replace(seat, rank=context.get_local_rank())
    ended = work_at(seat, lambda: group_of(at), job.work, lambda message: job.queue.put((seat.rank, message)))
    if ended.how != Ending.DONE:
        raise RuntimeError(ended.why)
