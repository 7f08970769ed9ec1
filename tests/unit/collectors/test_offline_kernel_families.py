"""Every row of the table of kernel families matches its own example, and tells where it comes from."""

from __future__ import annotations

import re

import pytest

from moetrace_collectors.offline.kernel_families import FAMILIES, Family, Role, family_of
from moetrace_schemas.enums import Phase


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_row_matches_its_example_and_names_its_source(family: Family) -> None:
    """No row before it takes its example away, and its source is a repository with a path."""
    assert family_of(family.example) is family
    assert re.match(r"[\w.-]+/[\w.-]+[:,] .+", family.source)
    assert (family.phase is not None) or family.role is not Role.PHASE
    assert bool(family.kind) == (family.role is not Role.PHASE)


def test_names_are_unique() -> None:
    """A row can be spoken of."""
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize(
    ("kernel", "phase"),
    [
        ("_topk_forward", Phase.ROUTER),
        ("_combined_routing_compute", Phase.PERMUTE),
        ("_sum_bitmatrix_rows", Phase.PERMUTE),
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1", Phase.EXPERT_GEMM),
        ("_finalize_matmul_scatter_bf16", Phase.UNPERMUTE),
        ("void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*, int*)", Phase.DISPATCH),
        ("void deep_ep::intranode::notify_dispatch<8>(int const*, int*)", Phase.DISPATCH),
        ("void deep_ep::internode_ll::combine<false, 6144, 11>(void*, void*)", Phase.COMBINE),
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<7168u, 2048u, GemmType::MGroupedContiguous>(float*)",
         Phase.EXPERT_GEMM),
        ("void cutlass::Kernel2<cutlass::gemm::kernel::GemmGrouped<float> >(Params)", Phase.EXPERT_GEMM),
        ("_unpermute_kernel", Phase.UNPERMUTE),
        ("_sort_chunks_by_map_kernel", Phase.PERMUTE),
        ("void aiter::grouped_topk_kernel<float, float __vector(4), 8, true>(float*)", Phase.ROUTER),
    ],
)  # fmt: skip
def test_other_names_of_a_family(kernel: str, phase: Phase) -> None:
    """Variants that the examples do not show."""
    family = family_of(kernel)
    assert family is not None
    assert family.phase is phase


@pytest.mark.parametrize(
    "kernel",
    [
        "",
        "void permute_2D_data_kernel_vec<false, long, float>(int, int, int, long const*)",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT32x32x256",
        "triton_poi_fused_constant_pad_nd_moe_forward_0",
        "void deep_gemm::fp8_gemm_kernel<4096u, 7168u, 128u, 1u, (deep_gemm::GemmType)0>(float*)",
        "void vllm::reshape_and_cache_flash_kernel<unsigned short, unsigned short, 0>(unsigned short const*)",
        "void at::native::elementwise_kernel<128, 2>(int)",
        "ampere_sgemm_128x64_nn",
    ],
)
def test_kernels_of_dense_models_are_no_family(kernel: str) -> None:
    """Names that only look alike: a recommender's permute, a dense GEMM, a padding kernel."""
    assert family_of(kernel) is None
