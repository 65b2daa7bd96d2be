"""Watches Ray's HAProxy from the standby, and leads new connections to whoever should answer. Knows no protocol."""

import asyncio
from pathlib import Path

import structlog

from infra.local.standby.handover import Duty, Main, advance
from infra.local.standby.main_door import end, look
from infra.local.standby.relay import Relay
from services.observability.metrics import StandbyMetrics

log = structlog.get_logger()

LOOK_EVERY_S = 0.2
CHECK_EVERY = 5
"""At each so many looks it is checked that connections go where they should."""


class StandbyWatch:
    """Whether the standby is on duty; owns the decision, and carries it out at every door."""

    def __init__(self, relays: tuple[Relay, ...], folder: Path, heartbeat: Path, metrics: StandbyMetrics) -> None:
        """`folder` is where HAProxy has its admin socket; `heartbeat` is touched at every look."""
        self._relays = relays
        self._folder = folder
        self._heartbeat = heartbeat
        self._metrics = metrics
        self._duty = Duty()
        self._num_looks = 0

    @property
    def is_on_duty(self) -> bool:
        """Whether new connections come here."""
        return self._duty.is_on

    async def run(self) -> None:
        """Look, decide, lead; until cancelled."""
        while True:
            self._heartbeat.touch()
            await self._turn()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _turn(self) -> None:
        main = await asyncio.to_thread(look, self._folder)
        if main is Main.GONE:
            for relay in self._relays:
                relay.port.other_is_gone()
        elif self._num_looks % CHECK_EVERY == CHECK_EVERY - 1:
            await self._check()
        self._num_looks += 1
        was, self._duty = self._duty, advance(self._duty, main)
        self._lead()
        if was.is_on is not self._duty.is_on:
            self._tell(main)
        if main is Main.UNWELL and not was.is_on:
            end(self._folder)  # its connections stay with it, and are held until there is a gateway again

    async def _check(self) -> None:
        """See whether connections go where they should; whoever came in between may have changed the order."""
        for relay in self._relays:
            if await relay.is_reached() is not self.is_on_duty:
                log.warning("standby_misled", port=relay.port.socket.getsockname()[1], on_duty=self.is_on_duty)
                relay.port.was_mistaken()

    def _lead(self) -> None:
        for relay in self._relays:
            relay.port.lead(to_us=self.is_on_duty)
        self._metrics.active.set(self.is_on_duty)

    def _tell(self, main: Main) -> None:
        if self.is_on_duty:
            self._metrics.takeovers.inc()
            log.warning("standby_took_over", haproxy=main)
        else:
            log.info("standby_handed_back")
