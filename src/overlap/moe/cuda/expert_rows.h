// Operations on an MoE layer's rows sorted by expert: gather, SwiGLU, and its backward pass. All
// run over the permuted rows (MoePermutation::group_rows). Rows that pad a tile are written as
// zeros.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/cuda/concurrent.h"
#include "gemm/cuda/grouped.h"
#include "tandem/dtype.h"

namespace tandem::gpu {

/// Sorted rows, common to all kernels here.
struct SortedRows {
  DType dtype = DType::bf16;                        ///< bf16 or f16
  int64_t padded_rows = 0;                          ///< max
  const schedule::GroupRows* group_rows = nullptr;  ///< [groups + 1]
  int groups = 1;
};

/// out[r] = x[source[r]], or zeros if source[r] < 0: x, own and gate as in GroupedArgs.
struct MoeGather {
  const void* x = nullptr;
  const void* local = nullptr;  ///< null: indices refer to x only
  const int32_t* source = nullptr;
  void* out = nullptr;  ///< [padded rows, columns]
  int64_t columns = 0;  ///< a multiple of 8
  GroupedArrivals arrivals = {};
};
void launch_gather(const SortedRows& rows, const MoeGather& gather, cudaStream_t stream);

/// Gathers by `blocks` concurrently with the GEMM that reads the rows (GroupedArgs::ready), in the
/// order of its table; rows of other ranks once they have arrived. May run once per permutation,
/// which clears `ready` and the order's progress counter.
void launch_overlapped_gather(const GroupedTable& table, const MoeGather& gather, uint32_t* ready,
                              const ConcurrentBlocks& blocks, cudaStream_t stream);

/// inner = silu(gate) x up. gate_up: [padded rows, 2 x ffn]; inner: [padded rows, ffn].
void launch_sorted_swiglu(const SortedRows& rows, const void* gate_up, void* inner, int64_t ffn,
                          cudaStream_t stream);

/// With inner = silu(gate) x up, the weight w = weights[choice[r]] of a row, and d_act the
/// gradient of inner without the factor w: dots[choice[r]] = d_act . inner, the gradient of w;
/// scaled = w inner; dgate_up = w d_act through the gate. `scaled` may be `d_act`.
struct MoeGateBackward {
  const void* gate_up = nullptr;         ///< [padded rows, 2 x ffn]
  const void* d_act = nullptr;           ///< [padded rows, ffn]
  const int32_t* routing_idx = nullptr;  ///< [padded rows], from MoePermutation
  const float* weights = nullptr;
  float* d_gate_weight = nullptr;
  void* scaled = nullptr;    ///< [padded rows, ffn]
  void* dgate_up = nullptr;  ///< [padded rows, 2 x ffn]
  int64_t ffn = 0;           ///< a multiple of 8
};
void launch_gate_backward(const SortedRows& rows, const MoeGateBackward& params,
                          cudaStream_t stream);

}  // namespace tandem::gpu
