"""Make, list, change, suspend and delete the stack's tenants in the tenants file.

Gateways reload the file within two seconds, without a restart. A tenant's keys are made with `tailrace keys new
--tenant`, its model names are `TENANT.NAME`, and its surfaces `TENANT/SURFACE`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from infra.cli.keys import changed_file, locked, refused_by_option
from infra.cli.session import audited, out
from services.errors import ConfigError, EnvironmentFault, TailraceError

if TYPE_CHECKING:
    from services.gateway.access.tenants import TenantsFile

tenants_app = typer.Typer(no_args_is_help=True, help=__doc__)

TenantArgument = Annotated[str, typer.Argument(help="Id of the tenant.", show_default=False)]
Share = Annotated[float | None, typer.Option(help="Weight of the tenant when capacity is scarce. Default: 1.")]
Rate = Annotated[float | None, typer.Option(help="Maximal calls per second of all its keys.")]
Burst = Annotated[float | None, typer.Option(help="Maximal calls at once. Default: one second of --rate.")]
DailyQuota = Annotated[int | None, typer.Option(help="Maximal calls per day (UTC) of all its keys.")]
MaxK = Annotated[int | None, typer.Option(help="Maximal items per answer.")]


@tenants_app.command()
def new(
    tenant: TenantArgument,
    share: Share = None,
    rate: Rate = None,
    burst: Burst = None,
    daily_quota: DailyQuota = None,
    max_k: MaxK = None,
) -> None:
    """Add a tenant."""
    from services.gateway.access.tenants import StoredTenant

    limits = _given(share=share, rate_per_s=rate, burst=burst, daily_quota=daily_quota, max_k=max_k)
    _change("tenants new", tenant, lambda file: file.with_new(StoredTenant(id=tenant, **limits)))
    out.print(f"tenant {tenant} is added; `tailrace keys new --tenant {tenant}` makes its keys", markup=False)


@tenants_app.command("list")
def list_() -> None:
    """List the tenants, with their shares and limits."""
    from rich.table import Column, Table

    from services.gateway.access.tenants import read_tenants

    _, path = changed_file("tenants_file")
    table = Table(Column("id", no_wrap=True), "state", "share", "rate/s", "burst", "a day", "max k", box=None)
    for tenant in read_tenants(path).tenants:
        limits = (tenant.rate_per_s, tenant.burst, tenant.daily_quota, tenant.max_k)
        table.add_row(
            tenant.id,
            tenant.state,
            f"{tenant.share:g}",
            *("-" if value is None else f"{value:.15g}" for value in limits),
        )
    out.print(table if table.row_count else f"no tenants in {path}")


@tenants_app.command("set")
def set_(
    tenant: TenantArgument,
    share: Share = None,
    rate: Rate = None,
    burst: Burst = None,
    daily_quota: DailyQuota = None,
    max_k: MaxK = None,
    unlimited: Annotated[bool, typer.Option(help="Remove every limit that is not given.")] = False,
) -> None:
    """Change the share and the limits of a tenant."""
    changes = _given(share=share, rate_per_s=rate, burst=burst, daily_quota=daily_quota, max_k=max_k)
    if unlimited:
        changes = dict.fromkeys(("rate_per_s", "burst", "daily_quota", "max_k"), None) | changes
    if not changes:
        raise ConfigError("tenants set: no change; give --share, a limit or --unlimited")
    _change("tenants set", tenant, lambda file: file.with_changed(tenant, **changes))
    out.print(f"tenant {tenant} is changed", markup=False)


@tenants_app.command()
def suspend(
    tenant: TenantArgument,
    resume: Annotated[bool, typer.Option(help="Admit the tenant's calls again.")] = False,
) -> None:
    """Refuse a tenant's calls, and keep its data; `--resume` admits them again."""
    from services.contracts.tenant import TenantState

    state = TenantState.ACTIVE if resume else TenantState.SUSPENDED
    _change("tenants suspend", tenant, lambda file: file.with_changed(tenant, state=state), resume=str(resume))
    out.print(f"tenant {tenant} is {state}", markup=False)


@tenants_app.command()
def delete(
    tenant: TenantArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
) -> None:
    """Revoke a tenant's keys and erase its data; run it again to follow the progress. Its id is never used again."""
    from infra.cli.session import running_settings
    from infra.cli.tenant_deletion import delete_data
    from services.contracts.tenant import TenantState
    from services.gateway.access.tenants import read_tenants

    _, path = changed_file("tenants_file")
    stored = read_tenants(path).find(tenant)
    if stored is None or stored.state is not TenantState.DELETED:
        if stored is not None and not yes:
            typer.confirm(f"delete tenant {tenant} with all of its users' data?", abort=True)
        _change("tenants delete", tenant, lambda file: file.with_changed(tenant, state=TenantState.DELETED))
    _revoke_keys(tenant)
    with out.status(f"tenant {tenant}: erasing and looking for its ids in every store"):
        try:
            remaining = delete_data(running_settings(), tenant)
        except TailraceError as error:
            why = f"tenant {tenant}: its calls are refused, but its data is not erased: {error}"
            raise EnvironmentFault(f"{why}; repeat it where the stack runs") from error
    if remaining is not None:
        out.print(f"tenant {tenant} is deleted: nothing of it is left in Redis, the offline logs and the catalogue")
        out.print(f"remaining: {', '.join(remaining)}")
    else:
        out.print(f"tenant {tenant} is being erased; run the command again to follow the progress", markup=False)


def _revoke_keys(tenant: str) -> None:
    """Remove the tenant's keys from the keys file, if it has any; it may be read-only otherwise."""
    from services.gateway.access.keys import KeysFile, read_keys, write_keys
    from services.settings.settings import load_settings

    path = load_settings().api_keys_file
    if path is not None and path.exists() and any(key.tenant == tenant for key in read_keys(path).keys):
        with locked(path):
            keys = read_keys(path).keys
            write_keys(path, KeysFile(keys=tuple(key for key in keys if key.tenant != tenant)))


def _given(**fields: float | None) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


def _change(act: str, tenant: str, change: "Callable[[TenantsFile], TenantsFile]", **details: str) -> None:
    """Write the changed file, with an audit line. Raises ConfigError."""
    from services.gateway.access.tenants import TenantsFile, read_tenants, write_tenants

    state_dir, path = changed_file("tenants_file")
    with audited(state_dir, act, tenant=tenant, **details), locked(path), refused_by_option():
        write_tenants(path, change(read_tenants(path) if path.exists() else TenantsFile()))
