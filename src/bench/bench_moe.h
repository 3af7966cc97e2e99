// Mixture-of-Experts layers as `tandem bench` times them: the whole layer, or one of its operators.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bench/bench_subject.h"

namespace tandem {

/// A published layer's shape.
struct MoeModel {
  std::string_view name;
  int experts, top_k;
  int64_t hidden, ffn;
};
std::span<const MoeModel> moe_models();

/// Fills the request's sizes from its own or its model's, `hidden_scale`, ep and tp: m the tokens,
/// n an expert's width, k the hidden features. Throws InvalidArgument for what does not fit `ranks`
/// (0: not known yet).
void complete_moe(BenchRequest& request, int ranks);

/// nullptr where the request is of another operator.
std::unique_ptr<BenchSubject> make_moe_subject(Communicator& comm, const BenchRequest& request);

/// Of what a request routes: load over the mean of the EP rank with most rows, and of the expert.
struct MoeImbalance {
  double of_ranks, of_experts;
};
MoeImbalance measured_imbalance(const BenchRequest& request, int ranks);

}  // namespace tandem
