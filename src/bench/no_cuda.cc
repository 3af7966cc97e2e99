// Stub of the GPU benchmark for builds without CUDA: unreachable with any communicator.
#include "bench/bench.h"

namespace tandem {

BenchResult run_gpu_bench(Communicator&, const BenchRequest&) {
  throw Unsupported("benchmarks on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

}  // namespace tandem
