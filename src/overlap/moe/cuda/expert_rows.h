// What happens to a Mixture-of-Experts layer's rows where they lie sorted by expert: they are
// gathered, quantized, gated, and, on the way back, their gradients go through the gate. All of
// them run over the rows that a placing made (MoePlacing::group_rows). Where a tile is filled up
// they write zeros, but for those that quantize.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/cuda/beside.h"
#include "gemm/cuda/grouped.h"
#include "tandem/dtype.h"

namespace tandem::gpu {

/// Sorted rows, as all kernels here see them.
struct SortedRows {
  DType dtype = DType::bf16;                        ///< bf16 or f16
  int64_t padded_rows = 0;                          ///< at most
  const schedule::GroupRows* group_rows = nullptr;  ///< [groups + 1]
  int groups = 1;
};

/// out[r] = x[source[r]], zeros where that is below 0: x, own and gate as in GroupedJob.
struct MoeGather {
  const void* x = nullptr;
  const void* own = nullptr;  ///< null: numbers are x's alone
  const int32_t* source = nullptr;
  void* out = nullptr;  ///< [padded rows, columns]
  int64_t columns = 0;  ///< a multiple of 8
  GroupedGate gate = {};
};
void launch_gather(const SortedRows& rows, const MoeGather& gather, cudaStream_t stream);

/// The same by `blocks` beside the product that reads them (GroupedJob::ready), in the order of its
/// table; rows of other ranks once those have arrived. Once for each placing, which has cleared
/// `ready` and how much of the order has been taken.
void launch_gather_beside(const GroupedTable& table, const MoeGather& gather, uint32_t* ready,
                          const BesideBlocks& blocks, cudaStream_t stream);

/// quantize_rows (tandem/quantize.h) to sorted rows, with its bits: of row source[r] of x, or where
/// x lies `sorted` of its row r. Rows whose source is below 0 are left as they are: what a product
/// makes of them stays in them, and they may be most of all rows.
struct MoeQuantize {
  const void* x = nullptr;
  const int32_t* source = nullptr;
  bool sorted = false;
  void* codes = nullptr;    ///< e4m3 [padded rows, columns]
  float* scales = nullptr;  ///< [padded rows]
  int64_t columns = 0;      ///< a multiple of 16
};
void launch_sorted_quantize(const SortedRows& rows, const MoeQuantize& quantize,
                            cudaStream_t stream);

/// inner = silu(gate) x up. gate_up: [padded rows, 2 x ffn]; inner: [padded rows, ffn].
void launch_sorted_swiglu(const SortedRows& rows, const void* gate_up, void* inner, int64_t ffn,
                          cudaStream_t stream);

/// With inner = silu(gate) x up and the weight w = weights[choice[r]] of a row, dinner being of
/// what the expert gave before it was weighted:
/// (`scaled` may be `dinner`)
///   dots[choice[r]] = dinner . inner, the gradient of w; scaled = w inner; dgate_up = w dinner
/// through the gate.
struct MoeGateBackward {
  const void* gate_up = nullptr;    ///< [padded rows, 2 x ffn]
  const void* dinner = nullptr;     ///< [padded rows, ffn]
  const int32_t* choice = nullptr;  ///< [padded rows], of MoePlacing
  const float* weights = nullptr;
  float* dots = nullptr;
  void* scaled = nullptr;    ///< [padded rows, ffn]
  void* dgate_up = nullptr;  ///< [padded rows, 2 x ffn]
  int64_t ffn = 0;           ///< a multiple of 8
};
void launch_gate_backward(const SortedRows& rows, const MoeGateBackward& job, cudaStream_t stream);

}  // namespace tandem::gpu
