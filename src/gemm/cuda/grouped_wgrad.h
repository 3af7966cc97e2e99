// Weight gradients of a grouped GEMM on one Hopper GPU: for each group dW = dy^T x over its rows,
// which are sorted as in grouped.h, stored or added. The number of rows of a group is only known on
// the device. Tiles are tiles of its weight, and each writes its sum once to memory: deterministic.
// bf16 or f16, f32 sums.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "schedule/grouped_order.h"
#include "tandem/dtype.h"

namespace tandem::gpu {

struct WgradShape {
  DType dtype = DType::bf16;
  int groups = 1;
  int64_t padded_rows = 0;        ///< rows of dy and x
  int64_t rows = 0, columns = 0;  ///< shape of a group's weight: features of dy and of x
};

struct WgradArgs {
  const void* dy = nullptr;                         ///< [padded rows, rows]
  const void* x = nullptr;                          ///< [padded rows, columns]
  const schedule::GroupRows* group_rows = nullptr;  ///< output of MoePermutation
  void* dweight = nullptr;                          ///< [groups x rows, columns]
  DType dtype = DType::f32;                         ///< of dweight: f32, or stored, the shape's
  /// Stored, zeros for a group without rows; else added.
  bool stores = false;
};

/// Padding rows of a group's last tile must be zeros in both operands.
class GroupedWgrad {
 public:
  virtual ~GroupedWgrad() = default;
  /// Throws InvalidArgument for another dtype of dweight.
  virtual void launch(const WgradArgs& args, cudaStream_t stream) = 0;
};

/// Throws InvalidArgument for other dtypes, or if rows or columns are not multiples of 8.
std::unique_ptr<GroupedWgrad> make_grouped_wgrad(const WgradShape& shape);

}  // namespace tandem::gpu
