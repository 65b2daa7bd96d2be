"""Health check of a container: `python -m infra.docker.healthy http:18000/healthz tcp:19000`.

    http:PORT/PATH   answers GET with 200      tcp:PORT   accepts      beat:FILE   was touched recently

Exits with 0 if all probes succeed, else names the first failure. Standard library only, because it runs every few
seconds.
"""

import sys
from functools import partial
from pathlib import Path

from infra.local.supervisor.probes import Probe, accepts, answers_http, beats

_HERE = "127.0.0.1"


def probe_of(word: str) -> Probe:
    """Return the probe of one argument. Raises ValueError."""
    kind, _, rest = word.partition(":")
    if kind == "http":
        port, _, path = rest.partition("/")
        return partial(answers_http, _HERE, int(port), f"/{path}")
    if kind == "tcp":
        return partial(accepts, _HERE, int(rest))
    if kind == "beat":
        return partial(beats, Path(rest))
    raise ValueError(f"{word}: unknown; give http:PORT/PATH, tcp:PORT or beat:FILE")


def main() -> None:
    for word in sys.argv[1:]:
        if not probe_of(word)():
            sys.exit(f"{word}: unhealthy")


if __name__ == "__main__":
    main()
