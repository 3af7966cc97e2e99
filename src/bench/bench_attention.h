// Measurement of context-parallel attention for `tandem bench attention`: every form, the tuner's
// choice, the computation alone and the bytes alone, interleaved. Rows of the result are checked
// against the reference in double, and all forms against each other, in the same run.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "bench/bench.h"
#include "overlap/attention/shape.h"
#include "tandem/communicator.h"

namespace tandem {

struct AttentionBench {
  ContextShape shape;
  int64_t window = 0;
  bool backward = false;  ///< times both passes as one
  int repeats = 15;
};

struct AttentionForm {
  Strategy strategy;
  BenchTimes times;
  int64_t bytes = 0, bytes_formula = 0;  ///< of the rank that sends most
};

struct AttentionBenchResult {
  std::map<std::string, AttentionForm> forms;
  std::string refusals;                         ///< forms that cannot run, and why
  BenchTimes compute, wire, chosen;             ///< wire: the bytes of the form that sends least
  std::string chosen_forward, chosen_backward;  ///< the tuner's
  std::vector<Receipt> receipts;                ///< of the passes that the tuner chose
  double max_rel = 0;                           ///< largest difference over the largest value
  double of_bound = 0;                          ///< largest ratio of a difference to its bound
  bool same_bits = true;                        ///< of all forms, and of repeated runs
  bool same_bytes = true;                       ///< every rank and run sends the formula's

  const std::string& fastest() const;
  /// Times of the fastest form of a strategy; each has one that always runs.
  const BenchTimes& fastest(Strategy strategy) const;
  double limit_us() const;
  /// Share of the communication that could be hidden, the smaller of both times, that `times` hide.
  double hidden(const BenchTimes& times) const;
  bool ok() const { return of_bound <= 1 && same_bits && same_bytes; }
};

/// Collective. Throws InvalidArgument as ContextOperator does, and for one rank, which sends
/// nothing.
AttentionBenchResult run_attention_bench(Communicator& comm, const AttentionBench& request);

}  // namespace tandem
