"""Faults of the store that keep it running: a failover that leaves the old primary as a replica, and a new password."""

import asyncio
import secrets
import subprocess
import time
from contextlib import suppress
from typing import Any

from redis import Redis, RedisError

from benchmarks.faults.scene import HOST, Scene
from infra.local.binaries import valkey_command
from infra.local.servers.access import prepare_valkey, valkey_access_file
from infra.local.supervisor.ports import free_window
from services.errors import EnvironmentFault
from services.settings.addresses import REDIS_PASSWORD_FILE, read_secret

_SYNC_S = 30.0


async def fail_over(scene: Scene) -> None:
    """Make a replica the primary and the old primary its replica; existing connections to the old primary stay open."""
    old = scene.wires["store"].server_port
    new = await asyncio.to_thread(_start_replica, scene, old)
    await asyncio.to_thread(_swap, scene, old, new)
    scene.promoted.append(new)


async def follow(scene: Scene) -> None:
    """Route new connections to the new primary."""
    scene.wires["store"].lead_to(scene.promoted[-1])


async def rotate_password(scene: Scene) -> None:
    """Change the password on the server and in its file, and end every connection."""
    await asyncio.to_thread(_rotate, scene)


def _start_replica(scene: Scene, primary: int) -> int:
    """Start a replica of the stack's store, and return its port once it has all rows."""
    folder = scene.settings.state_dir / f"valkey-{len(scene.promoted)}"
    folder.mkdir()
    port = free_window(1, seed=str(folder))
    command = valkey_command(port, folder, HOST, valkey_access_file(scene.settings))
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    scene.closing.callback(process.wait)
    scene.closing.callback(process.kill)
    _until(lambda: _admin(scene, port).ping())
    _admin(scene, port).config_set("masterauth", _password(scene))
    _admin(scene, port).replicaof(HOST, primary)
    _until(lambda: _is_synchronised(scene, port))
    return port


def _swap(scene: Scene, old: int, new: int) -> None:
    _admin(scene, new).replicaof("NO", "ONE")
    _admin(scene, old).config_set("masterauth", _password(scene))
    _admin(scene, old).replicaof(HOST, new)
    _until(lambda: _is_synchronised(scene, old))


def _rotate(scene: Scene) -> None:
    admin, password = _admin(scene, scene.wires["store"].server_port), secrets.token_urlsafe(16)
    assert scene.settings.redis_password_file is not None
    admin.config_set("requirepass", password)
    scene.settings.redis_password_file.write_text(password)
    prepare_valkey(scene.settings)  # for a store that is restarted
    admin.client_kill_filter(_type="normal", skipme=True)


def _is_synchronised(scene: Scene, port: int) -> bool:
    return bool(_admin(scene, port).info("replication").get("master_link_status") == "up")


def _password(scene: Scene) -> str:
    assert scene.settings.redis_password_file is not None
    return read_secret(scene.settings.redis_password_file, REDIS_PASSWORD_FILE)


def _admin(scene: Scene, port: int) -> Any:
    return Redis(host=HOST, port=port, password=_password(scene))


def _until(condition: Any) -> None:
    """Wait. Raises EnvironmentFault."""
    give_up_s = time.monotonic() + _SYNC_S
    while time.monotonic() < give_up_s:
        with suppress(OSError, RedisError):
            if condition():
                return
        time.sleep(0.05)
    raise EnvironmentFault("a replica of the store did not come up")
