// Benchmark case of Mixture-of-Experts layers: the whole layer, or one of its operators.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bench/bench_case.h"

namespace tandem {

/// Shape of a published layer.
struct MoeModel {
  std::string_view name;
  int experts, top_k;
  int64_t hidden, ffn;
};
std::span<const MoeModel> moe_models();

/// Fills the request's sizes, ep and tp from its own values or from its model's (divided by
/// `moe.scale`): m the tokens, n an expert's width, k the hidden features. Throws InvalidArgument
/// for sizes that do not fit `ranks` (0: not known yet).
void complete_moe(BenchRequest& request, int ranks);

/// nullptr if the request names another operator.
std::unique_ptr<BenchCase> make_moe_case(Communicator& comm, const BenchRequest& request);

/// Imbalance of a request's routing: max load over mean, of the EP ranks and of the experts.
struct MoeImbalance {
  double of_ranks, of_experts;
};
MoeImbalance measured_imbalance(const BenchRequest& request, int ranks);

}  // namespace tandem
