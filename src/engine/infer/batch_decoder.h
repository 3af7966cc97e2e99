// Decoder layers for inference on rows of several sequences: single tokens that follow others, and
// chunks of prompts. Every rank holds all rows' residuals; partial products are summed over the
// ranks. A row's bits depend on its sequence's tokens only: not on the other rows of a step, nor on
// how its prompt was divided (except if a codec of experts is lossy; and see rows_keep_bits in
// gemm/gemm.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "collectives/split_all_reduce.h"
#include "comm/progress.h"
#include "core/replay.h"
#include "engine/infer/decoder.h"
#include "engine/infer/split_rows.h"
#include "kernels/sample.h"

namespace tandem {

/// Rows of a step. A sequence's rows are consecutive, in order.
struct BatchRows {
  std::vector<int32_t> tokens, sequences, positions;
  std::vector<int32_t> pages;          ///< as KvCache::set_rows has them
  std::vector<PagedChunk> chunks;      ///< of prompts, after all other rows
  std::vector<int32_t> chosen;         ///< rows that a token is sampled after
  std::vector<SampleOptions> options;  ///< of the chosen rows
};

class BatchDecoder {
 public:
  /// Up to `rows` rows in a step, `chosen` of them chosen. `overlap`: of the experts, and on GPUs
  /// of the GEMMs of full steps. On a GPU steps of all sizes run on tokens that nobody asked for,
  /// in the cache's first page: no algorithm is timed later. Collective.
  BatchDecoder(const DecoderContext& context, int64_t rows, int64_t chosen,
               const OverlapOptions& overlap);
  /// Appends the rows, at least one, to their sequences, and returns the tokens after the chosen
  /// ones, the same on every rank, valid until the next call. Collective.
  std::span<const Sampled> run(const BatchRows& rows);
  /// Logits of the last step's chosen row, f32 [vocab], on the host; the same on every rank.
  std::vector<float> read_logits(size_t chosen) const;
  /// Logits after `count` rows of the last step from `row` on, at most the constructor's `chosen`,
  /// f32 [count, vocab], on the host; the same on every rank. They take the place of those of the
  /// chosen rows. Collective.
  std::vector<float> compute_logits_after(int64_t row, int64_t count);

 private:
  struct Steps;
  void run_all_sizes();
  BatchRows dummy_rows(int64_t count) const;
  /// Whether the ranks divide a step of `count` rows.
  bool is_split(int64_t count) const;
  /// Whether GEMMs add to the residual stream.
  bool adds_in_gemm() const;
  void upload(const BatchRows& rows);
  /// `count` bytes of inputs_ from `begin`.
  Tensor input(int64_t begin, int64_t count) const;
  Tensor tokens(int64_t count) const;
  Tensor chosen_rows(int64_t count) const;
  Tensor options(int64_t count) const;
  /// Enqueues or computes everything from the uploaded rows to the sampled tokens.
  void run_rows(int64_t count, int64_t chosen);
  void look_up(int64_t count);
  void run_branches(int64_t count);
  /// Sums of `partial` products over the ranks, which `compute` writes, in `residual_`.
  template <typename Compute>
  void sum(int64_t rows, const Wire& wire, const Compute& compute);
  /// The rows `chosen` of the residual stream to last_.
  void gather_chosen(int64_t count, int64_t chosen);
  void compute_logits(int64_t chosen);
  /// Logits of the chosen rows, [chosen, vocab], bitwise equal on every rank.
  Tensor logits(int64_t chosen) const;

  DecoderContext context_;
  Progress progress_;
  std::optional<RowSums> sums_;  ///< CPU ranks
  std::optional<DecoderExperts> experts_;
  std::optional<RowExperts> row_experts_;  ///< of int8 weights
  std::optional<SplitRows> split_;         ///< several GPU ranks, for steps of about max rows
  int64_t max_rows_, max_chosen_;
  Activation inputs_;  ///< u8: options, chosen rows and tokens of a step
  Upload upload_;
  std::vector<std::byte> host_inputs_;
  Activation x_, inverse_rms_, x_norm_, hidden_, inner_, residual_;
  Activation last_, last_norm_, local_logits_, gathered_, logits_;
  Activation sample_scratch_, sampled_;
  std::vector<Sampled> host_sampled_;
  Replay replay_;
  int64_t num_rows_ = 0, num_chosen_ = 0;  // of the last step
};

}  // namespace tandem
