"""What a step must move and compute at least, and what a machine reaches at best.

The roofline model (Williams, Waterman and Patterson 2009): a step takes at least its bytes over the memory's rate and its
FLOPs over the processor's. Pure values: no torch, no clock.
"""

from dataclasses import dataclass
from enum import StrEnum


class StepKind(StrEnum):
    """What a step's rows were."""

    PREFILL = "prefill"
    DECODE = "decode"
    BEAM = "beam"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class StepCost:
    """The least that a step moves and computes; a multiplication and its addition are two FLOPs."""

    kind: StepKind
    num_bytes: float
    flops: float


@dataclass(frozen=True, slots=True)
class Limits:
    """What a machine reaches at best, measured: bytes read a second and FLOPs a second in the model's dtype."""

    bytes_per_s: float
    flops_per_s: float
