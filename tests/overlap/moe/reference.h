// Slow reference of a Mixture-of-Experts layer: token by token, in f64, on one process, with
// unsharded weights. (`tandem bench` compares with an unfused layer over the same ranks.)
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace tandem {

struct MoeProblem {
  int64_t rows = 0, hidden = 0, ffn = 0;
  int experts = 1, top_k = 1;
  std::span<const int32_t> chosen;  ///< [rows, top_k]; -1: none
  std::span<const float> weights;   ///< [rows, top_k]
  std::span<const float> x;         ///< [rows, hidden]
  std::span<const float> w_in;      ///< [experts, 2 ffn, hidden]: gate rows, then up rows
  std::span<const float> w_out;     ///< [experts, hidden, ffn]
};

struct MoeGradients {
  std::vector<double> dx, dweights, dw_in, dw_out;
};

/// [rows, hidden].
std::vector<double> moe_reference(const MoeProblem& problem);
/// Gradients of sum(out x dout).
MoeGradients moe_reference_backward(const MoeProblem& problem, std::span<const float> dout);

}  // namespace tandem
