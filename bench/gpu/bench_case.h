// Runs one operator at one shape on this rank: every way it has is checked against the exact
// product and then timed beside the others.
#pragma once

#include <string>

#include "bench/gpu/report.h"
#include "kernels/cuda/gemm_lt.h"
#include "tandem/dtype.h"

namespace tandem::gpu {

struct Case {
  std::string op;   ///< ag_gemm, gemm_rs, gemm_ar or all_reduce
  int64_t m, n, k;  ///< whole; all_reduce: m x n elements
  DType dtype = DType::bf16;
};

/// Collective. The same result on every rank.
Result run_case(NcclCommunicator& comm, const LtContext& lt, Stopwatch& stopwatch, const Case& what,
                const MeasureOptions& options);

}  // namespace tandem::gpu
