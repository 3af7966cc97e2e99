// GEMMs of few rows on one rank, as in decode, by the form of the weight (gemm/coded_weight.h), for
// `tandem bench gemm`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/bench.h"
#include "gemm/coded_weight.h"
#include "tandem/communicator.h"

namespace tandem {

struct GemmBench {
  int64_t n = 4096, k = 4096;                                ///< output and input features
  std::vector<int64_t> rows{1, 8, 64};                       ///< each at most kMaxFewRows
  std::vector<std::string> weights{"none", "int8", "e4m3"};  ///< names of formats; none: `dtype`
  DType dtype = DType::bf16;                                 ///< of x and uncoded weights
  double seconds = 1;                                        ///< of measurement
};

struct GemmBenchRow {
  std::string weights;
  int64_t rows;
  BenchTimes times;  ///< of a product
  int64_t bytes;     ///< of the weight, which a product reads once
  double error = 0;  ///< max in sampled columns, as a share of its bound
  double gb_per_s() const { return double(bytes) / times.median_us * 1e-3; }
};

struct GemmBenchResult {
  std::vector<GemmBenchRow> rows;
  int64_t copy_bytes = 0;  ///< read and written by a copy
  BenchTimes copy;         ///< as many bytes as the largest weight
  double copy_gb_per_s() const { return double(copy_bytes) / copy.median_us * 1e-3; }
  bool ok() const;
};

/// Products run one after the other, each on another copy of the weight, so that none is in a
/// GPU's cache, as one graph there, as in a step of decode; CPU ranks have up to 64. Results are
/// compared with the products of the weights as they are read, in f64. `comm` has one rank.
GemmBenchResult run_gemm_bench(Communicator& comm, const GemmBench& request);

}  // namespace tandem
