"""Replace the agent of Ray's dashboard, which Ray's node server waits for: `ray_agent.py --session-dir=DIR ...`.

Without the dashboard the agent only imports Ray, a second of the start, and then says that it has no ports. This says
the same, and ends with the node server. Standard library only. The agent was read in ray 2.60.0.
"""

import argparse
import os
import select
from pathlib import Path

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
_NONE = "-1"


def main() -> None:
    """Write that no port is open, then wait for the parent's end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--session-dir", type=Path, required=True)
    parser.add_argument("--node-id", required=True)
    options, _ = parser.parse_known_args()
    parent = select.poll()
    parent.register(os.pidfd_open(os.getppid()), select.POLLIN)
    for name in PORTS:
        write_port(options.session_dir / f"{name}_{options.node_id}", _NONE)
    parent.poll()


def write_port(file: Path, port: str) -> None:
    """Write a port for the node server, which looks for the file and must never read half of it."""
    unfinished = file.with_name(f"{file.name}.tmp")
    unfinished.write_text(port)
    unfinished.replace(file)


if __name__ == "__main__":
    main()
