"""Kernel names -> what the kernel does: a table, one row per family, with a real name and its source.

The first row that matches a name wins, so rows go from the particular to the general. A row's meaning
is a MoE phase, or one of:

- `EXCHANGE`: an all-to-all that may be a dispatch, a combine or no part of a MoE layer at all; which one
  is told later by what runs before and after it (`phases`);
- `COLLECTIVE`: communication that is no phase of a MoE layer by itself;
- a phase with `only_between=True`: a general kernel (PyTorch's top-k, a scatter) that counts only where
  it runs inside a MoE layer that other rows have recognised.

To add a family: one row here, with `example` taken from a real trace or build; the test of the table
checks that every example is matched by its own row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from moetrace_schemas.enums import Phase


class Role(StrEnum):
    """How a family's kernels are read."""

    PHASE = "phase"
    EXCHANGE = "exchange"
    COLLECTIVE = "collective"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row of the table."""

    name: str
    pattern: str
    """Regular expression, searched in the kernel's (demangled or plain) name; case matters."""
    role: Role
    phase: Phase | None = None
    """The phase, for role PHASE, and for an EXCHANGE whose direction the name tells."""
    kind: str = ""
    """Kind of collective: all_to_all, all_reduce, ..."""
    only_between: bool = False
    example: str
    source: str


def _phase(
    name: str, pattern: str, phase: Phase, example: str, source: str, *, only_between: bool = False
) -> Family:
    return Family(
        name=name,
        pattern=pattern,
        role=Role.PHASE,
        phase=phase,
        only_between=only_between,
        example=example,
        source=source,
    )


def _exchange(
    name: str,
    pattern: str,
    example: str,
    source: str,
    *,
    phase: Phase | None = None,
    kind: str = "all_to_all",
) -> Family:
    return Family(
        name=name,
        pattern=pattern,
        role=Role.EXCHANGE,
        phase=phase,
        kind=str(phase) if phase else kind,
        example=example,
        source=source,
    )


def _collective(name: str, pattern: str, kind: str, example: str, source: str) -> Family:
    return Family(name=name, pattern=pattern, role=Role.COLLECTIVE, kind=kind, example=example, source=source)


_NCCL = "NVIDIA/nccl: src/device/generate.py"
_RCCL = "ROCm/rccl: src/device/common.cu"
_DEEPEP = "deepseek-ai/DeepEP: csrc/kernels"
_TRTLLM = "NVIDIA/TensorRT-LLM: cpp/tensorrt_llm/kernels"
_TRITON = "triton-lang/triton: python/triton_kernels/triton_kernels"
_VLLM = "vllm-project/vllm: csrc/moe, vllm/model_executor/layers/fused_moe"
_SGLANG = "sgl-project/sglang: sgl-kernel/csrc/moe, srt/layers/moe/ep_moe/kernels.py"
_TE = "NVIDIA/TransformerEngine: transformer_engine/common/triton/permutation.py"
_AITER = "ROCm/aiter: csrc, aiter/fused_moe.py"
_CK = "ROCm/composable_kernel: include/ck_tile/ops/fused_moe"
_CUTLASS = "NVIDIA/cutlass: include/cutlass/gemm"
_DEEPGEMM = "deepseek-ai/DeepGEMM: deep_gemm/include/deep_gemm"
_TORCH = "pytorch/pytorch: aten/src/ATen/native/cuda"

FAMILIES: tuple[Family, ...] = (
    # --- whole layers in one kernel: nothing in them can be told apart ---
    _phase(
        "mega_moe",
        r"mega_?moe|MegaMoE|fused_moe_monolithic",
        Phase.FUSED,
        "void deep_gemm::sm100_fp8_fp4_mega_moe_impl<1024u, 4096u>(int*, float*)",
        _DEEPGEMM,
    ),
    _phase(
        "aiter_fmoe",
        r"(?:^|[ :_\d])fmoe_|FusedMoeGemmKernel|FusedMoeKernel",
        Phase.FUSED,
        "_ZN5aiter47fmoe_fp8_blockscale_g1u1_novs_subGU_256E",
        _AITER,
    ),
    # --- exchanges whose name tells their direction ---
    _phase(
        "deepep_layout",
        r"\blayout::get_dispatch_layout|get_dispatch_layout",
        Phase.PERMUTE,
        "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*, int*, int*, int*, bool*, int)",
        _DEEPEP,
    ),
    _exchange(
        "deepep_dispatch",
        r"\b(?:intranode|internode|internode_ll|elastic)::(?:\w*notify_)?dispatch",
        "void deep_ep::internode_ll::dispatch<true, 3, 10, 7168>(void*, float*, int*, long*, int*)",
        _DEEPEP,
        phase=Phase.DISPATCH,
    ),
    _exchange(
        "deepep_combine",
        r"\b(?:intranode|internode|internode_ll|elastic)::(?:cached_notify_?)?combine",
        "void deep_ep::internode::combine<4, __nv_bfloat16, 8>(int4*, float*, bool const*, int4 const*)",
        _DEEPEP,
        phase=Phase.COMBINE,
    ),
    _exchange(
        "hybridep_dispatch",
        r"hybrid_ep::dispatch_kernel",
        "void hybrid_ep::dispatch_kernel<hybrid_ep::inter_node_group<2, 7>, unsigned char>(void)",
        "deepseek-ai/DeepEP, branch hybrid-ep: csrc/hybrid_ep",
        phase=Phase.DISPATCH,
    ),
    _exchange(
        "hybridep_combine",
        r"hybrid_ep::combine_kernel",
        "void hybrid_ep::combine_kernel<hybrid_ep::inter_node_group<2, 7> >(void)",
        "deepseek-ai/DeepEP, branch hybrid-ep: csrc/hybrid_ep",
        phase=Phase.COMBINE,
    ),
    _phase(
        "trtllm_a2a_prepare",
        r"moeA2APrepare\w*Kernel",
        Phase.PERMUTE,
        "void tensorrt_llm::kernels::moe_comm::moeA2APrepareDispatchKernel(int*, int*, int, unsigned int*)",
        f"{_TRTLLM}/communicationKernels/moeAlltoAllKernels.cu",
    ),
    _exchange(
        "trtllm_a2a_dispatch",
        r"moeA2ADispatchKernel|moe_?comm\w*::\w*[dD]ispatch",
        "void tensorrt_llm::kernels::moe_comm::moeA2ADispatchKernel<8>(DispatchKernelPointers)",
        f"{_TRTLLM}/communicationKernels/moeAlltoAllKernels.cu",
        phase=Phase.DISPATCH,
    ),
    _exchange(
        "trtllm_a2a_combine",
        r"moeA2ACombineKernel|moe_?comm\w*::\w*[cC]ombine",
        "void tensorrt_llm::kernels::moe_comm::moeA2ACombineKernel<__nv_bfloat16, 8>(CombineParams)",
        f"{_TRTLLM}/communicationKernels/moeAlltoAllKernels.cu",
        phase=Phase.COMBINE,
    ),
    _exchange(
        "mori_dispatch",
        r"\bEpDispatch\w*Kernel",
        "void mori::moe::EpDispatchIntraNodeKernel<hip_bfloat16>(EpDispatchCombineArgs<hip_bfloat16>)",
        "ROCm/mori: src/ops/dispatch_combine",
        phase=Phase.DISPATCH,
    ),
    _exchange(
        "mori_combine",
        r"\bEpCombine\w*Kernel",
        "void mori::moe::EpCombineIntraNodeKernel<hip_bfloat16>(EpDispatchCombineArgs<hip_bfloat16>)",
        "ROCm/mori: src/ops/dispatch_combine",
        phase=Phase.COMBINE,
    ),
    # Builds under another namespace: a template kernel that is called dispatch or combine and nothing else.
    _exchange(
        "renamed_dispatch",
        r"\b\w*(?:ep|EP|moe|a2a|all2all)\w*::(?:\w+::)*dispatch(?:_\w+)?(?:<|\()",
        "void uccl::ep::low_latency::dispatch<true, 3, 10, 7168>(void*, float*)",
        f"{_DEEPEP}, built under other namespaces (uccl-project/uccl: ep/src; kvcache-ai/Mooncake)",
        phase=Phase.DISPATCH,
    ),
    _exchange(
        "renamed_combine",
        r"\b\w*(?:ep|EP|moe|a2a|all2all)\w*::(?:\w+::)*combine(?:_\w+)?(?:<|\()",
        "void uccl::ep::low_latency::combine<true, 3, 10, 7168>(void*, float*)",
        f"{_DEEPEP}, built under other namespaces (uccl-project/uccl: ep/src; kvcache-ai/Mooncake)",
        phase=Phase.COMBINE,
    ),
    # --- collectives of NCCL and RCCL ---
    _exchange(
        "nccl_send_recv",
        r"nccl(?:Dev)?Kernel_SendRecv",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
        _NCCL,
        kind="send_recv",
    ),
    _exchange(
        "nccl_all_to_all",
        r"nccl(?:Dev)?Kernel_All?[tT]oAll",
        "ncclDevKernel_AlltoAll_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        _RCCL,
    ),
    _collective(
        "nccl_all_reduce",
        r"nccl(?:Dev)?Kernel_AllReduce",
        "all_reduce",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        _NCCL,
    ),
    _collective(
        "nccl_all_gather",
        r"nccl(?:Dev)?Kernel_AllGather",
        "all_gather",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        _NCCL,
    ),
    _collective(
        "nccl_reduce_scatter",
        r"nccl(?:Dev)?Kernel_ReduceScatter",
        "reduce_scatter",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        _NCCL,
    ),
    _collective(
        "nccl_broadcast",
        r"nccl(?:Dev)?Kernel_Broadcast",
        "broadcast",
        "ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
        _NCCL,
    ),
    _collective(
        "nccl_other",
        r"nccl(?:Dev)?Kernel|mscclKernel|\bonccl",
        "unknown",
        "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)",
        _RCCL,
    ),
    _collective(
        "custom_all_reduce",
        r"cross_device_reduce|(?:one|two)[sS]hot_?[aA]ll_?[rR]educe|multimem_all_reduce",
        "all_reduce",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)",
        "vllm-project/vllm: csrc/custom_all_reduce.cuh",
    ),
    # --- TensorRT-LLM and FlashInfer: routing, bmm, finalize ---
    _phase(
        "trtllm_routing_indices",
        r"routingIndices\w*Kernel|routingInitExpertCounts|routing\w*(?:Histogram|Offsets|PostTopK)\w*Kernel",
        Phase.PERMUTE,
        "void moe::dev::routing::routingRenormalize::routingIndicesClusterKernel<KernelParams>(KernelParams)",
        f"{_TRTLLM}/trtllmGenKernels/blockScaleMoe/routing",
    ),
    _phase(
        "trtllm_routing",
        r"moe::dev::routing|routingMainKernel|routingCustom",
        Phase.ROUTER,
        "void moe::dev::routing::routingDeepSeek::routingMainKernel<KernelParams<float, bf16> >(P)",
        f"{_TRTLLM}/trtllmGenKernels/blockScaleMoe/routing",
    ),
    _phase(
        "trtllm_finalize",
        r"moe::dev::finalize|finalizeMoeRoutingKernel",
        Phase.UNPERMUTE,
        "void moe::dev::finalize::finalizeKernelVecLoad<KernelParams<bf16_t, 4, true> >(P)",
        f"{_TRTLLM}/trtllmGenKernels/blockScaleMoe/DevKernel.cu",
    ),
    _phase(
        "trtllm_permute",
        r"moe::dev::permute|expandInputRowsKernel|[eE]xpertPrefixSumKernel|[bB]uildExpertMaps|"
        r"computeStridesTmaWarpSpecialized",
        Phase.PERMUTE,
        "void tensorrt_llm::kernels::cutlass_kernels::expandInputRowsKernel<__nv_bfloat16, __nv_fp8_e4m3>(T)",
        f"{_TRTLLM}/cutlass_kernels/moe_gemm/moe_kernels.cu",
    ),
    _phase(
        "trtllm_activation",
        r"moe::dev::activation|cutlass_kernels::doActivationKernel|cutlass_kernels::doGatedActivationKernel",
        Phase.EXPERT_GEMM,
        "void moe::dev::activation::activationKernel<moe::dev::activation::KernelParams<bf16, 8> >(P)",
        f"{_TRTLLM}/trtllmGenKernels/blockScaleMoe/DevKernel.cu",
    ),
    _phase(
        "trtllm_bmm",
        r"^(?:void )?bmm_\w+",
        Phase.EXPERT_GEMM,
        "bmm_Bfloat16_E2m1E2m1_Fp32_t128x8x512u2_s6_et128x8_m128x8x64_cga1x1x1_16dp256b_TN_transOut_schedS_sm100f",
        f"{_TRTLLM}/trtllmGenKernels/batchedGemm",
    ),
    # --- Triton kernels of gpt-oss (matmul_ogs) ---
    _phase(
        "triton_topk",
        r"^_topk_(?:forward|backward)",
        Phase.ROUTER,
        "_topk_forward",
        f"{_TRITON}/topk_details/_topk_forward.py",
    ),
    _phase(
        "triton_routing",
        r"^_(?:combined_routing|routing_\w+|sum_bitmatrix|expt_data|bitmatrix_metadata|ragged_tensor_metadata)",
        Phase.PERMUTE,
        "_combined_routing_memset",
        f"{_TRITON}/routing_details/_routing_compute.py",
    ),
    _phase(
        "triton_finalize",
        r"^_(?:finalize_matmul|reduce_grouped|reduce_forward)",
        Phase.UNPERMUTE,
        "_finalize_matmul_scatter_bf16",
        f"{_TRITON}/matmul_ogs_details/_finalize_matmul.py",
    ),
    _phase(
        "triton_matmul_ogs",
        r"^_p?_?matmul_ogs",
        Phase.EXPERT_GEMM,
        "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1_swiglu",
        f"{_TRITON}/matmul_ogs_details/_matmul_ogs.py",
    ),
    # --- vLLM and SGLang ---
    _phase(
        "moe_align",
        r"moe_align_(?:block|sum)|count_and_sort_expert_tokens|moe_align_block_size",
        Phase.PERMUTE,
        "void vllm::moe::moe_align_block_size_kernel<int>(int const*, int*, int*, int*, int, int, int)",
        _VLLM,
    ),
    _phase(
        "topk_gating",
        r"topk_?[gG]ating|topk_softmax|topk_sigmoid|moeSoftmax|moeTopK|moe_topk|moe_fused_gate|grouped_topk|"
        r"fused_topk_with_score|biased_grouped_topk",
        Phase.ROUTER,
        "void vllm::moe::topkGatingSoftmax<8, 128, 4, 16, int>(float const*, bool const*, float*, int, int*)",
        _VLLM,
    ),
    _phase(
        "moe_sum",
        r"moe_sum|moe_reduce|_moe_gather|moe_fused_mul_sum",
        Phase.UNPERMUTE,
        "void vllm::moe::moe_sum_kernel<c10::BFloat16, 8>(c10::BFloat16*, c10::BFloat16 const*, int)",
        _VLLM,
    ),
    _phase(
        "fused_moe_triton",
        r"fused_moe_kernel|moe_wna16|marlin_moe|batched_triton_kernel|grouped_gemm_triton|_grouped_gemm_kernel",
        Phase.EXPERT_GEMM,
        "fused_moe_kernel",
        _VLLM,
    ),
    _phase(
        "ep_scatter",
        r"ep_scatter|pre_reorder|compute_src2dst|compute_seg_indptr|deepep_permute|deepep_compute_src2dst|"
        r"shuffle_rows|count_expert_num_tokens",
        Phase.PERMUTE,
        "_fwd_kernel_ep_scatter_1",
        _SGLANG,
    ),
    _phase(
        "ep_gather",
        r"ep_gather|post_reorder|deepep_post_reorder",
        Phase.UNPERMUTE,
        "_fwd_kernel_ep_gather",
        _SGLANG,
    ),
    # --- Megatron and Transformer Engine ---
    _phase(
        "te_unpermute",
        r"^_unpermute_(?:kernel|bwd)|moe_unpermute|moe_recover_topK",
        Phase.UNPERMUTE,
        "_unpermute_bwd_with_merging_probs_kernel",
        _TE,
    ),
    _phase(
        "te_permute",
        r"^_permute_(?:kernel|bwd)|moe_permute|_row_id_map_pass|_sort_chunks_by|_make_chunk_sort_map",
        Phase.PERMUTE,
        "_permute_kernel",
        _TE,
    ),
    # --- AMD: aiter and Composable Kernel ---
    _phase(
        "ck_moe_sorting",
        r"MoeSorting|moe_sorting",
        Phase.PERMUTE,
        "void ck_tile::MoeSortingMultiPhaseKernel_P0_v2<ck_tile::MoeSortingProblemMp<int, float> >(Kargs)",
        _CK,
    ),
    _phase(
        "ck_moe_gemm",
        r"kernel_moe_(?:mx)?gemm|MoeFlatmm|moe_ck2stages|moe_gemm[12]|moe_stage[12]",
        Phase.EXPERT_GEMM,
        "void ck::kernel_moe_gemm_2lds<ck::GridwiseMoeGemm<ck::tensor_layout::gemm::RowMajor> >(Argument)",
        _AITER,
    ),
    # --- grouped GEMMs ---
    _phase(
        "deepgemm_grouped",
        r"deep_gemm::.*(?:GemmType\)[1-9]|(?:M|K)?Grouped|m_grouped|k_grouped)",
        Phase.EXPERT_GEMM,
        "void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 128u, 128u, 1u, 8u, (deep_gemm::GemmType)1>(f)",
        _DEEPGEMM,
    ),
    _phase(
        "cutlass_grouped",
        r"GroupProblemShape|GemmGrouped|MoeFCGemm|grouped_gemm|GroupedGemm|group_gemm|gemm_grouped",
        Phase.EXPERT_GEMM,
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<"
        "cute::tuple<int, int, int> > > >(Params)",
        _CUTLASS,
    ),
    # --- PyTorch's own kernels, which are part of a MoE layer only where they run inside one ---
    _phase(
        "torch_topk",
        r"gatherTopK|radixFindKthValues|computeBlockwiseWithinKCounts|bitonicSortKVInPlace",
        Phase.ROUTER,
        "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(TensorInfo<float>)",
        f"{_TORCH}/TensorTopK.cu",
        only_between=True,
    ),
    _phase(
        "torch_histogram",
        r"kernelHistogram1D|bincount|histc",
        Phase.PERMUTE,
        "void at::native::kernelHistogram1D<long, long, long, 1, 2, -1, CUDAHistogramMemoryType>(T)",
        f"{_TORCH}/SummaryOps.cu",
        only_between=True,
    ),
    _phase(
        "torch_sort",
        r"DeviceRadixSort|radixSortKVInPlace",
        Phase.PERMUTE,
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<Policy900, false, long, long>(long*)",
        f"{_TORCH}/Sort.cu",
        only_between=True,
    ),
)

_COMPILED = tuple((re.compile(family.pattern), family) for family in FAMILIES)


@cache
def family_of(name: str) -> Family | None:
    """The first row that matches a kernel's name; None for every other kernel."""
    return next((family for pattern, family in _COMPILED if pattern.search(name)), None)
