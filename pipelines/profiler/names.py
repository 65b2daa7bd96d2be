"""The kind of work of an operation, range or frame, by its name (kernels: see `kernels.py`). Pure."""

import re

from pipelines.profiler.kernels import is_product_kernel

_COMMUNICATION = re.compile(
    r"nccl|rccl|msccl|oneccl|nvshmem|c10d|cross_device_reduce|(?:one|two)_?shot_?all_?reduce|^(?:gloo|mpi|ucc|xccl|hccl):"
    r"|rocshmem|deep_ep::|all_?reduce(?!_bucket)|all_?gather|reduce_?scatter|all_?(?:to|2)_?all|^record_param_comms$",
    re.IGNORECASE,
)
_FUSED = re.compile(r"triton_\w+_fused_")
"""Inductor's kernels, named after operations that they fuse or follow."""
_LAUNCH = re.compile(r"(?:cuda|cu|hip|ze|sycl)\w*(?:Launch|Memcpy)")
_COMPILED = re.compile(
    r"Torch-Compiled Region|CompiledFunction|CompiledFxGraph|Call CompiledFxGraph|inductor::"
    r"|(?:graph_\d+_)?(?:triton|cpp)_\w*fused_"
)
_PRODUCT_OPERATION = re.compile(
    r"_*(?:int_|scaled_)?(?:mm|bmm|addmm|baddbmm|addbmm|matmul|einsum|tensordot|lstm|gru)|_addmm_activation|_*cdist(?:_forward)?"
    r"|\w*(?:convolution|conv[123]d|conv_transpose[123]d|linear|rnn|attention|svd|eigh)\w*|linalg_\w+|cholesky\w*"
)
_NO_PRODUCT_OPERATION = re.compile(r"upsample|linalg_vector_norm|linalg_norm|depthwise|bilinear|attention_mask")
_WRAPPER = re.compile(
    r"^(?:tailrace::step$|autograd::engine::|torch::autograd::|torch::jit|ProfilerStep|Optimizer\.|aten::to$"
    r"|## |.*Backward\d*$|.*DataParallel\b|<)"
)
_WORDS_OF_INPUT = set(
    re.findall(
        r"\w+",
        "data input load loading loads loader dataloader dataload next get fetch fetching read reading io prefetch",
    )
)
_WORDS_BESIDE = set(
    re.findall(r"\w+", "inputs batch batches sample samples wait waiting iter iterator time the a for of from queue")
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_WAITS = re.compile(
    r"built-in (?:method|function) (?:sleep|select|poll|epoll|acquire|wait|recv\w*|read\w*|get|_?recv_bytes)\b"
    r"|dataloader\.py"
    r"|queue\.py\(\d+\): get|connection\.py\(\d+\): (?:poll|wait|_?recv)|selectors\.py|threading\.py\(\d+\): wait",
)
_OTHER_WORK = re.compile(
    r"serialization\.py|checkpoint|state_dict|safetensors|logging/|logger|tensorboard|wandb|mlflow|subprocess\.py|synchronize|_dynamo"
    r"|_inductor|triton/(?:compiler|runtime)|autotun|(?:^|[ _.])(?:save|evaluate|validate|log|upload|compile)(?:_|\b)",
    re.IGNORECASE,
)
_OF_BATCHES = re.compile(r"data|batch|sample|input|prefetch", re.IGNORECASE)
_FRAME = re.compile(r"(?:.*: )?(\w+)$")


def is_communication(name: str) -> bool:
    """Whether a kernel or an operation moves data between ranks."""
    return _COMMUNICATION.search(name) is not None and _FUSED.match(name) is None


def is_launch(name: str) -> bool:
    """Whether a runtime call starts a kernel, a graph or a copy."""
    return _LAUNCH.match(name) is not None


def is_compiled(name: str) -> bool:
    """Whether an operation is a compiled region, which may contain any operation of the program."""
    return _COMPILED.match(name) is not None


def is_product_operation(name: str) -> bool:
    """Whether an operation of torch is a matrix product, a convolution, an attention or a decomposition."""
    space, _, base = name.rpartition("::")
    if space not in {"aten", "prims", "mkldnn", ""}:
        return is_product_kernel(base)
    return _PRODUCT_OPERATION.fullmatch(base) is not None and _NO_PRODUCT_OPERATION.search(base) is None


def is_wrapper(name: str) -> bool:
    """Whether an operation only calls others: a node of autograd, a step of an optimizer. Its own time is dispatch."""
    return not is_compiled(name) and ("::" not in name or _WRAPPER.match(name) is not None)


def is_input(name: str) -> bool:
    """Whether a range is the wait for input: torch's own range of a DataLoader, or a name of only loading words.

    `DistributedDataParallel.forward` and `load_state_dict` do not match.
    """
    if name.startswith("enumerate(DataLoader)"):
        return True
    words = {word.lower() for word in _WORD.findall(name)}
    return not words.isdisjoint(_WORDS_OF_INPUT) and words <= _WORDS_OF_INPUT | _WORDS_BESIDE


def is_input_frame(name: str) -> bool:
    """Whether a Python frame makes input in any context: the DataLoader, an iterator, a function named for batches."""
    if "dataloader.py" in name or name.endswith(": __next__"):
        return True
    match = _FRAME.match(name)
    return match is not None and is_input(match[1]) and _OF_BATCHES.search(match[1]) is not None


def is_waiting_frame(name: str) -> bool:
    """Whether a Python frame waits: a sleep, a read, a queue, input, or a function named for one of these."""
    match = _FRAME.match(name)
    return _WAITS.search(name) is not None or is_input_frame(name) or (match is not None and is_input(match[1]))


def is_other_work(name: str) -> bool:
    """Whether waits inside a Python frame are not waits for input: checkpoints, logs, compilers, synchronisation."""
    return _OTHER_WORK.search(name) is not None
