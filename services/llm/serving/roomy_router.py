"""Ray Serve's consistent-hash router with bounded loads: a session leaves its replica while that has far more to do than others.

Stickiness saves a prefill, and waiting costs more than that: many callers who begin alike would else queue at one replica
beside idle ones. The rule is Mirrokni, Thorup and Zadimoghaddam's, "Consistent Hashing with Bounded Loads" (2016): the first
replica on the ring with less to do than 1.25 of the mean. Loads are what this process knows: what it sent itself, and what
replicas told it.
"""

import math
from collections.abc import Sequence

from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica

from services.llm.serving.sticky_router import StickyRouter

_BOUND = 1.25


class RoomyRouter(StickyRouter):
    """Sends a session to the first replica on its way round the ring that has room, and fails when there is none left."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which they are to be tried."""
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        loads = {replica.replica_id: self._load(replica) for replica in candidate_replicas}
        first = with_room([loads.get(rank[0].replica_id, 0) for rank in ranks], list(loads.values()))
        return ranks[first:] + ranks[:first]

    def _load(self, replica: RunningReplica) -> int:
        return self.replica_queue_len_cache.get(replica.replica_id) or 0


def with_room(ranked_loads: Sequence[int], all_loads: Sequence[int]) -> int:
    """Return the place of the first ranked replica that one more request leaves within the bound; of the idlest, if there is none."""
    if not ranked_loads:
        return 0
    bound = math.ceil(_BOUND * (sum(all_loads) + 1) / len(all_loads))
    places = range(len(ranked_loads))
    return next((place for place in places if ranked_loads[place] < bound), min(places, key=ranked_loads.__getitem__))
