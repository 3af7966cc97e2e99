// Work of one training step on a rank, in seconds at the data sheet's rates: what a step would take
// if every kernel reached its roofline and every link its rate. step_cost.h makes a step time of
// it.
#pragma once

#include <array>

#include "engine/plan/cost/gpu_spec.h"
#include "engine/plan/fit/run_rows.h"

namespace tandem::plan {

/// Work of a layer for one microbatch: forward, backward and recomputation.
struct LayerWork {
  double gemm = 0;  ///< FLOPs of GEMMs over the tensor cores' rate
  /// Operands and results of GEMMs over the memory's rate: the share of their tiles' loops that
  /// fills and empties, and the more the smaller their dimensions are.
  double gemm_bytes = 0;
  double memory = 0;              ///< element-wise kernels, norms, and casts to 8 bits
  double attention = 0;           ///< causal half of the scores and values, bf16
  double launch = 0;              ///< in units of 100 us a pass
  double tp = 0, cp = 0, ep = 0;  ///< bytes over NVLink, or over the adapters across hosts
};

struct StepWork {
  LayerWork layer;
  double head_gemm = 0, head_bytes = 0;  ///< for one microbatch, on the last stage
  /// Layers a rank on average, on all stages but the last, and on the last.
  double mean_layers = 0, stage_layers = 0, last_stage_layers = 0;
  double stages = 1;
  double pp = 0;      ///< transfers between stages, for one microbatch
  double bubble = 0;  ///< of the schedule, as a share of all microbatches' work
  double microbatches = 1;
  bool fsdp = false;               ///< weights are gathered for every microbatch
  double window_microbatches = 1;  ///< whose work gradient sums may overlap
  double dp = 0;                   ///< gradient sums and weight gathers of a step
  double dp_messages = 0;          ///< of a step, in units of 100 us
  double optimizer = 0;
  double octaves = 0;    ///< log2 of hosts' number
  double recompute = 0;  ///< share of layers whose forward pass runs again
};

/// Ring over the ranks that have copies of the same weights.
struct WeightRing {
  double elements = 0;  ///< that a rank sends in one pass
  double adapters = 0;  ///< that carry it together; 0 within a host
};
/// Rings of the dense weights and of the experts.
std::array<WeightRing, 2> weight_rings(const RunRow& row, const GpuSpec& gpu);
double ring_seconds(const WeightRing& ring, double element_bytes, const GpuSpec& gpu);

/// Work of a row that is not skipped.
StepWork work_of(const RunRow& row, const GpuSpec& gpu);

/// True if GEMMs run in 8 bits: "fp8", "fp8-cs", "fp8 rowwise".
bool is_fp8(const RunRow& row);

}  // namespace tandem::plan
