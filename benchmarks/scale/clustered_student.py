"""A student over synthetic items, exported like a real one: `python -m benchmarks.scale.clustered_student SIZE FOLDER`.

Items form groups of about fifty, and groups form topics, like trained embeddings; rows of independent random numbers
have no cells at all, and are the worst case of any search. The spread of items in their group is set so that 11,479 of
them need the same fraction of rows for 97 % of the exact top ten as the student trained on Amazon Beauty, which has as
many items (docs/lab-notes/serving.md). The state is the newest item and the mean of the attended history. FOLDER gets
`student.onnx`, for a large catalogue `student_table/`, and `requests.npz`: histories of users with three groups of
interest, and the exact top ten of each.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from models.student import Hop, StudentConfig, StudentModel
from pipelines.publication.student_table import exact_top, export_student

REQUESTS = "requests.npz"
NUM_REQUESTS = 500
_NUM_KNOWN = 1_000
_HISTORY = 50
_ITEMS_PER_GROUP, _GROUPS_PER_TOPIC = 50, 30
_INTERESTS = (0.6, 0.3, 0.1)
_STRAY = 1.0
_NORM, _NORM_SPREAD = 0.84, 0.25


def main(num_items: int, folder: Path) -> None:
    """Write the folder. The export uses other histories than the requests."""
    rng = np.random.default_rng(0)
    embedded_VD, group_V = _clustered(rng, num_items)
    student = _student_of(embedded_VD)
    histories = _histories(rng, group_V, _NUM_KNOWN + NUM_REQUESTS)
    table = export_student(student, histories[:_NUM_KNOWN], folder)
    if table is not None:
        sys.stderr.write(f"{table.num_scored} rows in {len(table.centroids_CD)} cells find {table.recall:.3f}\n")
    requests = histories[_NUM_KNOWN:]
    np.savez(folder / REQUESTS, histories=np.stack(requests), top=np.stack(exact_top(student, requests)))


def _clustered(rng: np.random.Generator, num_items: int, size: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Return embeddings (V, D) with directions of different weight, and each item's group."""
    num_groups = max(len(_INTERESTS), num_items // _ITEMS_PER_GROUP)
    topics = rng.standard_normal((max(2, num_groups // _GROUPS_PER_TOPIC), size))
    groups = topics[rng.integers(0, len(topics), num_groups)] + 0.8 * rng.standard_normal((num_groups, size))
    popularity = 0.2 + rng.pareto(1.5, num_groups)
    group_V = rng.choice(num_groups, num_items, p=popularity / popularity.sum())
    rows_VD = groups[group_V].astype(np.float32)
    rows_VD += _STRAY * rng.standard_normal(rows_VD.shape, dtype=np.float32)
    rows_VD *= (1 / np.arange(1, size + 1) ** 0.5).astype(np.float32)
    norms_V = _NORM * np.exp(_NORM_SPREAD * rng.standard_normal(num_items))
    rows_VD *= (norms_V / np.linalg.norm(rows_VD, axis=1)).astype(np.float32)[:, None]
    return rows_VD, group_V


@torch.no_grad()
def _student_of(rows_VD: np.ndarray) -> StudentModel:
    """Return a student of the served size with these rows."""
    num_items, size = rows_VD.shape
    config = StudentConfig(
        num_items=num_items, hidden_size=size, feed_forward=128, num_heads=4, num_hops=2, max_items=200
    )
    torch.manual_seed(0)
    student = StudentModel(config)
    student.embedding.weight[1:] = torch.from_numpy(rows_VD)
    student.embedding.weight[0] = student.embedding.weight[1:].mean(dim=0)
    for hop in student.hops:
        assert isinstance(hop, Hop)
        hop.value.weight.copy_(torch.eye(size))
        hop.output.weight.copy_(0.05 * torch.eye(size))
        hop.down.weight.zero_()
    return student.eval()


def _histories(rng: np.random.Generator, group_V: np.ndarray, num: int) -> list[np.ndarray]:
    """Draw histories of items from three groups each."""
    items_V = np.argsort(group_V, kind="stable")
    starts = np.searchsorted(group_V[items_V], np.arange(group_V.max() + 2))
    histories = []
    for _ in range(num):
        groups = group_V[rng.integers(0, len(group_V), len(_INTERESTS))]
        drawn = rng.choice(groups, _HISTORY, p=_INTERESTS)
        histories.append(items_V[rng.integers(starts[drawn], starts[drawn + 1])])
    return histories


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
