// Benchmark case of Mixture-of-Experts layers: the whole layer, or one of its operators.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bench/bench_case.h"

namespace tandem {

/// Whole layer, or one of its operators.
struct BenchMoeOp {
  std::string_view name;
  bool dispatches, combines;
  int gemms;  ///< each the size of one projection: gate and up before the activation, down after it
  constexpr bool is_layer() const { return dispatches && combines; }
};
constexpr BenchMoeOp kBenchMoeOps[] = {{"moe", true, true, 3},
                                       {"moe_dispatch_gemm", true, false, 2},
                                       {"moe_gemm_combine", false, true, 1}};
/// nullptr if there is none of that name.
constexpr const BenchMoeOp* find_moe(std::string_view name) {
  const auto* found = std::ranges::find(kBenchMoeOps, name, &BenchMoeOp::name);
  return found == std::end(kBenchMoeOps) ? nullptr : found;
}

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
