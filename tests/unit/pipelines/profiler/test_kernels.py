"""The work of kernels by name, from traces and code of each library; ambiguous names need the launching operation."""

import pytest

from pipelines.profiler.kernels import TABLE, KernelBound, dtype_in, work_of

NAMES = {
    "cuBLAS": (
        (
            "ampere_sgemm_32x32_sliced1x4_tn",
            "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT",
            "nvjet_tst_192x8_64x8_2x1_v_bz_splitK_TNT",
            "nvjet_sm90_hss_320x128_64x3_1x2_h_bz_coopB_NTN",
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
            "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn",
            "turing_fp16_s1688gemm_fp16_256x64_sliced1x2_ldg8_f2f_tn",
            "void gemmSN_TN_kernel<float, 128, 16, 2, 4, 4, 4, true>(x)",
            "gemmk1_kernel",
            "void magma_sgemmEx_kernel<float, __half>(int)",
            "triton_gemm_dot_12",
            "__cublas_gemm_fusion",
            "bf16gemm_fp32bf16_tn_96x64_splitk_clean",
        ),
        (
            "void gemv2T_kernel_val<int, int, float>(float)",
            "void gemvNSP_kernel<float, float>(x)",
            "void cublasLt::splitKreduce_kernel<32, 16, int, float>(x)",
            "void epilogue::impl::globalKernel<float>(x)",
        ),
    ),
    "cuDNN": (
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x64x128_4x1x1_kernel0_0",
            "cudnn_generated_oss_sdpa_sm90_flash_bprop_wgmma_f16_knob_33_128x128x64_1x1x1_cga1x1x1_kernel0_0",
            "void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>(x)",
            "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, true, false, true>(int)",
            "cudnn_infer_ampere_scudnn_128x64_relu_xregs_large_nn_v1",
            "void cudnn::cnn::wgrad_alg0_engine<float, 128, 5, 5, 3, 3, 3, false, 512>(int)",
            "void dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int)",
            "_ZN19cutlass_cudnn_train6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS1_11threadblock22ImplicitGemmMultistage",
            "void cudnn::RNN_blockPersist<x>(int)",
        ),
        (
            "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float>(cudnnTensorStruct)",
            "void cudnn::ops::nchwToNhwcKernel<float, float>(x)",
            "void cutlass_cudnn_train::Kernel<cutlass_cudnn_train::reduction::kernel::ReduceSplitK<cutlass_cudnn_train::MatrixShape<4>>>(x)",
            "void cudnn::ops::scalePackedTensor_kernel<float, float>(x)",
            "fft2d_r2c_32x32",
            "void cask_cudnn::computeOffsetsKernel<false, false>(x)",
        ),
    ),
    "Triton and Inductor": (
        (
            "_attend_split",
            "_attn_bwd",
            "triton_tem_fused_addmm_relu_3",
            "triton_mm",
            "triton_tem_fused_flex_attention_0",
            "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
        ),
        (
            "triton_poi_fused_addmm_relu_3",
            "triton_red_fused_native_layer_norm_1",
            "triton_per_fused__softmax_mul_0",
            "void causal_conv1d_fwd_kernel<x>(x)",
            "void selective_scan_fwd_kernel<x>(x)",
            "_rms_norm",
            "_silu_mul",
            "_rope_and_store",
            "_merge_states",
            "_liger_cross_entropy_kernel",
        ),
    ),
    "ROCm": (
        (
            "attn_fwd",
            "attn_fwd.kd",
            "bwd_kernel_dk_dv",
            "bwd_kernel_dq",
            "_attn_fwd",
            "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>(flash::Flash_bwd_params)",
            "void ck_tile::kentry<256, 2, ck_tile::FmhaFwdKernel<ck_tile::BlockFmhaPipelineQRKSVSAsync<int>>>(ck_tile::FmhaFwdKernel::Kargs)",
            "void ck_tile::kentry<1, ck_tile::FmhaBwdDQDKDVKernel<int>>(int)",
            "Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64_MI16x16x1",
            "Custom_Cijk_Alik_Bljk_HHS_BH_MT256x128",
            "void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm>(int)",
            "void ck::kernel_moe_mxgemm_2lds<x>(int)",
            "_ZN5aiter37fmoe_bf16_blockscaleFp8_g1u1_vs_silu_1tg_ps_32x256E",
            "aiter::fmha_fwd_hd128_bf16_causal_rtne_group",
            "_ZN5aiter18fmha_fwd_hd128_bf16E",
            "miopenSp3AsmConv_v30_3_1_gfx9_fp32_f2x3_stride1",
            "igemm_fwd_gtcx_nhwc_bf16_bx0_ex1_bt256x128x32",
            "naive_conv_ab_nonpacked_fwd_nchw_half_double_half",
            "gridwise_convolution_implicit_gemm_v4r4_nchw_kcyx_nkhw",
            "MIOpenConvUni.kd",
            "_hstu_attn_fwd",
            "void kernel_batched_gemm_xdlops_v2r3<x>(int)",
        ),
        (
            "void ck_tile::kentry<64, 2, ck_tile::FmhaBwdOGradDotOKernel<int>>(x)",
            "bwd_preprocess",
            "_attn_bwd_preprocess",
            "paged_attention_ll4mi_QKV_mfma16_kernel",
            "wvSplitK_hf_sml_",
            "MIOpenBatchNormFwdTrainSpatial",
            "Cijk_SB_BetaOnly",
            "kn_mla_reduce_v1",
            "batched_transpose_32x32_dword",
            "__amd_rocclr_fillBufferAligned",
            "__amd_rocclr_copyBuffer",
        ),
    ),
    "flash-attention and xFormers": (
        (
            "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4, false, false, cutlass::bfloat16_t>>(Flash_fwd_params)",
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1> > > > > >(flash::FlashAttnFwdSm90::Params)",
            "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>::Params)",
            "fmha_cutlassB_f16_aligned_64x64_k64_sm80",
            "void flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_traits_mla<576>>(x)",
        ),
        (
            "flash_fwd_splitkv_combine_kernel",
            "void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<>>>(x)",
            "void flash_bwd_dot_do_o_kernel<true>(x)",
            "void flash_bwd_convert_dq_kernel<x>(x)",
        ),
    ),
    "CUTLASS": (
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>(cutlass_80_tensorop_bf16::Params)",
            "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>, cutlass::gemm::collective::CollectiveMma<>, cutlass::epilogue::thread::SiLu>>(x)",
            "_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalIN4cute5tupleIJiiiiEEE",
            "cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32_void_bf16_128x128x64",
        ),
        (),
    ),
    "SGLang and FlashInfer": (
        (
            "void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 128u>(__nv_bfloat16*, float*)",
            "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u>(float*)",
            "_fwd_kernel",
            "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<>>(x)",
            "void flashinfer::SinglePrefillWithKVCacheKernel<x>(int)",
            "fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausalP64MultiCtasKvVarSeqQ128Kv128StaticContext",
            "fmha_v2_flash_attention_bf16_64_128_S_q_paged_kv_128_causal_tma_ws_sm90_kernel",
            "_chunk_scan_fwd_kernel",
            "_bmm_chunk_fwd_kernel",
        ),
        (
            "void flashinfer::BatchDecodeWithPagedKVCacheKernel<x>(x)",
            "void flashinfer::PersistentVariableLengthMergeStatesKernel<8>(x)",
            "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(x)",
            "void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16, &silu>(x)",
            "_fwd_grouped_kernel_stage1",
            "_per_token_group_quant_fp8",
            "_static_quant_fp8",
            "per_token_group_quant_8bit_kernel",
        ),
    ),
    "vLLM": (
        (
            "fused_moe_kernel",
            "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x256x128x1_swiglu",
            "void marlin::Marlin<__nv_bfloat16, 256>(int4 const*)",
            "_w8a8_block_fp8_matmul",
            "_w8a8_triton_block_scaled_mm",
            "kernel_unified_attention_2d",
            "_lora_shrink_kernel",
            "_lora_expand_kernel",
            "void vllm::awq::gemm_forward_4bit_cuda_m16nXk32<128>(int)",
            "void vllm::gptq::gemm_half_q_half_gptq_4bit_kernel<true, 1>(int)",
        ),
        (
            "void vllm::merge_attn_states_kernel<__nv_bfloat16, 128>(x)",
            "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>(x)",
            "void vllm::concat_and_cache_mla_kernel<x>(x)",
            "void vllm::rms_norm_kernel<c10::BFloat16>(c10::BFloat16*)",
            "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)",
            "void vllm::act_and_mul_kernel<c10::BFloat16>(x)",
            "void vllm::scaled_fp8_quant_kernel<c10::BFloat16>(x)",
            "void vllm::dynamic_per_token_scaled_fp8_quant_kernel<x>(x)",
            "void vllm::moe::topkGatingSoftmax<4, 64>(x)",
            "void vllm::moe::moe_align_block_size_kernel<int>(x)",
            "void vllm::paged_attention_v1_kernel<x>(x)",
            "void vllm::paged_attention_v2_kernel<x>(x)",
        ),
    ),
    "FBGEMM": (
        (
            "_kernel_matmul_fp8_row_tma_persistent",
            "kernel_matmul_fp8_block_slowacc",
            "jagged_dense_bmm_kernel",
        ),
        (
            "void split_embedding_codegen_forward_unweighted_kernel<c10::Half, c10::Half, float, false, long, 2ul, 32ul>(at::GenericPackedTensorAccessor<c10::Half, 1ul, at::RestrictPtrTraits>)",
            "void fbgemm_gpu::permute_2D_data_kernel<false>(x)",
            "void fbgemm_gpu::(anonymous namespace)::_FP8rowwise_to_float_cuda_kernel<float>(x)",
            "_kernel_quantize_fp8_row",
            "void bounds_check_indices_kernel<long, false>(at::GenericPackedTensorAccessor<long, 1ul, at::RestrictPtrTraits, int>, at::GenericPackedTensorAccessor<long>)",
            "void linearize_index_kernel<long>(x)",
        ),
    ),
    "PyTorch and others": (
        ("mul_mat_q",),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
            "void at::native::(anonymous namespace)::conv_depthwise2d_forward_kernel<3>(x)",
            "void cub::DeviceRadixSortOnesweepKernel<x>(x)",
            "void multi_tensor_apply_kernel<x>(x)",
            "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float, float>(x)",
            "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel<float>(x)",
            "kDequantizeBlockwise",
            "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<x>(x)",
            "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<x>(x)",
            "void at::native::(anonymous namespace)::CatArrayBatchedCopy<x>(x)",
        ),
    ),
}
"""By library: kernels whose work grows faster than their data, then memory-bound kernels."""


@pytest.mark.parametrize("library", NAMES)
def test_kernels_have_the_work_of_their_names(library: str) -> None:
    """Attention and products are not classified as memory-bound, nor their helper kernels as products."""
    products, others = NAMES[library]

    assert [name for name in products if work_of(name) is not KernelBound.PRODUCT] == []
    assert [name for name in others if work_of(name) is not KernelBound.MEMORY] == []


def test_a_name_of_no_library_is_unknown() -> None:
    """Unknown names are not guessed, and every row of the table has a source."""
    assert work_of("my_project_step_42") is KernelBound.UNKNOWN
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
