// Stands in for the operators on GPUs in a build without CUDA: no communicator gets here.
#include "overlap/bench.h"
#include "overlap/operator.h"
#include "overlap/quantize.h"

namespace tandem {
namespace {

constexpr const char* kMissing =
    "operators on GPUs: this build has no CUDA (configure with -DTANDEM_CUDA=ON)";

}  // namespace

std::unique_ptr<OverlapOperator> make_gpu_operator(Communicator&, const OperatorSpec&,
                                                   const OverlapOptions&) {
  throw Unsupported(kMissing);
}

void quantize_rows_on_gpu(Communicator&, const Tensor&, const Tensor&, const Tensor&) {
  throw Unsupported(kMissing);
}

BenchResult run_gpu_bench(Communicator&, const BenchRequest&) {
  throw Unsupported(kMissing);
}

}  // namespace tandem
