"""One gateway process's counter of calls: `python -m tests.support.rate_process REDIS_PORT JSON_ALLOWANCE NUM_CALLS`.

Makes calls of one key until so many were made, or three refusals apart from each other; prints what happened as JSON.
"""

import asyncio
import json
import sys
import time

from services.contracts.access import Allowance
from services.errors import QuotaExceeded
from services.features.rate_counts import RedisRateCounts
from services.gateway.access.shared_rates import SharedRates
from services.settings.addresses import RedisAddress

NUM_PROCESSES = 2
PATIENT_S = 1.0
"""Of a test, in which no result may depend on how fast this machine is."""


async def main(port: int, allowance: Allowance, num_calls: int) -> None:
    """Call and count."""
    counts = RedisRateCounts(RedisAddress(port=port), NUM_PROCESSES)
    rates = SharedRates(counts, NUM_PROCESSES, timeout_s=PATIENT_S)
    await rates.start()
    admitted, refusals, took_s, started_unix_s = 0, 0, [], time.time()
    for _ in range(num_calls):
        began_s = time.perf_counter()
        try:
            await rates.spend("key", allowance)
        except QuotaExceeded as refused:
            refusals += 1
            if refusals == 3:
                break
            await asyncio.sleep(min(1.5, refused.retry_after_s or 0.0))
        else:
            admitted += 1
            took_s.append(time.perf_counter() - began_s)
            await asyncio.sleep(0)
    await rates.stop()
    took_s.sort()
    about = {"admitted": admitted, "from_unix_s": started_unix_s, "to_unix_s": time.time()}
    middle_us, late_us = (round(took_s[int(len(took_s) * share)] * 1e6, 1) if took_s else None for share in (0.5, 0.99))
    json.dump({**about, "p50_us": middle_us, "p99_us": late_us}, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Allowance(**json.loads(sys.argv[2])), int(sys.argv[3])))
