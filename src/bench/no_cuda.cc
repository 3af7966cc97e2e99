// Stands in for the benchmark on GPUs in a build without CUDA: no communicator gets here.
#include "bench/bench.h"

namespace tandem {

BenchResult run_gpu_bench(Communicator&, const BenchRequest&) {
  throw Unsupported("benchmarks on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)");
}

}  // namespace tandem
