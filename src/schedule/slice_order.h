// Order of the additions in the main loop of fused GEMM+RS (overlap/gemm_rs/cuda/fused.h). Add
// steps, which add the peers' partial tiles, are spread evenly over the K steps after `lead`: one
// after each of equally long runs of K steps, except the `late` ones, which follow the last K step.
// These are at least those of the last source, whose rows arrive last, when a tile that waits for
// them has nothing else left to do. During `lead` the previous tile is stored, one store tile of
// columns at a time. Pure functions, read by producer and consumer warps of the kernel's pipeline,
// which must agree, and by the tests. Not used without add steps, as in AG+GEMM on the same
// pipeline.
#pragma once

namespace tandem::schedule {

struct SliceOrder {
  int steps = 1;      ///< along K; at least lead
  int add_steps = 1;  ///< steps that add rows
  int lead = 0;       ///< K steps before the first add step
  int late = 1;       ///< add steps after the last K step; at least 1
};

/// Number of K steps before add step `add_step`.
constexpr int steps_before(const SliceOrder& order, int add_step) {
  const int runs = order.add_steps - order.late + 1;
  if (add_step + 1 >= runs) return order.steps;
  return order.lead + (add_step + 1) * (order.steps - order.lead) / runs;
}

/// K step during which store tile `box` of the previous tile is stored: one in each interval of
/// `every` steps. Different `shift`s spread the stores of different callers.
constexpr int store_step(int every, int shift, int box) {
  return box * every + shift % every;
}

}  // namespace tandem::schedule
