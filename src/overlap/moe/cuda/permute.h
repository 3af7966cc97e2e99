// Kernels of a Mixture-of-Experts layer on one GPU beside its products: a router's choice, where
// each chosen row goes, the products' work cut accordingly, and the weighted sums at the end. All
// of it stays on the device and has one fixed order: bitwise equal on every run.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gemm/cuda/grouped.h"
#include "kernels/moe.h"
#include "tandem/tensor.h"

namespace tandem::gpu {

/// Most experts that the kernels take.
constexpr int kMostExperts = 1024;

/// kernels/moe.h's route_forward without its scores: logits f32 [rows, experts] -> experts i32 and
/// weights f32 [rows, top_k]. `bias`: f32 [experts] or null.
void launch_route(const Tensor& logits, const float* bias, const RouterOptions& options,
                  const Tensor& experts, const Tensor& weights, cudaStream_t stream);

/// Most tables that a placing writes.
constexpr int kMostTables = 6;

/// Rows of experts [first, first + groups) get places, sorted by expert, then by the rank that they
/// are of, in the order of schedule::moe_source, in the order of rows and, of a row, of its
/// choices. All memory is on the device.
struct MoePlacing {
  const int32_t* experts = nullptr;  ///< [sources][rows x top_k]
  int64_t choices = 0;               ///< rows x top_k, of each source
  int sources = 1, rank = 0;         ///< whose rows come, and who places them
  int own_row = 0;                   ///< number of this rank's first row; the others' are from 0
  int top_k = 1;
  int first = 0, groups = 1;
  int all_experts = 1;
  int32_t* counts = nullptr;   ///< [sources][groups], written: rows of each
  int32_t* source = nullptr;   ///< [padded rows], written: which row stands there, -1: none
  int32_t* place = nullptr;    ///< as `experts`, written: where, -1: with none of these experts
  int32_t* refused = nullptr;  ///< counted up by choices that are no expert
  /// Written unless null: [groups + 1], and [padded rows], which of all choices stands there, -1:
  /// none.
  schedule::GroupRows* group_rows = nullptr;
  int32_t* choice = nullptr;
  uint32_t* ready = nullptr;          ///< [row tiles], cleared unless null
  const unsigned* leaving = nullptr;  ///< rows that leave for other ranks; null: none
  /// Unless `blocks` is 0: the placing ends once so many blocks of a kernel beside it have begun,
  /// which count themselves. So the product behind it cannot take the SMs that they need. Both
  /// counts are reset.
  struct Senders {
    unsigned *begun = nullptr, *placed = nullptr;
    unsigned blocks = 0;
    Watch watch = {};
  } senders;
  GroupedTable tables[kMostTables];  ///< written
  int table_count = 0;
};
void launch_place(const MoePlacing& placing, cudaStream_t stream);

/// out[t] = sum over k of weights[t, k] x y[place[t, k]], in f32 in this order, over those that
/// have a place; without `weights` each is 1. y: [padded rows, columns]; out: [rows, columns],
/// bf16, f16 or f32; y's dtype or f32.
void launch_weighted_sum(const Tensor& y, const int32_t* place, const float* weights, int top_k,
                         const Tensor& out, cudaStream_t stream);

}  // namespace tandem::gpu
