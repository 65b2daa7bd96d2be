"""Client of Tailrace: recommendations, events, items and explanations over REST or gRPC, synchronous and asynchronous.

Both clients keep one deadline per call, retry transient errors within it, and bound the load that retries add.
"""

from tailrace_client.address import Tls
from tailrace_client.calls import (
    Assigned,
    ErasureReceipt,
    Event,
    Explanation,
    Item,
    Recommendation,
    Recorded,
    SurfaceAssignment,
    Understood,
    UserData,
)
from tailrace_client.client import AsyncClient, Client
from tailrace_client.items import CatalogueItem, ItemDeleted, ItemRefusal, ItemsPut
from tailrace_client.retry import CallOptions, TailraceError

__all__ = [
    "Assigned",
    "AsyncClient",
    "CallOptions",
    "CatalogueItem",
    "Client",
    "ErasureReceipt",
    "Event",
    "Explanation",
    "Item",
    "ItemDeleted",
    "ItemRefusal",
    "ItemsPut",
    "Recommendation",
    "Recorded",
    "SurfaceAssignment",
    "TailraceError",
    "Tls",
    "Understood",
    "UserData",
]
