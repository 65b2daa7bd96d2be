"""Selection of a prebuilt library by the processor's flags."""

import pytest

from services.llm.engine.cpu.compiler import suitable

HASWELL = "fpu sse sse2 ssse3 fma movbe xsave avx f16c abm bmi1 avx2 bmi2"
SKYLAKE = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"
ICE_LAKE = f"{SKYLAKE} avx512vbmi avx512_vbmi2 avx512_vnni avx512_bitalg"
ZEN_4 = f"{ICE_LAKE} avx512_bf16 sha_ni"
SAPPHIRE_RAPIDS = f"{ZEN_4} amx_bf16 avx512_fp16 amx_tile amx_int8"
ALDER_LAKE = f"{HASWELL} avx_vnni"
HIDDEN_AVX2 = HASWELL.replace(" avx2", "")
GRAVITON = "fp asimd evtstrm aes sha1 bf16 i8mm"


@pytest.mark.parametrize(
    ("machine", "flags", "best"),
    [
        ("x86_64", SAPPHIRE_RAPIDS, "x86-64-v4-amx"),
        ("x86_64", SAPPHIRE_RAPIDS.replace(" amx_tile", ""), "x86-64-v4-bf16"),
        ("x86_64", ZEN_4, "x86-64-v4-bf16"),
        ("x86_64", ICE_LAKE, "x86-64-v4-vnni"),
        ("x86_64", SKYLAKE, "x86-64-v4"),
        ("x86_64", SKYLAKE.replace(" avx512vl", ""), "x86-64-v3"),
        ("x86_64", ALDER_LAKE, "x86-64-v3"),
        ("x86_64", HASWELL, "x86-64-v3"),
        ("x86_64", HIDDEN_AVX2, None),
        ("x86_64", "", None),
        ("aarch64", GRAVITON, "armv8-a"),
        ("aarch64", "", "armv8-a"),
        ("riscv64", SAPPHIRE_RAPIDS, None),
    ],
)
def test_a_processor_takes_the_best_that_it_can_run(machine: str, flags: str, best: str | None) -> None:
    """The first suitable target is the best whose required flags the processor has."""
    names = [target.name for target in suitable(machine, frozenset(flags.split()))]

    assert (names[0] if names else None) == best
