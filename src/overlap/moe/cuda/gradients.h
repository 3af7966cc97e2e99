// The backward pass of a rank's experts, once the gradients of their results lie sorted as their
// rows did: back through the second product, the gate and the first product, and the gradients of
// both weights. Four grouped products and one kernel between them.
//
// What a forward pass leaves for it are the sorted rows and what the first product made of them,
// before the gate; the results of the experts are not needed.
//
// Memory: (2 x hidden + 3 x ffn) x padded rows, and what a forward pass leaves, (hidden + 2 x ffn)
// x padded rows for each batch in flight.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <utility>

#include "core/cuda/handles.h"
#include "gemm/cuda/grouped.h"
#include "gemm/cuda/grouped_wgrad.h"
#include "overlap/moe/cuda/expert_rows.h"
#include "overlap/moe/cuda/permute.h"

namespace tandem::gpu {

/// The experts of a rank.
struct ExpertsShape {
  DType dtype = DType::bf16;
  int experts = 1;
  int64_t rows = 0;  ///< of all of them, at most
  int64_t hidden = 0, ffn = 0;
  bool fixed_order = false;  ///< as of GroupedShape
  bool paired = false;       ///< as of GroupedShape, where rows lie sorted

  /// Of the first product: `gathered` and gated, or as a forward pass that trains needs it.
  GroupedShape in(bool gathered) const {
    return {.dtype = dtype,
            .groups = experts,
            .rows = rows,
            .columns = ffn,
            .k = hidden,
            .gathered = gathered,
            .gated = true,
            .fixed_order = fixed_order,
            .paired = paired && !gathered};
  }
  GroupedShape in_ungated(bool gathered) const {
    GroupedShape shape = in(gathered);
    shape.columns *= 2;
    shape.gated = false;
    return shape;
  }
  GroupedShape out() const {
    GroupedShape shape = in(false);
    shape.gated = false;
    std::swap(shape.columns, shape.k);
    return shape;
  }
  int64_t padded_rows() const { return out().padded_rows(); }
};

/// Whether a kernel that sorts rows before the first product costs less than the product loses by
/// gathering them: it does where each row is multiplied by much, and where tiles are full. Measured
/// on an H100 (docs/dev/gpu-findings.md).
constexpr bool sorting_is_faster(int64_t rows, int64_t experts, int64_t ffn) {
  return rows >= (ffn >= 4096 ? 128 : 512) * experts;
}

/// Whether that is better done beside the product, by 12 of 132 SMs: where sorting takes much of
/// the time. Measured on an H100.
constexpr bool sorting_beside_is_faster(int64_t ffn) {
  return ffn < 4096;
}

/// What a forward pass leaves.
struct MoeSaved {
  explicit MoeSaved(const ExpertsShape& shape);
  DeviceMemory x;        ///< [padded rows, hidden], sorted
  DeviceMemory gate_up;  ///< [padded rows, 2 x ffn]
};

class ExpertGradients {
 public:
  explicit ExpertGradients(const ExpertsShape& shape);

  /// Where the results' gradients are to be put: [padded rows, hidden], zeros where a tile is
  /// filled up.
  void* dout() const { return dout_.data(); }
  /// Where the rows' gradients are, behind multiply_dx.
  const DeviceMemory& dx() const { return dx_; }
  /// For the placing of the call's rows.
  void add_tables(MoePlacing& placing) const;

  // In this order.
  void multiply_dinner(const void* w_out, cudaStream_t stream);
  /// `weights` and `dots`: by choice.
  void gate(const SortedRows& rows, const MoeSaved& saved, const int32_t* choice,
            const float* weights, float* dots, cudaStream_t stream);
  void multiply_dx(const void* w_in, cudaStream_t stream);
  void add_dw_in(const SortedRows& rows, const MoeSaved& saved, float* dw_in, cudaStream_t stream);
  void add_dw_out(const SortedRows& rows, float* dw_out, cudaStream_t stream);

 private:
  ExpertsShape shape_;
  std::unique_ptr<GroupedGemm> to_inner_, to_x_;
  std::unique_ptr<GroupedWgrad> of_in_, of_out_;
  DeviceMemory dout_, dx_;  ///< [padded rows, hidden]
  DeviceMemory dinner_;     ///< [padded rows, ffn]; then inner activations, weighted
  DeviceMemory dgate_up_;   ///< [padded rows, 2 x ffn]
};

}  // namespace tandem::gpu
