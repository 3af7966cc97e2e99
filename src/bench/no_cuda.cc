// Stub of the GPU benchmark for builds without CUDA: unreachable with any communicator.
#include "bench/bench.h"
#include "bench/bench_paged.h"

namespace tandem {

BenchResult run_gpu_bench(Communicator&, const BenchRequest&) {
  throw Unsupported("benchmarks on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

bool has_paged_clusters(const PagedBench&) {
  return false;
}

std::vector<BenchTimes> time_on_gpus(Communicator&, const std::vector<BoundCandidate>&, int) {
  throw Unsupported("benchmarks on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

}  // namespace tandem
