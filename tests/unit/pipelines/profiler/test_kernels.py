"""The work of kernels by name, from traces and code of each library; ambiguous names need the launching operation."""

import tomllib
from pathlib import Path

import pytest

from pipelines.profiler.kernels import TABLE, Bound, dtype_in, work_of

NAMES = tomllib.loads(Path(__file__).with_name("kernel_names.toml").read_text())


@pytest.mark.parametrize("library", NAMES)
def test_kernels_have_the_work_of_their_names(library: str) -> None:
    """Attention and products are not classified as memory-bound, nor their helper kernels as products."""
    products, others = NAMES[library]["products"], NAMES[library]["others"]

    assert [name for name in products if work_of(name) is not Bound.COMPUTE] == []
    assert [name for name in others if work_of(name) is not Bound.MEMORY] == []


def test_a_name_of_no_library_is_unknown() -> None:
    """Unknown names are not guessed, and every row of the table has a source."""
    assert work_of("my_project_step_42") is Bound.UNKNOWN
    assert all(row.source for row in TABLE)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nn", "bf16"),
        ("nvjet_tst_192x8_64x8_2x1_v_bz_splitK_TNT", "bf16"),
        ("Cijk_Alik_Bljk_HHS_BH_MT256x128", "bf16"),
        ("void deep_gemm::fp8_gemm_kernel<4096u, 7168u>(__nv_bfloat16*)", "fp8"),
        ("ampere_sgemm_128x64_nn", "fp32"),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x128_32x3_nt_align4>(int)", "fp32"),
        ("attn_fwd", None),
        ("fused_moe_kernel", None),
    ],
)
def test_a_name_tells_the_operands_dtype_or_nothing_does(name: str, dtype: str | None) -> None:
    """A dtype is reported only if the name contains it."""
    assert dtype_in(name) == dtype
