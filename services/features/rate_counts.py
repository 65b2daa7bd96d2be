"""Tokens and calls of the day by key in Redis, counted by one script: one exchange, one clock (Redis' own), no race.

A hash for each key: the tokens in its bucket and the time of that, the day and its calls. It expires when it says no more than a new
one would. Constructed and used on one event loop; a connection is made at the first use, and all exchanges share it.
"""

from typing import Any

from services.contracts.access import QUOTA, RATE, Allowance, Ask, Grant
from services.features.redis_calls import redis_as_dependency, within
from services.settings.addresses import RedisAddress

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
  granted = cost + math.min(batch, math.floor(spare / tonumber(ARGV[9])))
  if rate > 0 then tokens = tokens - granted end
  today = today + granted
end
local number = function(value) return string.format('%.17g', value) end
redis.call('HSET', KEYS[1], 'tokens', number(tokens), 'at_s', number(now_s), 'day', day, 'today', today)
local keep_s = 0
if rate > 0 then keep_s = (burst - tokens) / rate end
if quota >= 0 then keep_s = math.max(keep_s, (day + 1) * 86400 - now_s) end
redis.call('EXPIRE', KEYS[1], math.ceil(keep_s) + 60)
return {granted, why, number(wait_s), number(tokens), today, day}
"""


class RedisRateCounts:
    """The counts that all processes share."""

    def __init__(self, address: RedisAddress, num_processes: int) -> None:
        """Make the client; a process is granted ahead at most its share of what is left. Raises ConfigError for a bad password file."""
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        self._num_processes = num_processes
        self._client = Redis(**address.client_options(), single_connection_client=True, retry=Retry(NoBackoff(), 0))
        self._script = self._client.register_script(_COUNT)

    async def ask(self, key_id: str, allowance: Allowance, ask: Ask, timeout_s: float) -> Grant:
        """Count, in one exchange. Raises DependencyAway; then it may have been counted."""
        rate, quota = allowance.rate_per_s or 0, -1 if allowance.daily_quota is None else allowance.daily_quota
        limits = (rate, allowance.burst, quota)
        arguments = (ask.cost, ask.batch, ask.spent, ask.unspent, ask.taken_on, self._num_processes)
        with redis_as_dependency():
            call = self._script(keys=[_PREFIX + key_id], args=[*limits, *arguments])
            granted, why, wait_s, tokens, today, day = await within(timeout_s, call)
        return Grant(
            num_calls=granted,
            refused_by={b"rate": RATE, b"daily quota": QUOTA}.get(why, ""),
            wait_s=float(wait_s),
            tokens=float(tokens),
            today=today,
            day=day,
        )

    async def check(self, timeout_s: float) -> None:
        """Connect if need be, prepare the first exchange, and wait for an answer. Raises DependencyAway."""
        with redis_as_dependency():
            await within(timeout_s, self._load())

    async def _load(self) -> None:
        """Load the script ahead: a Redis that was started anew has none, and loading it in a call takes two more exchanges."""
        loading: Any = self._client.script_load(_COUNT)
        await loading

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()
