// Launch of coded_product.cuh's kernel for a format.
#pragma once

#include "core/cuda/share.h"
#include "gemm/cuda/coded_gemm.h"
#include "gemm/cuda/coded_product.cuh"
#include "gemm/cuda/tensor_map.h"

namespace tandem::gpu::coded {

constexpr int kMinSteps = 4;     // of a split
constexpr int kMinBlocks = 256;  // of 64 rows of the weight, in splits: about two on an SM
constexpr int kSplitRows = 64;

/// Several blocks fit an SM, so that codes of some are converted while others wait for theirs, and
/// blocks of the next GEMM stream while these end. 64 rows need an SM's registers, and shares of x
/// for more rows of the weight.
template <int kRows>
constexpr int kBlocksOfSm = kRows < 32   ? 4
                            : kRows < 64 ? 3
                                         : 1;
template <int kRows>
constexpr int kWeightRows = kRows < 64 ? 64 : 128;
template <int kRows>
constexpr int kStages = ((220 / kBlocksOfSm<kRows>) << 10) /
                        int(Tile<kRows, kWeightRows<kRows>, 1, 1>::kStageBytes);

/// Depends on the weight only, since bits depend on it: all SMs must convert codes. Ranks that
/// share a GPU may not have SMs for clusters.
inline int splits_of(const CodedMatrix& weight) {
  if (!this_share()->alone()) return 1;
  const int64_t tiles = (weight.rows - 1) / kSplitRows + 1, steps = coded_steps(weight.columns);
  int splits = 1;
  while (splits < rows::kMaxSplits && steps / (2 * splits) >= kMinSteps &&
         tiles * splits < kMinBlocks) {
    splits *= 2;
  }
  return splits;
}

struct LaunchArgs {
  const CodedMatrix& weight;
  const Tensor &x, &out;
  bool accumulate;
};

template <int kRows, WeightFormat kFormat, typename Out, bool kSwiglu>
void launch_rows(const LaunchArgs& args, cudaStream_t stream) {
  using T = Tile<kRows, kWeightRows<kRows>, kStages<kRows>, kBlocksOfSm<kRows>>;
  const CodedMatrix& weight = args.weight;
  const Tensor &x = args.x, &out = args.out;
  constexpr int kColumns = Work<T, kSwiglu>::kColumns;
  const auto kernel = coded::kernel<T, kFormat, Out, kSwiglu>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             int(kSharedBytes<T>)),
        "coded_gemm");
  const Params params{.out = out.data(),
                      .out_stride = out.stride(0),
                      .m = int(x.dim(0)),
                      .n = int(out.dim(1)),
                      .steps = int(coded_steps(weight.columns)),
                      .splits = splits_of(weight),
                      .accumulate = args.accumulate,
                      .vectors = out.dim(1) % 4 == 0 && out.stride(0) % 4 == 0 &&
                                 reinterpret_cast<uintptr_t>(out.data()) % (4 * sizeof(Out)) == 0};
  const int64_t x_stride = x.dim(0) == 1 ? (x.dim(1) + 7) / 8 * 8 : x.stride(0);
  const Maps maps{.codes = map_matrix(weight.codes.data(), DType::e4m3, weight.rows,
                                      weight.codes.dim(1), kColumns),
                  .scales = map_words(weight.scales.data(), weight.scales.dim(0),
                                      weight.scales.dim(1), kColumns),
                  .x = map_rows(x.data(), DType::bf16, 1, x.dim(0), x.dim(1), x_stride, T::kRows)};
  const int tiles = (params.n - 1) / kColumns + 1;
  launch_clusters_early("coded_gemm", kernel, dim3(unsigned(tiles * params.splits)),
                        unsigned(params.splits), dim3(T::kThreads), kSharedBytes<T>, stream, true,
                        maps, params);
}

template <WeightFormat kFormat, typename Out, bool kSwiglu = false>
void launch(const LaunchArgs& args, cudaStream_t stream) {
  const int64_t m = args.x.dim(0);
  if (m <= 8) return launch_rows<8, kFormat, Out, kSwiglu>(args, stream);
  if (m <= 16) return launch_rows<16, kFormat, Out, kSwiglu>(args, stream);
  if (m <= 32) return launch_rows<32, kFormat, Out, kSwiglu>(args, stream);
  launch_rows<64, kFormat, Out, kSwiglu>(args, stream);
}

template <WeightFormat kFormat>
void launch_format(const LaunchArgs& args, bool swiglu, cudaStream_t stream) {
  if (swiglu) return launch<kFormat, __nv_bfloat16, true>(args, stream);
  args.out.dtype() == DType::f32 ? launch<kFormat, float>(args, stream)
                                 : launch<kFormat, __nv_bfloat16>(args, stream);
}

}  // namespace tandem::gpu::coded
