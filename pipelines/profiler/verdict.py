"""Names the bottleneck of a rank, and the first thing to try. Pure: shares in, one sentence out.

What is lost counts before what is used: waits, exposed communication and launch gaps end when they are repaired, while a device that computes
is doing its work. So each loss has a low threshold, and the largest loss above its own is named; a device is called bound by compute or by memory
only where one of the two takes nearly all of the time, since in a healthy step products and the rest share it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipelines.profiler.operations import Operation
from pipelines.profiler.shares import Shares
from pipelines.profiler.trace import OUR_METADATA


class Bottleneck(StrEnum):
    """What bounds a step."""

    COMPUTE = "compute"
    MEMORY = "memory"
    COMMUNICATION = "communication"
    LAUNCH = "launch"
    DATA_WAIT = "data wait"
    COPY = "copy"
    HOST = "host"
    NONE = "none"


LOSSES: Mapping[Bottleneck, float] = {
    Bottleneck.DATA_WAIT: 0.2,
    Bottleneck.COMMUNICATION: 0.25,
    Bottleneck.COPY: 0.2,
    Bottleneck.HOST: 0.3,
    Bottleneck.LAUNCH: 0.5,
}
"""The share of the span from which a loss is named.

A trainer warns of waits for data above 20 % of a step, and copies are waits of the same kind. Data-parallel training that overlaps its gradients
still shows some of them, up to a fifth on slow links. A host that writes a checkpoint within the profile is no bottleneck yet at a quarter.
Eager code leaves gaps of a third around operations of usual size, in profiles above all, which make each operation dearer; where launching is the
bottleneck, they and the fixed costs are more than half.
"""
_UNRECORDED_WAIT = 0.3
"""From which a wait for data is named of most of which nothing was recorded: what else runs on the processor leaves such gaps too."""
COMPUTE_SHARE, MEMORY_SHARE = 0.88, 0.85
"""Transformers in training spend 50 to 75 % of their time in products and 20 to 45 % in operations bound by memory, nets of convolutions up to 80 %
in either: neither is then named. Where one of the two is the bottleneck, the other and all losses share what is left of a tenth."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The bottleneck, its share of the span, and the sentence."""

    bottleneck: Bottleneck
    share: float
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What the advice depends on."""

    is_of_gpu: bool
    interrupted: float
    """The share of the span in which something else had the processor; the verdict is of the rest."""
    is_unrecorded: bool
    """Whether most of the wait for data is time of which nothing was recorded."""
    dtype: str
    """Of the most expensive operation."""
    operations: Sequence[Operation]

    @property
    def is_of_engine(self) -> bool:
        """Whether the engine's compiled code takes the most."""
        return bool(self.operations) and self.operations[0].name.startswith(f"{OUR_METADATA}::")


def verdict_of(shares: Shares, about: Circumstances) -> Verdict:
    """Return the verdict of one rank."""
    shares = _without(shares, "host", about.interrupted)
    lost = {
        Bottleneck.DATA_WAIT: shares.data_wait,
        Bottleneck.COMMUNICATION: shares.communication_exposed,
        Bottleneck.COPY: shares.copy,
        Bottleneck.HOST: shares.host,
        Bottleneck.LAUNCH: shares.launch,
    }
    least = dict(LOSSES)
    if about.is_unrecorded:
        least[Bottleneck.DATA_WAIT] = _UNRECORDED_WAIT
    over = {kind: share for kind, share in lost.items() if share >= least[kind]}
    if over:
        kind = max(over, key=lambda one: over[one])
        return Verdict(kind, over[kind], _sentence(kind, over[kind], about))
    if about.is_unrecorded:  # too little to be named, and no sign of what else bounds the step
        shares = _without(shares, "data_wait", shares.data_wait)
    for kind, share, enough in (
        (Bottleneck.COMPUTE, shares.compute, COMPUTE_SHARE),
        (Bottleneck.MEMORY, shares.memory, MEMORY_SHARE),
    ):
        if share >= enough:
            return Verdict(kind, share, _sentence(kind, share, about))
    kind, share = max(lost.items(), key=lambda one: one[1])
    sentence = (
        f"There is no bottleneck: products take {shares.compute:.0%} of the time, other computing {shares.memory:.0%},"
        f" and the largest loss, {_NAMES[kind]}, {share:.0%}."
    )
    return Verdict(Bottleneck.NONE, share, sentence)


def _without(shares: Shares, name: str, less: float) -> Shares:
    """Return the shares of the span without so much of one of them."""
    if not 0 < less < 1:
        return shares
    kept = dict(shares.items()) | {name: max(0.0, getattr(shares, name) - less)}
    return Shares(**{one: share / (1 - less) for one, share in kept.items()})


def common_verdict(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of several ranks: that of the bottleneck which most of them share, in the rank where it is largest."""
    kinds = [one.bottleneck for one in verdicts]
    most = max(dict.fromkeys(kinds), key=lambda kind: (kinds.count(kind), kind is not Bottleneck.NONE))
    worst = max((one for one in verdicts if one.bottleneck is most), key=lambda one: one.share)
    if len(verdicts) == 1:
        return worst
    return Verdict(most, worst.share, f"On {kinds.count(most)} of {len(verdicts)} ranks: {worst.sentence}")


_NAMES = {
    Bottleneck.DATA_WAIT: "waiting for data",
    Bottleneck.COMMUNICATION: "exposed communication",
    Bottleneck.COPY: "copies that nothing hides",
    Bottleneck.HOST: "other work of the host",
    Bottleneck.LAUNCH: "launching",
}


def _sentence(kind: Bottleneck, share: float, about: Circumstances) -> str:
    return f"{_what(kind, share, about)}: {_advice(kind, about)}."


def _what(kind: Bottleneck, share: float, about: Circumstances) -> str:
    longest = f", {about.operations[0].name} the most" if about.operations else ""
    match kind:
        case Bottleneck.COMPUTE:
            return f"Compute is the bottleneck, with {share:.0%} of the time in matrix products{longest}"
        case Bottleneck.MEMORY:
            return f"Memory bandwidth is the bottleneck, with {share:.0%} of the time in operations that it bounds{longest}"
        case Bottleneck.COMMUNICATION:
            return (
                f"Communication is the bottleneck, with {share:.0%} of the time in collectives that no computing hides"
            )
        case Bottleneck.COPY:
            return f"Copies between host and device are the bottleneck, with {share:.0%} of the time that no computing hides"
        case Bottleneck.HOST:
            return f"The host is the bottleneck, with {share:.0%} of the time in which it works and the device does not"
        case Bottleneck.LAUNCH:
            where = "in gaps between kernels" if about.is_of_gpu else "in dispatching small operations and between them"
            return f"Launching is the bottleneck, with {share:.0%} of the time {where}"
        case _:
            silent = ", of most of which nothing was recorded" if about.is_unrecorded else ""
            return f"Waiting for data is the bottleneck, with {share:.0%} of the time{silent}"


def _advice(kind: Bottleneck, about: Circumstances) -> str:
    match kind:
        case Bottleneck.MEMORY if about.is_of_engine:
            return "read fewer bytes first, with weights in int8 (TAILRACE_LLM_WEIGHT_KIND) or bf16"
        case Bottleneck.COMPUTE if about.dtype == "fp32":
            return "compute in bf16 first"
        case Bottleneck.COMPUTE:
            return "compute less first, by a smaller model, shorter sequences or no recomputation; else more devices"
        case Bottleneck.MEMORY:
            return "fuse the operations first (torch.compile), then halve their bytes with bf16"
        case Bottleneck.COMMUNICATION:
            return "overlap it with the backward pass first (DDP's or FSDP's buckets), then exchange less often by accumulating gradients"
        case Bottleneck.COPY:
            return "copy from pinned memory with non_blocking=True first"
        case Bottleneck.HOST:
            return "find its work with stacks (with_stack=True) and take it out of the step first"
        case Bottleneck.LAUNCH if about.is_of_gpu:
            return "capture the step in a CUDA graph first (torch.compile, mode reduce-overhead), or enlarge the batch"
        case Bottleneck.LAUNCH:
            return "enlarge the batch or join the small operations first (torch.compile, foreach and fused optimizers)"
        case _ if about.is_unrecorded:
            return "let workers load ahead first (num_workers, prefetch_factor); if it is no input, record stacks to see what it is"
        case _:
            return "let workers load ahead first (num_workers, prefetch_factor)"
