#include "core/cuda/architecture.h"
#include "core/cuda/load_module.cuh"
#include "core/cuda/share.h"
#include "core/system/env.h"
#include "gemm/cuda/rows_product.cuh"
#include "gemm/cuda/rows_product.h"
#include "gemm/cuda/tensor_map.h"

namespace tandem::gpu {
namespace {

using rows::Params, rows::Tile, rows::Work;

constexpr int kWeightRows = 128;
constexpr int kMinSteps = 8;  // k-blocks of a split

/// Two blocks fit an SM, so that one of the next tile or GEMM streams while another one ends.
template <int kRows>
using RowsTile =
    Tile<kRows, kWeightRows, (110 << 10) / ((kWeightRows + kRows) * rows::kStep * 2), 2>;

/// Depends on the weight only, since bits depend on it: small ones are divided until most SMs have
/// a block. Ranks that share a GPU may not have SMs for clusters.
int splits_of(const Tensor& weight) {
  if (weight.dim(0) >= 16384 || !this_share()->alone()) return 1;
  const int64_t tiles = (weight.dim(0) - 1) / kWeightRows + 1, steps = weight.dim(1) / rows::kStep;
  int splits = 1;
  while (splits < rows::kMaxSplits && steps / (2 * splits) >= kMinSteps &&
         (splits == 1 || tiles * splits < 128)) {
    splits *= 2;
  }
  return splits;
}

template <int kRows, typename Out, bool kSwiglu>
void launch(const RowsProductArgs& args, cudaStream_t stream) {
  using T = RowsTile<kRows>;
  const int splits = splits_of(args.weight);
  const Tensor &a = args.a, &weight = args.weight, &out = args.out;
  constexpr int kColumns = Work<T, kSwiglu>::kColumns;
  const auto kernel = rows::kernel<T, Out, kSwiglu>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             int(rows::kSharedBytes<T>)),
        "rows_gemm");
  const Params params{.out = out.data(),
                      .out_stride = out.stride(0),
                      .m = int(a.dim(0)),
                      .n = int(out.dim(1)),
                      .steps = int(a.dim(1) / rows::kStep),
                      .splits = splits,
                      .accumulate = args.accumulate,
                      .vectors = out.dim(1) % 4 == 0 && out.stride(0) % 4 == 0 &&
                                 reinterpret_cast<uintptr_t>(out.data()) % (4 * sizeof(Out)) == 0};
  const int64_t a_stride = a.dim(0) == 1 ? a.dim(1) : a.stride(0);
  const CUtensorMap of_weight =
      map_matrix(weight.data(), DType::bf16, weight.dim(0), weight.dim(1), kColumns);
  const CUtensorMap of_x =
      map_rows(a.data(), DType::bf16, 1, a.dim(0), a.dim(1), a_stride, T::kRows);
  const int tiles = (params.n - 1) / kColumns + 1;
  launch_clusters_early("rows_gemm", kernel, dim3(unsigned(tiles * splits)), unsigned(splits),
                        dim3(T::kThreads), rows::kSharedBytes<T>, stream, args.early, of_weight,
                        of_x, params);
}

template <typename Out, bool kSwiglu = false>
void launch(const RowsProductArgs& args, cudaStream_t stream) {
  const int64_t m = args.a.dim(0);
  if (m <= 8) return launch<8, Out, kSwiglu>(args, stream);
  if (m <= 16) return launch<16, Out, kSwiglu>(args, stream);
  if (m <= 32) return launch<32, Out, kSwiglu>(args, stream);
  launch<64, Out, kSwiglu>(args, stream);
}

}  // namespace

bool has_rows_product() {
  // The GPU of a thread rarely changes.
  thread_local int device = -1;
  thread_local bool has = false;
  if (const int current = this_share()->device(); current != device) {
    has = !env().gpu_portable && architecture_of(current) == kHopper;
    device = current;
  }
  return has;
}

void launch_rows_product(cudaStream_t stream, const RowsProductArgs& args) {
  if (args.swiglu) return launch<__nv_bfloat16, true>(args, stream);
  args.out.dtype() == DType::f32 ? launch<float>(args, stream)
                                 : launch<__nv_bfloat16>(args, stream);
}

}  // namespace tandem::gpu
