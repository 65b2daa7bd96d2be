"""Tokens and daily calls by key in Redis, counted by one script: one exchange, one clock (Redis' own), no race.

A hash for each key: the tokens in its bucket and their time, the day and its calls. It expires when it equals a new
hash. A sorted set holds the counting processes by the time of their last report. Constructed and used on one event
loop; connects at the first use, and all exchanges share the connection.
"""

import uuid
from contextlib import suppress
from typing import Any

from services.contracts.access import QUOTA, RATE, Allowance, Ask, Grant
from services.errors import DependencyUnavailable
from services.features.redis_calls import redis_as_dependency, within
from services.settings.addresses import RedisAddress

_LEAVE_TIMEOUT_S = 0.5
_PREFIX = "tailrace:rate:"
_COUNT = """
local rate, burst, quota = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local cost, batch, spent, unspent, taken_on = unpack(ARGV, 4, 8)
cost, batch, spent, unspent = tonumber(cost), tonumber(batch), tonumber(spent), tonumber(unspent)
local time = redis.call('TIME')
local now_s = time[1] + time[2] / 1e6
local day = math.floor(now_s / 86400)
local stored = redis.call('HMGET', KEYS[1], 'tokens', 'at_s', 'day', 'today')
local tokens, at_s = tonumber(stored[1]) or burst, tonumber(stored[2]) or now_s
local today = tonumber(stored[3]) == day and tonumber(stored[4]) or 0
if tonumber(taken_on) == day then today = math.max(0, today - unspent) end
today = today + spent
if rate > 0 then
  tokens = math.min(burst, tokens + math.max(0, now_s - at_s) * rate + unspent - spent)
  tokens = math.max(tokens, -burst)
else
  tokens = burst
end
local granted, why, wait_s = 0, '', 0
if rate > 0 and tokens < cost - 1e-9 then
  why, wait_s = 'rate', (cost - tokens) / rate
elseif quota >= 0 and today + cost > quota then
  why, wait_s = 'daily quota', (day + 1) * 86400 - now_s
else
  local spare = math.huge
  if rate > 0 then spare = tokens - cost end
  if quota >= 0 then spare = math.min(spare, quota - today - cost) end
  local processes = math.max(1, redis.call('ZCARD', KEYS[2]))
  granted = cost + math.min(batch, math.floor(spare / processes))
  if rate > 0 then tokens = tokens - granted end
  today = today + granted
end
local number = function(value) return string.format('%.17g', value) end
redis.call('HSET', KEYS[1], 'tokens', number(tokens), 'at_s', number(now_s), 'day', day, 'today', today)
local keep_s = 0
if rate > 0 then keep_s = (burst - tokens) / rate end
if quota >= 0 then keep_s = math.max(keep_s, (day + 1) * 86400 - now_s) end
redis.call('EXPIRE', KEYS[1], string.format('%d', math.min(math.ceil(keep_s) + 60, 1e12)))
return {granted, why, number(wait_s), number(tokens), today, day}
"""
_PROCESSES = "tailrace:rate-processes"
_PRESENT_S = 10
_REPORT = f"""
local time = redis.call('TIME')
local now_s = time[1] + time[2] / 1e6
redis.call('ZADD', KEYS[1], now_s, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_s - {_PRESENT_S})
redis.call('EXPIRE', KEYS[1], {_PRESENT_S})
return redis.call('ZCARD', KEYS[1])
"""


class RedisRateCounts:
    """The counts that all processes share."""

    def __init__(self, address: RedisAddress, *, is_peer: bool = True) -> None:
        """Make the client. Raises ConfigError for a bad password file.

        Args:
            address: The address of Redis.
            is_peer: Whether this process is counted and receives a part of the calls granted ahead. False for the
                standby, which
                answers in place of the counted processes.
        """
        from services.settings.redis_clients import open_async_redis

        self._name = uuid.uuid4().hex if is_peer else None
        self._client = open_async_redis(address, single_connection=True, retries=False)
        self._script = self._client.register_script(_COUNT)
        self._report = self._client.register_script(_REPORT)

    async def ask(self, key_id: str, allowance: Allowance, ask: Ask, timeout_s: float) -> Grant:
        """Count, in one exchange. Raises DependencyUnavailable; the calls may still have been counted."""
        rate, quota = allowance.rate_per_s or 0, -1 if allowance.daily_quota is None else allowance.daily_quota
        limits = (rate, allowance.burst, quota)
        arguments = (ask.cost, ask.batch, ask.spent, ask.unspent, ask.taken_on)
        with redis_as_dependency():
            call = self._script(keys=[_PREFIX + key_id, _PROCESSES], args=[*limits, *arguments])
            granted, why, wait_s, tokens, today, day = await within(timeout_s, call)
        return Grant(
            num_calls=granted,
            refused_by={b"rate": RATE, b"daily quota": QUOTA}.get(why, ""),
            wait_s=float(wait_s),
            tokens=float(tokens),
            today=today,
            day=day,
        )

    async def check(self, timeout_s: float) -> int:
        """Connect if necessary, load the script, and report this process; return the number of processes.

        Raises DependencyUnavailable.
        """
        with redis_as_dependency():
            return await within(timeout_s, self._join())

    async def _join(self) -> int:
        """Load the script ahead: a restarted Redis lacks it, and loading it in a call takes two more exchanges."""
        loading: Any = self._client.script_load(_COUNT)
        await loading
        return 1 if self._name is None else int(await self._report(keys=[_PROCESSES], args=[self._name]))

    async def close(self) -> None:
        """Unregister this process, if Redis answers, and close the connection."""
        if self._name is not None:
            with suppress(DependencyUnavailable), redis_as_dependency():
                leaving: Any = self._client.zrem(_PROCESSES, self._name)
                await within(_LEAVE_TIMEOUT_S, leaving)
        await self._client.aclose()
