// Stub for builds without the model.
#include "bench/engine/bench_prefill.h"

namespace tandem {

bool has_prefill() {
  return false;
}

std::unique_ptr<BenchCase> make_prefill_case(Communicator&, const BenchRequest&) {
  return nullptr;
}

}  // namespace tandem
