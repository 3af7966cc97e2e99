// Time to first token for `tandem bench prefill`: m tokens through a dense model of k hidden
// features, MLPs of width n and heads of 64 features, up to the logits after the last one.
#pragma once

#include <memory>
#include <string_view>

#include "bench/bench_case.h"

namespace tandem {

constexpr int64_t kPrefillHeadDim = 64;

inline bool is_prefill(std::string_view op) {
  return op == "prefill";
}
/// Whether this build includes the model.
bool has_prefill();

/// nullptr if the request names another operator.
std::unique_ptr<BenchCase> make_prefill_case(Communicator& comm, const BenchRequest& request);

}  // namespace tandem
