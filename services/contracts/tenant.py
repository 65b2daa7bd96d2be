"""A tenant: a customer of the stack whose data no other tenant's callers can reach. Pure.

Inside the stack an id of a tenant carries its owner, so that every store, cache and topic keeps tenants apart without
knowing of them:

    user, session, item state, request     acme U+001F 196      no caller can send a control character in an id
    model name                             acme.fr              a name of the default tenant has no dot
    surface                                acme/home            a surface of the default tenant has no slash

The default tenant's ids are unchanged. `services.gateway.tenant_plane` is the only place where callers' ids become a
tenant's ids and back.
"""

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta

from services.contracts.access import Allowance
from services.contracts.message import MAX_ID_CHARS, check_id
from services.errors import InvalidRequest

DEFAULT_TENANT = ""
"""The owner of everything in a stack without tenants, and of the keys that name no tenant."""
OPERATOR = "operator"
"""The default tenant's name in metrics and logs; no tenant may have it."""
SEPARATOR = "\x1f"
MAX_TENANT_CHARS = 32
_TENANT = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")
_NAME_SEPARATOR, _SURFACE_SEPARATOR = ".", "/"


StoredId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS + MAX_TENANT_CHARS + len(SEPARATOR))]
"""An id as the stores keep it: `check_stored_id` checks it."""


class TenantState(StrEnum):
    """Whether a tenant's calls are answered."""

    ACTIVE = "active"
    SUSPENDED = "suspended"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A tenant. `share` is its weight when capacity is scarce; `allowance` limits the calls of all its keys."""

    id: str
    state: TenantState = TenantState.ACTIVE
    share: float = 1.0
    allowance: Allowance = field(default_factory=Allowance)
    max_k: int | None = None


def check_tenant(tenant: str) -> str:
    """Return the id of a tenant. Raises InvalidRequest."""
    if not _TENANT.fullmatch(tenant) or tenant == OPERATOR:
        raise InvalidRequest(
            "tenant",
            f"{tenant!r:.60} is not a tenant's id",
            f"use lower-case letters, digits and inner hyphens, at most {MAX_TENANT_CHARS}, not {OPERATOR!r}",
        )
    return tenant


def scoped(tenant: str, local_id: str) -> str:
    """Return a tenant's id of a user, session, item or request as the stores keep it."""
    return f"{tenant}{SEPARATOR}{local_id}" if tenant else local_id


def tenant_of(scoped_id: str) -> str:
    """Return the owner of an id as the stores keep it."""
    return scoped_id.partition(SEPARATOR)[0] if SEPARATOR in scoped_id else DEFAULT_TENANT


def local(scoped_id: str) -> str:
    """Return an id as its tenant's callers know it."""
    return scoped_id.partition(SEPARATOR)[2] if SEPARATOR in scoped_id else scoped_id


def check_stored_id(field: str, stored_id: str) -> None:
    """Reject an id that is neither printable nor a tenant's. Raises InvalidRequest."""
    if SEPARATOR in stored_id:
        tenant, _, stored_id = stored_id.partition(SEPARATOR)
        check_tenant(tenant)
    check_id(field, stored_id)


def prefix_of(tenant: str) -> str:
    """Return the prefix of a tenant's ids in the stores; empty for the default tenant."""
    return scoped(tenant, "")


def scoped_name(tenant: str, name: str) -> str:
    """Return a tenant's model name as the stack serves it."""
    return f"{tenant}{_NAME_SEPARATOR}{name}" if tenant else name


def tenant_of_name(name: str) -> str:
    return name.rpartition(_NAME_SEPARATOR)[0]


def local_name(name: str) -> str:
    """Return a model name as its tenant's callers know it."""
    return name.rpartition(_NAME_SEPARATOR)[2]


def scoped_surface(tenant: str, surface: str) -> str:
    """Return a tenant's surface as the surfaces file names it."""
    return f"{tenant}{_SURFACE_SEPARATOR}{surface}" if tenant else surface


def tenant_of_surface(surface: str) -> str:
    return surface.rpartition(_SURFACE_SEPARATOR)[0]


def local_surface(surface: str) -> str:
    """Return a surface as its tenant's callers know it."""
    return surface.rpartition(_SURFACE_SEPARATOR)[2]


def without_prefix(tenant: str, plain: Any) -> Any:
    """Return plain values whose texts are ids as the tenant's callers know them."""
    prefix = prefix_of(tenant)
    if not prefix:
        return plain
    if isinstance(plain, str):
        return plain.removeprefix(prefix)
    if isinstance(plain, dict):
        return {key: without_prefix(tenant, value) for key, value in plain.items()}
    if isinstance(plain, list | tuple):
        return type(plain)(without_prefix(tenant, value) for value in plain)
    return plain
