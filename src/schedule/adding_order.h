// How the product of GEMM+RS that adds the peers' parts (overlap/gemm_rs/cuda/adding.h) orders what
// it does besides: parts are added evenly over those of its steps along K that come behind `lead`,
// one behind each of as many runs of them as there are, but the `late` ones behind all: at least
// those of the last source. Its part arrives last, and a tile that waits for it has nothing else
// left to do. Under the `lead` the tile before leaves, a box of its columns at a time. Pure
// functions, read by both sides of the kernel's pipeline, which must agree, and by the tests. With
// 0 parts, as in AG+GEMM on the same pipeline, nothing is asked.
#pragma once

namespace tandem::schedule {

struct AddingOrder {
  int steps = 1;  ///< along K; at least lead
  int parts = 1;  ///< steps that add
  int lead = 0;   ///< steps along K that come before all that add
  int late = 1;   ///< of the parts; at least 1
};

/// Steps along K that come before the one that adds number `part`.
constexpr int steps_before(const AddingOrder& order, int part) {
  const int runs = order.parts - order.late + 1;
  if (part + 1 >= runs) return order.steps;
  return order.lead + (part + 1) * (order.steps - order.lead) / runs;
}

/// The step under which a box of the tile before leaves: each `every` steps behind the one before,
/// all of them within `every` steps for each. `shift`: who has another one leaves at other steps.
constexpr int leaves_at(int every, int shift, int box) {
  return box * every + shift % every;
}

}  // namespace tandem::schedule
