// Backward pass of a rank's experts, given the gradients of their results, sorted as their rows
// were: through the second GEMM, the gate and the first GEMM, and the gradients of both weights.
// Four grouped GEMMs and one kernel between them.
//
// Saved activations of a forward pass are the sorted rows and the first GEMM's output before the
// gate; the results of the experts are not needed.
//
// Memory: (2 x hidden + 3 x ffn) x padded rows, plus saved activations of (hidden + 2 x ffn) x
// padded rows for each batch in flight.
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
  int64_t rows = 0;  ///< max over all of them
  int64_t hidden = 0, ffn = 0;
  bool fixed_order = false;  ///< as in GroupedShape
  bool paired = false;       ///< as in GroupedShape, if rows are sorted

  /// The first GEMM: `gathered` and gated; `in_ungated` is for a forward pass that trains.
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

/// Whether sorting rows in a kernel before the first GEMM costs less than that GEMM loses by
/// gathering them: true for large ffn and full tiles. Measured on an H100
/// (docs/results/gpu-experiments.md).
constexpr bool sorting_is_faster(int64_t rows, int64_t experts, int64_t ffn) {
  return rows >= (ffn >= 4096 ? 128 : 512) * experts;
}

/// Saved activations of a forward pass.
struct MoeSaved {
  explicit MoeSaved(const ExpertsShape& shape);
  DeviceMemory x;        ///< [padded rows, hidden], sorted
  DeviceMemory gate_up;  ///< [padded rows, 2 x ffn]
};

class ExpertGradients {
 public:
  explicit ExpertGradients(const ExpertsShape& shape);

  /// Gradients of the results, written by the caller: [padded rows, hidden], zeros in rows that pad
  /// a tile.
  void* dout() const { return dout_.data(); }
  /// Gradients of the rows, valid after multiply_dx.
  const DeviceMemory& dx() const { return dx_; }
  /// Adds a table of the GEMM through the second weight, whose table 0 covers all of it.
  int add_d_act_table(const GroupedCut& cut) { return to_inner_->add_table(cut); }
  const GroupedTable& d_act_table(int number) const { return to_inner_->table(number); }
  /// Adds the GEMMs' tables to the permutation of the call's rows.
  void add_tables(MoePermutation& permutation, int d_act_table) const;

  // Must be called in this order.
  /// `ready`: as in GroupedArgs.
  void multiply_d_act(const void* w_out, int table, const uint32_t* ready, cudaStream_t stream);
  /// `weights` and `d_gate_weight`: by choice.
  void gate(const SortedRows& rows, const MoeSaved& saved, const int32_t* routing_idx,
            const float* weights, float* d_gate_weight, cudaStream_t stream);
  void multiply_dx(const void* w_in, cudaStream_t stream);
  /// Added, or stored (f32 or the shape's dtype; of experts without rows, zeros).
  void write_dw_in(const SortedRows& rows, const MoeSaved& saved, const Tensor& dw_in, bool stores,
                   cudaStream_t stream);
  void write_dw_out(const SortedRows& rows, const Tensor& dw_out, bool stores, cudaStream_t stream);

 private:
  ExpertsShape shape_;
  std::unique_ptr<GroupedGemm> to_inner_, to_x_;
  std::unique_ptr<GroupedWgrad> of_in_, of_out_;
  DeviceMemory dout_, dx_;  ///< [padded rows, hidden]
  DeviceMemory d_act_;      ///< [padded rows, ffn]; then weighted inner activations
  DeviceMemory dgate_up_;   ///< [padded rows, 2 x ffn]
};

}  // namespace tandem::gpu
