"""The tenants file: ids, states, shares and limits of the stack's tenants; their keys are in the keys file.

    {"tenants": [{"id": "acme", "rate_per_s": 200, "burst": 400, "daily_quota": null, "max_k": 100, "state": "active",
                  "share": 2.0}]}

A deleted tenant keeps its entry, so that nobody gets its id, and with it the remains in backups, by accident.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from services.contracts.access import Allowance
from services.contracts.tenant import Tenant, TenantState, check_tenant
from services.errors import ConfigError
from services.gateway.access.keys import Stored, StoredLimits, read_checked, write_privately
from services.gateway.followed_file import FileState, FollowedFile

_RESERVED = "default"
TenantId = Annotated[str, AfterValidator(check_tenant)]


class StoredTenant(StoredLimits):
    """One tenant."""

    id: TenantId
    state: TenantState = TenantState.ACTIVE
    share: float = Field(1.0, gt=0, le=1_000)

    @property
    def tenant(self) -> Tenant:
        """The tenant as the doors know it."""
        burst = self.burst or max(1.0, self.rate_per_s or 1.0)
        allowance = Allowance(rate_per_s=self.rate_per_s, burst=burst, daily_quota=self.daily_quota)
        return Tenant(id=self.id, state=self.state, share=self.share, allowance=allowance, max_k=self.max_k)


class TenantsFile(Stored):
    """All tenants. Each change returns a new value."""

    tenants: tuple[StoredTenant, ...] = ()

    @model_validator(mode="after")
    def _refuse_doubles(self) -> "TenantsFile":
        if len({stored.id for stored in self.tenants}) < len(self.tenants):
            raise ValueError("an id is there twice; remove one")
        return self

    def find(self, tenant: str) -> StoredTenant | None:
        return next((stored for stored in self.tenants if stored.id == tenant), None)

    def with_new(self, tenant: StoredTenant) -> "TenantsFile":
        """Add a tenant. Raises ConfigError if its id is reserved, or is or was in use."""
        if tenant.id == _RESERVED:
            raise ConfigError(f"tenant {tenant.id}: names the tenant of keys without --tenant; choose another id")
        if (before := self.find(tenant.id)) is not None:
            raise ConfigError(f"tenant {tenant.id}: the id is taken ({before.state}); choose another id")
        return TenantsFile(tenants=(*self.tenants, tenant))

    def with_changed(self, tenant: str, **changes: object) -> "TenantsFile":
        """Change fields of a tenant. Raises ConfigError for an unknown or deleted tenant, ValidationError."""
        before = self.existing(tenant)
        after = StoredTenant(**{**before.model_dump(), **changes})
        return TenantsFile(tenants=tuple(after if stored.id == tenant else stored for stored in self.tenants))

    def existing(self, tenant: str) -> StoredTenant:
        """Return the tenant of this id. Raises ConfigError for an unknown or deleted tenant."""
        stored = self.find(tenant)
        if stored is None or stored.state is TenantState.DELETED:
            what = "unknown" if stored is None else "deleted"
            raise ConfigError(f"tenant {tenant}: {what}; `tailrace tenants list` shows the tenants")
        return stored


class FollowedTenants(FollowedFile[Mapping[str, Tenant]]):
    """The tenants of the current file, by id; without a file there are none."""

    def __init__(self, path: Path | None, on_state: Callable[[FileState], None] = lambda _: None) -> None:
        """Read the file. Raises ConfigError. `on_state` is called with the state at each change."""
        super().__init__(path, "tenants", _by_id, {}, on_state=on_state)

    def find(self, tenant: str) -> Tenant | None:
        return self.in_force.get(tenant)


def read_tenants(path: Path) -> TenantsFile:
    """Read a tenants file. Raises ConfigError."""
    return read_checked(path, TenantsFile, "tenants")


def write_tenants(path: Path, tenants: TenantsFile) -> None:
    """Replace or create the file atomically, readable only by its owner."""
    write_privately(path, json.dumps(tenants.model_dump(mode="json"), indent=2) + "\n")


def _by_id(path: Path) -> Mapping[str, Tenant]:
    return {stored.id: stored.tenant for stored in read_tenants(path).tenants}
