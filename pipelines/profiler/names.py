"""What the name of a kernel, an operation or a range says of its work. Pure.

Names come from many libraries, so these are patterns, and what none of them knows gets the safer answer: a kernel that is no known matrix
product is bound by memory, as nearly all others are.
"""

import re

_COMMUNICATION = re.compile(
    r"nccl|rccl|msccl|oneccl|nvshmem|c10d|cross_device_reduce|(?:one|two)_?shot_?all_?reduce|^(?:gloo|mpi|ucc|xccl|hccl):"
    r"|all_?reduce(?!_bucket)|all_?gather|reduce_?scatter|all_?to_?all|^record_param_comms$",
    re.IGNORECASE,
)
_PRODUCT = re.compile(
    r"gemm(?!v)|gemmx|cutlass|xmma|cijk_|nvjet|_mma_|wgmma|hmma|splitk|winograd|implicit_con|conv(?:olve|olution|_?[123]d|_fprop|_dgrad|_wgrad)"
    r"|wgrad|dgrad|fprop|flash_|fmha|_mha_|attention|triton_(?:mm|bmm|tem)|(?:^|[^a-z])(?:mm|bmm|addmm|baddbmm|addbmm|matmul|linear|lstm|gru)(?:[^a-z]|$)",
    re.IGNORECASE,
)
_NO_PRODUCT = re.compile(
    r"elementwise|reduce_kernel|softmax|norm|bn_[bf]w|pool|upsample|triton_(?:poi|per|red|for|unk)_", re.IGNORECASE
)
_PRODUCT_OPERATION = re.compile(
    r"_*(?:int_|scaled_)?(?:mm|bmm|addmm|baddbmm|addbmm|matmul|einsum|tensordot|lstm|gru)|_addmm_activation|_*cdist(?:_forward)?"
    r"|\w*(?:convolution|conv[123]d|conv_transpose[123]d|linear|rnn|attention|svd|eigh)\w*|linalg_\w+|cholesky\w*"
)
_NO_PRODUCT_OPERATION = re.compile(r"upsample|linalg_vector_norm|linalg_norm|depthwise|bilinear|attention_mask")
_WRAPPER = re.compile(
    r"^(?:tailrace::step$|autograd::engine::|torch::autograd::|torch::jit|ProfilerStep|Optimizer\.|aten::to$|## |.*Backward\d*$|.*DataParallel\b|<)"
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
    r"built-in (?:method|function) (?:sleep|select|poll|epoll|acquire|wait|recv\w*|read\w*|get|_?recv_bytes)\b|dataloader\.py"
    r"|queue\.py\(\d+\): get|connection\.py\(\d+\): (?:poll|wait|_?recv)|selectors\.py|threading\.py\(\d+\): wait",
)
_FRAME = re.compile(r"(?:.*: )?(\w+)$")


def is_communication(name: str) -> bool:
    """Whether a kernel or an operation moves data between ranks."""
    return _COMMUNICATION.search(name) is not None


def is_product_kernel(name: str) -> bool:
    """Whether a device's kernel is a matrix product, a convolution or an attention, whose work grows faster than its data."""
    return _PRODUCT.search(name) is not None and _NO_PRODUCT.search(_outer(name)) is None


def is_product_operation(name: str) -> bool:
    """Whether an operation of torch is a matrix product, a convolution, an attention or a decomposition."""
    space, _, base = name.rpartition("::")
    if space not in {"aten", "prims", "mkldnn", ""}:
        return is_product_kernel(base)
    return _PRODUCT_OPERATION.fullmatch(base) is not None and _NO_PRODUCT_OPERATION.search(base) is None


def is_wrapper(name: str) -> bool:
    """Whether an operation only calls others: a node of autograd, a step of an optimizer. Its own time is dispatch."""
    return "::" not in name or _WRAPPER.match(name) is not None


def is_input(name: str) -> bool:
    """Whether a range is the wait for input: torch's own range of a DataLoader, or one whose words all speak of loading data.

    `DistributedDataParallel.forward` and `load_state_dict` are none.
    """
    if name.startswith("enumerate(DataLoader)"):
        return True
    words = {word.lower() for word in _WORD.findall(name)}
    return not words.isdisjoint(_WORDS_OF_INPUT) and words <= _WORDS_OF_INPUT | _WORDS_BESIDE


def is_waiting_frame(name: str) -> bool:
    """Whether a Python frame waits for input: a sleep, a read, a queue, the DataLoader's own code, or a function named for it."""
    if _WAITS.search(name) is not None or name.endswith(": __next__"):
        return True
    found = _FRAME.match(name)
    return found is not None and is_input(found[1])


def _outer(name: str) -> str:
    """Return a C++ kernel's name without its template arguments."""
    return name.partition("<")[0] if not name.startswith("<") else name
