// The program of a Google Benchmark on one CPU thread.
#pragma once

#include <benchmark/benchmark.h>

#include "core/system/machine.h"
#include "core/version.h"
#include "gemm/gemm.h"

namespace tandem {

/// Returns the exit code. Results name the hardware and the commit.
inline int run_benchmarks(int argc, char** argv) {
  const KernelThreads threads(1);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::AddCustomContext("hardware", this_machine().describe());
  benchmark::AddCustomContext("commit", kCommit);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace tandem
