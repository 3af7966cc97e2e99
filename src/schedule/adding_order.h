// How the main loop of the GEMM+RS that adds the peers' partial tiles (overlap/gemm_rs/cuda/
// adding.h) orders what it does besides: steps that add are spread evenly over those of its
// k-blocks that come after `lead`, one after each of as many runs of them as there are, but the
// `late` ones after all: at least those of the last source. Its rows arrive last, and a tile that
// waits for them has nothing else left to do. Under the `lead` the tile before is stored, a box of
// its columns at a time. Pure functions, read by both sides of the kernel's pipeline, which must
// agree, and by the tests. With no step that adds, as in AG+GEMM on the same pipeline, nothing is
// asked.
#pragma once

namespace tandem::schedule {

struct AddingOrder {
  int steps = 1;      ///< along K; at least lead
  int add_steps = 1;  ///< steps that add rows
  int lead = 0;       ///< steps along K that come before all that add
  int late = 1;       ///< steps that add after all along K; at least 1
};

/// Steps along K that come before number `add_step` of those that add.
constexpr int steps_before(const AddingOrder& order, int add_step) {
  const int runs = order.add_steps - order.late + 1;
  if (add_step + 1 >= runs) return order.steps;
  return order.lead + (add_step + 1) * (order.steps - order.lead) / runs;
}

/// The step along K under which a box of the tile before is stored: each `every` steps after the
/// one before, all of them within `every` steps for each. `shift`: others with another one store at
/// other steps.
constexpr int store_step(int every, int shift, int box) {
  return box * every + shift % every;
}

}  // namespace tandem::schedule
