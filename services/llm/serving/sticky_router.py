"""Ray Serve's consistent-hash router, which also says at once that no replica is left.

Ray's own keeps a request waiting until a replica comes back; here the student answers better than a wait does, so a
request that finds no replica fails at once. Before the first replica was ever seen (start-up) it waits as Ray's does.
"""

from typing import Any

from ray.serve._private.common import ReplicaID
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter


class StickyRouter(ConsistentHashRouter):
    """Sends a session to one replica, to the next on the ring when that is full, and fails when there is none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._has_seen_replicas = False

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the controller's list of replicas; if it is empty, those who wait are told."""
        super().update_replicas(replicas)
        self._has_seen_replicas |= bool(replicas)
        self._fail_if_none_left()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Drop a dead replica; if it was the last one, those who wait are told."""
        super().on_replica_actor_died(replica_id)
        self._fail_if_none_left()

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        if self._has_seen_replicas and not self.curr_replicas:
            raise self._none_left()
        try:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except ReplicaUnavailableError:
            self._cancel_routing_task_for_pending_request(pending_request)
            self._remove_pending_request_from_indices(pending_request)
            raise

    def _fail_if_none_left(self) -> None:
        if self._has_seen_replicas and not self.curr_replicas:
            for pending in list(self._pending_requests_to_fulfill):
                if not pending.future.done():
                    pending.future.set_exception(self._none_left())

    def _none_left(self) -> ReplicaUnavailableError:
        return ReplicaUnavailableError(str(self._deployment_id))
