"""The kind of work of a device's kernel, by its name: the first matching row of one table, each with its source.

A product (matrix product, convolution, attention over many queries) does more arithmetic the more data it reads; other
kernels are bound by memory. A name without a match is unknown: the operation that launched the kernel may still tell
(`operations.py`). Pure.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache


class Bound(StrEnum):
    """The bound of an operation or kernel. COMPUTE: a product. UNKNOWN: neither shapes nor names tell."""

    COMPUTE = "compute"
    MEMORY = "memory"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class KernelPattern:
    """Names of one kind of work, and their sources."""

    work: Bound
    pattern: re.Pattern[str]
    source: str


def _product(pattern: str, source: str) -> KernelPattern:
    return KernelPattern(Bound.COMPUTE, re.compile(pattern, re.IGNORECASE), source)


def _memory(pattern: str, source: str) -> KernelPattern:
    return KernelPattern(Bound.MEMORY, re.compile(pattern, re.IGNORECASE), source)


TABLE = (
    # Inductor names a kernel after everything that it fuses, so its prefixes come first.
    _product(r"^triton_(?:tem|mm|bmm|flex|convolution)\w*", "PyTorch torch/_inductor/select_algorithm.py"),
    _memory(r"^triton_(?:poi|red|per|for|unk|split_scan)\w*", "PyTorch torch/_inductor/codegen/triton.py"),
    _memory(
        r"^at::native::.*(?:elementwise|reduce_kernel|softmax|multi_tensor|copy|cat|index|embedding|norm|moments|gammabeta)",
        "PyTorch aten/src/ATen/native/cuda",
    ),
    # Helpers of product libraries read their input once.
    _memory(
        r"splitk?_?reduce|reduce_?(?:splitk|wgrad)|split_?k_?reduction|postgsu|betaonly|epilogue::impl|scal_kernel",
        "cuBLASLt; CUTLASS reduce_split_k.h; cuDNN; Tensile BetaOnly and GlobalSplitU",
    ),
    _memory(
        r"compute\w*offsets|(?:nchw|nhwc|kcrs|krsc)_?(?:to|2)|im2d?2?col|col2im|im2vol|vol2col|winograd\w*xform|subtensorop"
        r"|batched_transpose|mloopen|checknumerics|cumsum",
        "cuDNN cask and ops; ATen im2col.cuh; MIOpen; flash-linear-attention cumsum.py",
    ),
    _memory(
        r"(?:^|[^a-z])gemv|wvsplitk|llgemm1|(?:^|_)dot_kernel|mul_mat_vec|gemm_4bit_inference|skinny_gemm",
        "cuBLAS gemv; vLLM csrc/rocm/skinny_gemms.cu; llama.cpp mmvq.cu; bitsandbytes",
    ),
    _memory(
        r"depthwise|dgrouped|causal_conv1d|bn_[bf]w_|batch_?norm",
        "ATen DepthwiseConv2d.cu; Dao-AILab/causal-conv1d; cuDNN batch norm; MIOpen",
    ),
    _memory(
        r"combine(?!d)|dot_do_o|ogradotto|ogradd?oto?|convert_d[qkv]|(?:bwd|backward)_?preprocess|merge_?(?:attn_)?states?"
        r"|mla_reduce|fmha\w*reduc|reduce_segments|softmax_lse",
        "flash-attention flash_bwd_preprocess_kernel.h; CK fmha_bwd_kernel.hpp; AOTriton bwd_preprocess; "
        "vLLM merge_attn_states.cu; FlashInfer cascade.cuh; aiter kn_mla_reduce; this engine's _merge_states",
    ),
    _memory(
        r"reshape_and_cache|concat_and_cache|(?:append|store|copy|update|write)_\w*(?:kv|cache)|(?:copy|swap)_blocks"
        r"|(?:attention|attn|causal)_mask|rotary|(?:^|_)m?rope(?:_|kernel|$)|qk_?rope|ropequantize",
        "vLLM csrc/cache_kernels.cu and pos_encoding_kernels.cu; FlashInfer page.cuh and pos_enc.cuh",
    ),
    _memory(
        r"quantiz|(?:^|_)\w*quant_(?:fp8|int8|fp4|mx|kernel)|_quant(?:$|_)|fp8_?rowwise_to|fp8_qparam|hfp8|dequant",
        "vLLM csrc/quantization; FBGEMM quantize_ops; SGLang fp8_kernel.py; bitsandbytes kDequantizeBlockwise",
    ),
    # Attention with one query per sequence reads each key and value once.
    _memory(
        r"paged_attention_(?:v[12]|kernel|ll4mi)|decodewithpagedkvcache|singledecodewithkvcache|masked_multihead_attention"
        r"|single_query_cached|_fwd(?:_grouped)?_kernel_stage[12]",
        "vLLM csrc/attention, csrc/rocm/attention.cu; FlashInfer decode.cuh; TensorRT-LLM; SGLang decode_attention.py",
    ),
    _memory(
        r"selective_scan|_state_passing|fused_recurrent|topk_?(?:gating|softmax)|moe_(?:align|sum|sort)|moesort|(?:pre|post)_?reorder|expandinputrows",
        "state-spaces/mamba; flash-linear-attention fused_recurrent.py; vLLM csrc/moe; TensorRT-LLM; aiter",
    ),
    # Attention over many queries.
    _product(
        r"sdpa|flash_?(?:attn|attention|fwd|bwd|mla)|fmha|(?:^|[^a-z])mha_|attentionkernel",
        "cuDNN cudnn_generated_fort_native_sdpa; flash-attention 2 and 3; xFormers fmha_cutlass; "
        "CK fmha_fwd_kernel.hpp; TensorRT-LLM fmha_v2; FlashInfer fmhaSm100f",
    ),
    _product(
        r"attn_(?:fwd|bwd)|bwd_kernel_(?:dk_?dv|dq|fuse)|hstu|mla_(?:a\d+w\d+|pfl|fwd|decode|prefill)|batchmlapaged",
        "AOTriton tritonsrc; Triton tutorial 06; aiter mla; FBGEMM hstu; FlashInfer mla.cuh",
    ),
    _product(
        r"attention|prefillwith\w*kvcache|(?:^|_)attend_|(?:^|::)_?(?:fwd|bwd)_kernel(?:_|$)|mqa_logits|chunk_(?:\w*delta|gla|scan|state|\w*fwd_kernel)",
        "vLLM triton_unified_attention.py; FlashInfer prefill.cuh; this engine's _attend_split; "
        "SGLang extend_attention.py; flash-linear-attention; mamba ssd_chunk_scan.py",
    ),
    # Matrix products and convolutions.
    _product(
        r"(?<!fb)gemm|nvjet|xmma|cijk_|wgmma|hmma|imma|(?:^|_)mma_|mfma|xdlops?|splitk|matmul|marlin|machete|(?:^|_)awq_|gptq|exllama"
        r"|mul_mat_q|tensorop|scudnn",
        "cuBLAS, cuBLASLt, CUTLASS, Tensile, CK, DeepGEMM, triton_kernels _matmul_ogs, "
        "vLLM csrc/quantization, llama.cpp mmq.cu",
    ),
    _product(
        r"winograd|implicit_con|conv(?:olve|olution|_?[123]d|_fprop|_dgrad|_wgrad|_fwd|_bwd|_wrw|_nonpacked|uni)|(?:^|[^a-z])[wd]grad"
        r"|fprop|igemm|naive_conv|asmconv|(?:^|_)conv(?:_|$)",
        "cuDNN; CUTLASS implicit_gemm_convolution.h; MIOpen solvers (miopenSp3AsmConv, igemm_fwd_gtcx, naive_conv)",
    ),
    _product(
        r"fused_moe|mxgemm|(?:^|[^a-z])fmoe|(?:lora|bgmv|sgmv)_?(?:shrink|expand)|(?:^|[^a-z])(?:mm|bmm|addmm|baddbmm|addbmm|linear|lstm|gru)"
        r"(?:[^a-z]|$)|scaled_mm|rnn_\w*persist|lstm_",
        "vLLM fused_moe.py and lora/ops; aiter fmoe; ATen RNN.cu; cuDNN RNN; FBGEMM jagged_tensor_ops",
    ),
    # Names of simple operations.
    _memory(
        r"elementwise|reduce|reduction|softmax|norm|pool|upsample|interpolat|dropout|copy|fill|memset|memcpy|cat(?:array|_|$)|concat|stack"
        r"|transpose|permut|gather|scatter|index|indices|embedding|lookup|sort|scan|radix|histogram|unique|topk|argmax|sampl|mask|where"
        r"|clamp|nonzero|(?:^|_)pad|moments|gammabeta|scalepacked|act_and_mul|silu|swiglu|gelu",
        "ATen native/cuda; CUB; Thrust; FBGEMM permute, embedding; vLLM activation_kernels.cu; "
        "FlashInfer activation.cuh; Liger",
    ),
    _memory(
        r"adam|sgd|lamb|optimi[sz]er|multi_tensor|unscale|l2norm|cross_entropy|loss|activation|relu|sigmoid|tanh|(?:^|_)(?:add|mul|sub|div)"
        r"(?:_|$)|cast|convert|^cub::|^thrust::|rms|fft|split_embedding|(?:^|_)tbe_|bounds_check|linearize|jagged|offsets|lengths"
        r"|compute_cuda_kernel|arange|random|philox|distribution|bernoulli",
        "ATen native/cuda; CUB; Thrust; cuFFT; FBGEMM TBE and sparse_ops; Apex multi_tensor_apply; Liger",
    ),
)
"""Names from the listed sources, seen in traces or code; within a library, more specific rows come first."""


@lru_cache(maxsize=16_384)
def work_of(name: str) -> Bound:
    """Return the kind of work of a kernel, `UNKNOWN` if no row matches."""
    spoken = _spoken_name(name)
    return next((row.work for row in TABLE if row.pattern.search(spoken)), Bound.UNKNOWN)


def is_product_kernel(name: str) -> bool:
    """Whether a device's kernel is a matrix product, a convolution or an attention over many queries."""
    return work_of(name) is Bound.COMPUTE


_WRAPPER = re.compile(
    r"(?:^|::)(?:device_kernel|kernel2?|kentry|enable_\w+|kernel_impl|launch\w*|global_?kernel)$", re.IGNORECASE
)
_INNER_NAMES = 3


def _spoken_name(name: str) -> str:
    """Return a function's name without template arguments and parameters; wrappers add their arguments' names."""
    plain = _demangled(name.replace("(anonymous namespace)::", "").removeprefix("void ").removesuffix(".kd"))
    own = re.split(r"[<(]", plain, maxsplit=1)[0]
    if _WRAPPER.search(own) is None:
        return own or plain
    inner = re.findall(r"[A-Za-z_][\w:]*", plain[len(own) :].partition("(")[0])
    return " ".join([own, *[word for word in inner if _WRAPPER.search(word) is None][:_INNER_NAMES]])


_DIGITS = re.compile(r"\d+")


def _demangled(name: str) -> str:
    """Return the identifiers of an Itanium-mangled name, first template argument after `<`; other names unchanged."""
    if not name.startswith("_Z"):
        return name
    words: list[str] = []
    offset, depth = 2, ""
    while offset < len(name):
        digits = _DIGITS.match(name, offset)
        if digits is None:
            depth = depth or ("<" if name[offset] == "I" and words else "")
            if depth == "<":
                words.append("<")
                depth = "inside"
            offset += 1
            continue
        start = offset + len(digits[0])
        offset = start + max(1, int(digits[0][:4]))
        words.append(name[start:offset])
    return "::".join(words).replace("::<::", "<")


_HALF = (
    r"bf16|bfloat16|c10::half|__half|half_t|fp16|(?<![a-z0-9])f16|(?<![a-z])h(?:gemm|884|1688|16816)|s884gemm"
    r"|nvjet_(?:sm\d+_)?[ht]|_(?:BBS|HHS|HSS|BSS|HBH|HB)_"
)
_DTYPES = (
    ("fp8", r"fp8|float8|float_?e[45]m[23]|e4m3|e5m2|(?<![a-z])f8f8|_F8_|nvjet_(?:sm\d+_)?q"),
    ("bf16", _HALF),
    ("fp32", r"tf32|(?<![a-z])sgemm|s1688|scudnn|_SB_|nvjet_(?:sm\d+_)?s"),
)
"""Marks of the operands' dtype in names of products; bf16 means either half precision, fp32 also TF32."""
_DTYPE_MARKS = tuple((dtype, re.compile(mark, re.IGNORECASE)) for dtype, mark in _DTYPES)


def dtype_in(name: str) -> str | None:
    """Return the dtype of a product's operands if its kernel's name tells, as the planner's data sheets name it."""
    return next((dtype for dtype, mark in _DTYPE_MARKS if mark.search(name)), None)
