// Permutation of the rows of a Mixture-of-Experts layer on one GPU, and the work tables of its
// GEMMs that follow from it. Everything stays on the device in one fixed order: bitwise equal on
// every run.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gemm/cuda/grouped.h"
#include "kernels/cuda/router.h"
#include "tandem/tensor.h"

namespace tandem::gpu {

/// Max tables that a permutation writes.
constexpr int kMaxTables = 6;

/// Permutation of the rows of experts [first, first + groups): sorted by expert, then by source
/// rank in the order of schedule::moe_source, then by row, then by the row's choice. All memory is
/// on the device.
struct MoePermutation {
  const int32_t* experts = nullptr;  ///< [sources][rows x top_k]
  int64_t routings = 0;              ///< rows x top_k, per source
  int sources = 1, rank = 0;         ///< number of source ranks, and this rank
  int local_row = 0;  ///< index of this rank's first row; the other ranks' start at 0
  int top_k = 1;
  int first = 0, groups = 1;
  int all_experts = 1;
  int32_t* counts = nullptr;    ///< [sources][groups], written: rows of each
  int32_t* source = nullptr;    ///< [padded rows], written: row at each position, -1: none
  int32_t* position = nullptr;  ///< as `experts`, written: position, -1: with none of these experts
  int32_t* dropped = nullptr;   ///< counter of routings to an invalid expert
  /// Written unless null: [groups + 1], and [padded rows], index of the choice at each position,
  /// -1: none.
  schedule::GroupRows* group_rows = nullptr;
  int32_t* routing_idx = nullptr;
  uint32_t* ready = nullptr;          ///< [row tiles], cleared unless null
  const unsigned* leaving = nullptr;  ///< rows to be sent to other ranks; null: none
  /// If `blocks` > 0: the permutation ends once so many blocks of a concurrent kernel have begun
  /// and counted themselves, so that the following GEMM cannot take the SMs they need. Both counts
  /// are reset.
  struct Senders {
    unsigned *begun = nullptr, *permuted = nullptr;
    unsigned blocks = 0;
    Deadline deadline = {};
  } senders;
  GroupedTable tables[kMaxTables];  ///< written
  int table_count = 0;
};
void launch_permute(const MoePermutation& permutation, cudaStream_t stream);

}  // namespace tandem::gpu
