// Test cases of MoE layers on GPU ranks: shapes, and how unevenly rows are routed.
#pragma once

#include <fmt/format.h>

#include <set>
#include <string>
#include <vector>

#include "tests/overlap/moe/cuda/problem.h"

namespace tandem::test {

inline std::vector<MoeRoutes> loads(int world) {
  std::vector<MoeRoutes> all{{.name = "even"},
                             {.name = "Zipf", .imbalance = 0},
                             {.name = "no rows on a rank", .empty_rank = world - 1},
                             {.name = "a row each", .few = true},
                             {.name = "no rows", .none = true},
                             {.name = "the last expert first", .one_expert = true},
                             {.name = "all on a rank", .one_holder = true}};
  if (world > 2) all.push_back({.name = "twice the mean", .imbalance = 2});
  return all;
}

inline std::string describe(const MoeShape& s) {
  return fmt::format("{} {} of {}, {} tokens of {}, ffn {}, tp {}", name_of(s.dtype), s.top_k,
                     s.experts, s.tokens, s.hidden, s.ffn, s.tp);
}

/// Two experts per rank, top-2 routing.
inline MoeShape two_experts_each(const Communicator& comm, int64_t tokens, int64_t hidden) {
  return {.tokens = tokens,
          .hidden = hidden,
          .ffn = 64,
          .experts = 2 * comm.size(),
          .top_k = 2,
          .dtype = DType::bf16};
}

/// Small shapes, since the reference is slow.
inline std::vector<MoeShape> shapes(int world) {
  std::vector<MoeShape> all;
  const auto add = [&](int64_t tokens, int64_t hidden, int64_t ffn, int each, int top_k, int tp) {
    ffn = (ffn + 8 * tp - 1) / (8 * tp) * (8 * tp);
    const int experts = world / tp * each;
    if (top_k > experts) top_k = experts;
    all.push_back({.tokens = tokens,
                   .hidden = hidden,
                   .ffn = ffn,
                   .experts = experts,
                   .top_k = top_k,
                   .tp = tp,
                   .dtype = all.size() % 2 ? DType::f16 : DType::bf16});
  };
  for (const int tp : std::set<int>{1, 2, world}) {
    if (world % tp != 0) continue;
    add(40, 72, 8, 2, 2, tp);
    add(150, 16, 64, 2, 3, tp);
    add(12, 1032, 64, 1, 2, tp);
    add(5, 200, 64, 8, 6, tp);
    if (tp > 1) continue;
    add(33, 64, 64, 1, 1, tp);
    add(33, 8, 8, 1, 2, tp);
    add(21, 136, 64, 4, 4, tp);
    add(65, 24, 64, 3, 2, tp);
    add(12, 520, 64, 2, 2, tp);
    add(3, 64, 8, 16, 40, tp);
    add(1, 264, 64, 2, 1, tp);
    add(300, 8, 64, 1, 1, tp);
    add(20, 328, 128, 2, 8, tp);
    add(70, 40, 64, 5, 5, tp);
    add(18, 776, 64, 3, 3, tp);
    add(130, 32, 64, 1, 8, tp);
    add(520, 520, 8, 1, 2, tp);  // a warp sums a row, not a block
  }
  return all;
}

}  // namespace tandem::test
