"""The affinity router: Ray Serve's consistent hashing on the session key, failing immediately without replicas.

A session (a user, or a conversation) goes to the replica that has its beginning in the prefix cache, and to the next
replica on the ring when that replica has no room. Four things differ from Ray's own router:

- Ray keeps a request waiting until a replica comes back. Here the request fails immediately, because an answer of the
  student is better than a wait. Before the first replica was ever seen (start-up) requests wait as in Ray.
- A request may name replicas in its `replicas`: the running ones among them are tried in that order. The gateway names
  them for rankings, since it knows which replicas hang or are slow; this router tells the gateway which replicas run.
- Concurrent calls of one request, such as a completion's prompts, are routed separately. Ray gives them all the
  internal id of that request, by which it finds the waiting call, so it would route a single call and leave the
  rest waiting.
- With a `load_bound`, a session leaves an overloaded replica: the first replica on the ring with a load below
  `load_bound` times the mean is tried first (Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded
  Loads", 2016). Loads are those known to this process: the requests that it sent, and the loads that replicas
  reported.

Built on private classes of Ray Serve, read in ray 2.60.0.
"""

import math
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ray.serve._private.common import ReplicaID
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

from services.llm.serving.replica_names import set_running


class AffinityRouter(ConsistentHashRouter):
    """Routes a session to its replica, to the next on the ring if that has no room, and fails without replicas."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._has_seen_replicas = False
        self._load_bound: float | None = None

    def initialize_state(self, *, load_bound: float | None = None, **kwargs: Any) -> None:
        """Take the parameters that `affinity` has put into the deployment's configuration."""
        super().initialize_state(**kwargs)
        self._load_bound = load_bound

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the controller's list of replicas; if it is empty, pending requests fail."""
        super().update_replicas(replicas)
        self._publish_names()
        self._has_seen_replicas |= bool(replicas)
        self._fail_if_none_left()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Drop a dead replica; if it was the last replica, pending requests fail."""
        super().on_replica_actor_died(replica_id)
        self._publish_names()
        self._fail_if_none_left()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order of the attempts."""
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        if named := self._named_by(pending_request):
            return named
        if self._load_bound is None:
            return ranks
        loads = {replica.replica_id: self._load(replica) for replica in candidate_replicas}
        ranked_loads = [loads.get(rank[0].replica_id, 0) for rank in ranks]
        first = first_with_room(ranked_loads, list(loads.values()), self._load_bound)
        return ranks[first:] + ranks[:first]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        if self._has_seen_replicas and not self.curr_replicas:
            raise self._none_left()
        if not is_retry:
            pending_request.metadata = replace(pending_request.metadata, internal_request_id=uuid.uuid4().hex)
        try:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except ReplicaUnavailableError:
            self._cancel_routing_task_for_pending_request(pending_request)
            self._remove_pending_request_from_indices(pending_request)
            raise

    def _named_by(self, pending_request: PendingRequest | None) -> list[list[RunningReplica]]:
        """Return the running replicas that the request names, in its order."""
        request = pending_request.args[0] if pending_request is not None and pending_request.args else None
        running = {replica.replica_id.unique_id: replica for replica in self.curr_replicas.values()}
        return [[running[name]] for name in getattr(request, "replicas", ()) if name in running]

    def _publish_names(self) -> None:
        set_running(str(self._deployment_id), (replica_id.unique_id for replica_id in self.curr_replicas))

    def _load(self, replica: RunningReplica) -> int:
        return self.replica_queue_len_cache.get(replica.replica_id) or 0

    def _fail_if_none_left(self) -> None:
        if self._has_seen_replicas and not self.curr_replicas:
            for pending in list(self._pending_requests_to_fulfill):
                if not pending.future.done():
                    pending.future.set_exception(self._none_left())

    def _none_left(self) -> ReplicaUnavailableError:
        return ReplicaUnavailableError(str(self._deployment_id))


def affinity(load_bound: float | None = None) -> RequestRouterConfig:
    """Return the configuration of a deployment whose requests are routed by session.

    `load_bound` None ignores loads.
    """
    path = f"{AffinityRouter.__module__}.{AffinityRouter.__name__}"
    return RequestRouterConfig(request_router_class=path, request_router_kwargs={"load_bound": load_bound})  # type: ignore[arg-type]  # its stub says dict


def first_with_room(ranked_loads: Sequence[int], all_loads: Sequence[int], load_bound: float) -> int:
    """Return the index of the first ranked replica with room for a request within the bound; else the least loaded."""
    if not ranked_loads:
        return 0
    bound = math.ceil(load_bound * (sum(all_loads) + 1) / len(all_loads))
    indices = range(len(ranked_loads))
    return next((index for index in indices if ranked_loads[index] < bound), min(indices, key=ranked_loads.__getitem__))
