"""The machines of a cluster in network namespaces, and what runs on them; makes none."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults.nodes.layout import FRONT, HEAD, Layout
from benchmarks.faults.nodes.parts import cluster_environment, cluster_parts, cluster_settings, store_parts
from infra.local.servers.node import serve_config

LAYOUT = Layout("tr-test", Path("/somewhere/nodes"), num_nodes=3)


def test_every_part_of_a_node_runs_on_it_and_the_edge_has_every_node(tmp_path: Path) -> None:
    """Ray and one stream worker on each node but the head, which runs no replica; the edge, the stores and the standby are in front."""
    settings = cluster_settings(LAYOUT, tmp_path)
    environment = cluster_environment(LAYOUT, settings, tmp_path / "token")

    parts = {part.name: part for part in (*store_parts(settings), *cluster_parts(LAYOUT, settings, environment))}

    for name, machine in (("head", HEAD), ("node1", "node1"), ("node2", "node2"), ("worker-1", "node2")):
        assert LAYOUT.namespace(machine) in parts[name].command
    assert parts["worker-1"].environment["TAILRACE_WORKER_INDEX"] == "1"
    hosts = [word for word in parts["edge"].command if word.startswith("10.")]
    assert hosts == [LAYOUT.address(machine) for machine in ("node1", "node2", FRONT)]
    assert "--num-cpus=0" in parts["head"].command
    assert {name for name, part in parts.items() if "netns" not in part.command} == {
        *("valkey", "control-store", "broker", "standby", "edge")
    }


def test_each_node_has_one_gateway_and_one_llm_replica(tmp_path: Path) -> None:
    """So a node that ends takes one of each with it, and its return brings them back."""
    (application,) = serve_config(cluster_settings(LAYOUT, tmp_path), num_nodes=2)["applications"]

    assert [(one["name"], one["num_replicas"], one["max_replicas_per_node"]) for one in application["deployments"]] == [
        ("Gateway", 2, 1),
        ("llm", 2, 1),
    ]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--nodes", "2"), "a head and two nodes with replicas are 3 at least"),
        (("--fault", "first-node-cut"), "no fault without --nodes"),
        (("--nodes", "3", "--fault", "store-hang"), "no fault with --nodes"),
        (("--compose", "shop", "--key-file", "key", "--fault", "store-hang"), "no fault with --compose"),
        (("--compose", "shop"), "--compose and --key-file: give both or none"),
    ],
)
def test_what_a_stack_cannot_do_is_refused_before_anything_starts(arguments: tuple[str, ...], why: str) -> None:
    """With the argument and the reason."""
    command = [sys.executable, "-m", "benchmarks.faults", "--json", "out.json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert why in done.stderr
