"""The student depends only on earlier items, and a saved student loads unchanged."""

from pathlib import Path

import pytest
import torch

from models.student import START, read_student, save_student
from tests.support.training.students import random_student


def test_a_row_depends_on_its_own_earlier_items_alone() -> None:
    """Later items, padding and other rows do not change a state."""
    student = random_student()

    states = student(torch.tensor([[START, 3, 4, 5], [START, 7, START, START], [START, 3, 4, 6]]))

    torch.testing.assert_close(states[0, :3], states[2, :3])
    assert not torch.allclose(states[0, 3], states[2, 3])
    torch.testing.assert_close(states[1, :2], student(torch.tensor([[START, 7]]))[0])


@pytest.mark.parametrize("num_hops", [1, 3])
def test_what_is_saved_is_read(tmp_path: Path, num_hops: int) -> None:
    """Save and load keep weights and config in a single file."""
    student, rows = random_student(num_hops=num_hops), torch.tensor([[START, 3, 4]])
    save_student(student, tmp_path / "student.safetensors")

    read = read_student(tmp_path / "student.safetensors")

    assert read.config == student.config
    torch.testing.assert_close(read(rows), student(rows))
