"""Names the bottleneck of a rank, and the first thing to try. Pure: shares in, one sentence out.

Losses take precedence over useful work: waits, exposed communication and launch gaps can be repaired, while a device
that computes does its work. So each loss has a low threshold, and the largest loss above its own threshold is named; if
all losses together take `LOST`, the largest two are named. A device is compute-bound or memory-bound only if one of the
two takes nearly all of the time, since in a healthy step products and the rest share it. A trace with too few kernels,
or mostly kernels of unknown kind, gets no verdict.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipelines.profiler.events import OUR_METADATA
from pipelines.profiler.operations import OperationCost
from pipelines.profiler.shares import Shares


class Bottleneck(StrEnum):
    """The bottleneck of a step."""

    COMPUTE = "compute"
    MEMORY = "memory"
    COMMUNICATION = "communication"
    LAUNCH = "launch"
    DATA_WAIT = "data wait"
    COPY = "copy"
    HOST = "host"
    NONE = "none"
    UNKNOWN = "unknown"
    """The trace does not tell."""


LOSSES: Mapping[Bottleneck, float] = {
    Bottleneck.DATA_WAIT: 0.2,
    Bottleneck.COMMUNICATION: 0.25,
    Bottleneck.COPY: 0.2,
    Bottleneck.HOST: 0.3,
    Bottleneck.LAUNCH: 0.5,
}
"""The share of the span above which a loss is named.

Trainers warn of waits for data above 20 % of a step, and copies are waits of the same kind. Data-parallel training with
overlapped gradients still shows some loss, up to a fifth on slow links. A host that writes a checkpoint within the
profile is not a bottleneck at a quarter. Eager code leaves gaps of a third around operations of usual size, more so in
profiles, where each operation costs more; if launching is the bottleneck, gaps and fixed costs exceed half.
"""
LOST = 0.45
"""If all losses together reach this share, the largest is named even below its threshold. Healthy steps lose less."""
_ENOUGH_ACTIVITIES, _ENOUGH_US = 10, 1_000.0
"""Fewer kernels and copies, in less time than this, are not a whole step: start-up, a warm-up, the end of a profile."""
_SLIVER, _FEW = 0.01, 100
"""The same holds for this few in this small a share of the recording."""
_UNDESCRIBED = 0.5
"""If kernels of unknown kind take this share, neither compute nor memory is named."""
_UNRECORDED_WAIT = 0.3
"""Threshold for a wait for data that is mostly unrecorded: other work on the processor leaves such gaps too."""
COMPUTE_SHARE, MEMORY_SHARE = 0.88, 0.85
"""Transformers in training spend 50 to 75 % of their time in products and 20 to 45 % in memory-bound operations.

Convolutional nets spend up to 80 % in either; neither is then named. If one of the two is the bottleneck, the other and
all losses share the remaining tenth.
"""


@dataclass(frozen=True, slots=True)
class BottleneckReport:
    """The bottleneck, its share of the span, and the sentence."""

    bottleneck: Bottleneck
    share: float
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """Facts that the advice depends on."""

    is_of_gpu: bool
    interrupted: float
    """The share of the span when other work used the processor; the verdict covers the rest."""
    is_unrecorded: bool
    """Whether most of the wait for data is unrecorded time."""
    dtype: str | None
    """The products' dtype; None if the trace does not tell."""
    operations: Sequence[OperationCost]
    num_activities: int = _ENOUGH_ACTIVITIES
    active_us: float = _ENOUGH_US
    span_us: float = _ENOUGH_US
    recorded_us: float = 0.0
    """From the first event of any kind to the last event."""
    unknown: float = 0.0
    """The share of the span in kernels that neither a name nor shapes describe."""
    lacks_kernels: bool = False
    """Whether the trace has launches but no kernels."""
    half: str = "bf16"
    """The half precision that the device multiplies fast."""
    copies: str = ""
    """The direction of most of the copies' time, such as HtoD."""

    @property
    def is_of_engine(self) -> bool:
        """Whether the engine's compiled code takes the most time."""
        return bool(self.operations) and self.operations[0].name.startswith(f"{OUR_METADATA}::")

    @property
    def lack(self) -> str:
        """Evidence that the trace lacks for a verdict, and how to record it; empty if it suffices."""
        if self.lacks_kernels:
            return "the trace has launches but no kernels; record with ProfilerActivity.CUDA too"
        is_short = self.num_activities < _ENOUGH_ACTIVITIES and self.active_us < _ENOUGH_US
        is_sliver = self.num_activities < _FEW and self.span_us < _SLIVER * self.recorded_us
        if self.is_of_gpu and (is_short or is_sliver):
            took = f"{self.num_activities:,} kernels and copies take {self.active_us / 1_000:,.3f} ms"
            return f"{took} of {self.recorded_us / 1_000:,.1f} ms recorded; record some whole steps"
        return ""


def verdict_of(shares: Shares, about: Circumstances) -> BottleneckReport:
    """Return the verdict of one rank."""
    if about.lack:
        return BottleneckReport(Bottleneck.UNKNOWN, 0.0, f"The trace holds too little: {about.lack}.")
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
        kind = max(over, key=lambda bottleneck: over[bottleneck])
        return BottleneckReport(kind, over[kind], _sentence(kind, over[kind], about))
    if about.is_unrecorded:  # too little to be named, and no sign of what else bounds the step
        shares = _without(shares, "data_wait", shares.data_wait)
        del lost[Bottleneck.DATA_WAIT]
    if sum(lost.values()) >= LOST:
        return _of_several(lost, about)
    if about.unknown >= _UNDESCRIBED:
        longest = f", {about.operations[0].name} the most" if about.operations else ""
        what = f"{about.unknown:.0%} of the time is in kernels of unknown kind{longest}"
        return BottleneckReport(Bottleneck.UNKNOWN, about.unknown, f"No bottleneck is named: {what}.")
    for kind, share, enough in (
        (Bottleneck.COMPUTE, shares.compute, COMPUTE_SHARE),
        (Bottleneck.MEMORY, shares.memory, MEMORY_SHARE),
    ):
        if share >= enough:
            return BottleneckReport(kind, share, _sentence(kind, share, about))
    kind, share = max(lost.items(), key=lambda pair: pair[1])
    sentence = (
        f"No bottleneck: products take {shares.compute:.0%} of the time, other computing {shares.memory:.0%},"
        f" and the largest loss, {_NAMES[kind]}, {share:.0%}."
    )
    return BottleneckReport(Bottleneck.NONE, share, sentence)


def _of_several(lost: Mapping[Bottleneck, float], about: Circumstances) -> BottleneckReport:
    """Name the largest of several losses, with their sum and the next one."""
    (kind, share), (second, its_share), *_ = sorted(lost.items(), key=lambda pair: -pair[1])
    what = (
        f"{sum(lost.values()):.0%} of the time is lost in several ways, {_NAMES[kind]} {share:.0%} and "
        f"{_NAMES[second]} {its_share:.0%}"
    )
    return BottleneckReport(kind, share, f"{what[0].upper()}{what[1:]}: {_advice(kind, about)}.")


def _without(shares: Shares, name: str, less: float) -> Shares:
    """Return the shares of the span without this much of one of them."""
    if not 0 < less < 1:
        return shares
    kept = dict(shares.items()) | {name: max(0.0, getattr(shares, name) - less)}
    return Shares(**{name: share / (1 - less) for name, share in kept.items()})


_SPECIFICITY = {Bottleneck.UNKNOWN: 0, Bottleneck.NONE: 1}
"""Among equally frequent bottlenecks, a named one comes first."""


def common_verdict(verdicts: Sequence[BottleneckReport]) -> BottleneckReport:
    """Return the verdict of several ranks: the most frequent bottleneck, in the rank where it is largest."""
    counts = Counter(report.bottleneck for report in verdicts)
    most = max(counts, key=lambda kind: (counts[kind], _SPECIFICITY.get(kind, 2)))
    worst = max((report for report in verdicts if report.bottleneck is most), key=lambda report: report.share)
    if len(verdicts) == 1:
        return worst
    return BottleneckReport(most, worst.share, f"On {counts[most]} of {len(verdicts)} ranks: {worst.sentence}")


_NAMES = {
    Bottleneck.DATA_WAIT: "waiting for data",
    Bottleneck.COMMUNICATION: "exposed communication",
    Bottleneck.COPY: "copies that no computing hides",
    Bottleneck.HOST: "other work of the host",
    Bottleneck.LAUNCH: "launching",
}


_COPIES = {
    "HtoD": ("from the host to the device", "copy from pinned memory with non_blocking=True first"),
    "DtoH": ("from the device to the host", "read fewer results back first, and once a step (item, cpu, numpy)"),
    "DtoD": ("within the device", "avoid clones and changes of layout first (clone, contiguous, cat)"),
    "PtoP": ("between devices", "exchange less between devices first, and while they compute"),
    "fill": ("and fills of memory", "fill buffers once and reuse them first (zero_grad(set_to_none=True))"),
}
"""By direction: place of the loss, and advice."""


def _sentence(kind: Bottleneck, share: float, about: Circumstances) -> str:
    return f"{_what(kind, share, about)}: {_advice(kind, about)}."


def _what(kind: Bottleneck, share: float, about: Circumstances) -> str:
    longest = f", {about.operations[0].name} the most" if about.operations else ""
    match kind:
        case Bottleneck.COMPUTE:
            return f"Compute is the bottleneck, with {share:.0%} of the time in matrix products{longest}"
        case Bottleneck.MEMORY:
            return (
                f"Memory bandwidth is the bottleneck, with {share:.0%} of the time in memory-bound operations{longest}"
            )
        case Bottleneck.COMMUNICATION:
            return (
                f"Communication is the bottleneck, with {share:.0%} of the time in collectives that no computing hides"
            )
        case Bottleneck.COPY:
            where = _COPIES.get(about.copies, _COPIES["HtoD"])[0]
            return f"Copies {where} are the bottleneck, with {share:.0%} of the time that no computing hides"
        case Bottleneck.HOST:
            return f"The host is the bottleneck, with {share:.0%} of the time, in which it works and the device is idle"
        case Bottleneck.LAUNCH:
            where = "in gaps between kernels" if about.is_of_gpu else "in dispatching small operations and between them"
            return f"Launching is the bottleneck, with {share:.0%} of the time {where}"
        case _:
            silent = ", most of it without recorded activity" if about.is_unrecorded else ""
            return f"Waiting for data is the bottleneck, with {share:.0%} of the time{silent}"


def _advice(kind: Bottleneck, about: Circumstances) -> str:
    match kind:
        case Bottleneck.MEMORY if about.is_of_engine:
            return "read fewer bytes first, with weights in int8 (TAILRACE_LLM_WEIGHT_KIND) or bf16"
        case Bottleneck.COMPUTE if about.dtype == "fp32":
            return f"compute in {about.half} first"
        case Bottleneck.COMPUTE:
            return (
                "compute less first, by a smaller model, shorter sequences or no recomputation; otherwise use more "
                "devices"
            )
        case Bottleneck.MEMORY if about.dtype == "fp32":
            return f"fuse the operations first (torch.compile), then halve their bytes with {about.half}"
        case Bottleneck.MEMORY:
            return "fuse the operations first (torch.compile), or give each read more work with a larger batch"
        case Bottleneck.COMMUNICATION:
            return (
                "overlap it with computing first (in training by DDP's or FSDP's buckets), then exchange larger "
                "messages less often"
            )
        case Bottleneck.COPY:
            return _COPIES.get(about.copies, _COPIES["HtoD"])[1]
        case Bottleneck.HOST:
            return "find its work with stacks (with_stack=True) and take it out of the step first"
        case Bottleneck.LAUNCH if about.is_of_gpu:
            return "capture the step in a CUDA graph first (torch.compile, mode reduce-overhead), or enlarge the batch"
        case Bottleneck.LAUNCH:
            return "enlarge the batch or join the small operations first (torch.compile, foreach and fused optimizers)"
        case _ if about.is_unrecorded:
            return (
                "let workers load ahead first (num_workers, prefetch_factor); if it is not input, record stacks to "
                "find the cause"
            )
        case _:
            return "let workers load ahead first (num_workers, prefetch_factor)"
