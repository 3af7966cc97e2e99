// Shared parts of the benchmarks of GPU operators and collectives.
#pragma once

#include <string>

#include "bench/bench.h"
#include "gemm/cuda/gemm_lt.h"
#include "tune/cuda/measure.h"

namespace tandem::gpu {

constexpr uint64_t kSeed = 20261121;
constexpr uint64_t kX = 100;  // rank r's inputs: stream kX + r
constexpr int kEqualRuns = 5;

struct Setting {
  GpuCommunicator& comm;
  const LtContext& lt;
  Stopwatch& stopwatch;
  MeasureOptions options;
  bool timeline;
};

inline BenchTimes times_of(const Timing& t) {
  return {t.median_us, t.min_us, t.max_us, t.host_us, t.host_burst_us, t.rounds_us};
}

/// Whether `op` is a collective with kernels in this library.
bool is_collective(const std::string& op);
/// Times a collective with every algorithm and NCCL's, as CUDA graphs.
void run_collective(const Setting& at, const BenchRequest& request, BenchResult& result);
/// Times a Mixture-of-Experts layer with every candidate, as CUDA graphs.
void run_moe(const Setting& at, const BenchRequest& request, BenchResult& result);

}  // namespace tandem::gpu
