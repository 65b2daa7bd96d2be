"""The next token of text requests. A draw depends on the logits, the request's seed and the position, never on the batch.

Shape suffixes: R requests, V vocabulary.
"""

import numpy as np
import torch
from torch import Tensor

from services.llm.engine.sequence import Sequence
from services.llm.engine.work import TextWork


def sample(logits_RV: Tensor, sequences: list[Sequence]) -> Tensor:
    """Choose one token each (R,): the most probable, the smaller id on ties, where temperature is 0; else by inverse transform."""
    greedy_R = logits_RV.argmax(-1)
    works = [work for sequence in sequences if isinstance(work := sequence.work, TextWork)]
    temperature = np.array([work.temperature for work in works], dtype=np.float32)
    if not temperature.any():
        return greedy_R
    draws = [_uniform(work.seed, len(sequence.tokens)) for work, sequence in zip(works, sequences, strict=True)]
    temperature_R = torch.from_numpy(temperature).to(logits_RV.device)
    drawn_R = _invert(logits_RV / temperature_R.clamp_min(1e-6).unsqueeze(-1), torch.tensor(draws))
    return torch.where(temperature_R > 0, drawn_R, greedy_R)


def _invert(logits_RV: Tensor, uniform_R: Tensor) -> Tensor:
    mass_RV = logits_RV.double().softmax(-1).cumsum(-1)
    target_R1 = uniform_R.to(mass_RV.device).unsqueeze(-1) * mass_RV[:, -1:]
    return torch.searchsorted(mass_RV, target_R1, right=True).squeeze(-1).clamp_max_(logits_RV.shape[-1] - 1)


def _uniform(seed: int, position: int) -> float:
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())
