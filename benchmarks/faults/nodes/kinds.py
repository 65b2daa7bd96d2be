"""The faults of a cluster of several nodes, by name."""

from benchmarks.faults.kinds import Fault, kill, nothing, run_process
from benchmarks.faults.rows import Phases

PHASES = Phases(before_s=8.0, during_s=20.0, after_s=42.0)
"""Longer than those of one machine: there are a thousand requests in a row at a lower rate."""
_REPLACEMENT = Phases(before_s=8.0, during_s=240.0, after_s=12.0)
"""The longest that all nodes may take, one after another."""

NODE_FAULTS = {
    "none": Fault(nothing, nothing),
    **{
        f"{name.replace('_', '-')}-killed": kill(name)
        for name in ("gateway", "llm", "worker", "edge", "standby", "ingress", "raylet", "store")
    },
    **{f"{name.replace('_', '-')}-killed": kill(name) for name in ("head", "first_node", "last_node")},
    "first-node-cut": Fault(run_process("cut_first_node"), run_process("mend_first_node")),
    "all-replaced": Fault(run_process("replace_all"), phases=_REPLACEMENT),
}
