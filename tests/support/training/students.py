"""Small students with random weights everywhere, including weights that start at zero in training."""

import torch

from models.student import StudentConfig, StudentModel


def random_student(num_items: int = 30, num_hops: int = 2, max_items: int = 12) -> StudentModel:
    """Build a student."""
    torch.manual_seed(0)
    config = StudentConfig(
        num_items=num_items, hidden_size=16, feed_forward=24, num_heads=4, num_hops=num_hops, max_items=max_items
    )
    student = StudentModel(config)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.normal_()
    return student.eval()
