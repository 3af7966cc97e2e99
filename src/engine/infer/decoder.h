// Decoder for inference on rows of several sequences: single tokens that follow others, and chunks
// of prompts. How the ranks hold the rows of large steps is chosen at construction (infer/rows.h).
// A row's bits depend on its sequence's tokens only: not on the other rows of a step, nor on how
// its prompt was divided (except if a codec of experts is lossy; and see rows_keep_bits in
// gemm/gemm.h).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "comm/progress.h"
#include "core/download.h"
#include "core/replay.h"
#include "engine/infer/replicated_rows.h"
#include "engine/infer/rows.h"
#include "engine/infer/sampling/shard_sampler.h"
#include "kernels/sample.h"

namespace tandem {

/// Rows of a step. A sequence's rows are consecutive, in order.
struct StepRows {
  /// Token -1 - i is the one sampled after chosen row i of the step launched before.
  std::vector<int32_t> tokens, sequences, positions;
  std::vector<int32_t> pages;          ///< as KvCache::set_rows has them
  std::vector<PagedChunk> chunks;      ///< of prompts, after all other rows
  std::vector<int32_t> chosen;         ///< rows that a token is sampled after
  std::vector<SampleOptions> options;  ///< of the chosen rows
  std::vector<int32_t> read;           ///< chosen rows that read_logits is called for, ascending
};

class Decoder {
 public:
  /// Up to `rows` rows in a step, `chosen` of them chosen. On a GPU steps of all sizes run on
  /// tokens that nobody asked for, in the cache's first page: no algorithm is timed later.
  /// Collective.
  Decoder(const DecoderContext& context, int64_t rows, int64_t chosen,
          const RowsOptions& options = {});
  /// Appends the rows, at least one, to their sequences. On a GPU they may be computed later. At
  /// most kMaxLaunched steps may be launched and not collected. Collective.
  void launch(const StepRows& rows);
  /// Waits for the first step not yet collected and returns the tokens after its chosen rows, the
  /// same on every rank, valid until the next launch.
  std::span<const Sampled> collect();
  static constexpr int kMaxLaunched = 2;
  /// Launches a step while no other is, and returns its tokens.
  std::span<const Sampled> run(const StepRows& rows) {
    launch(rows);
    return collect();
  }
  /// Logits of the last step's chosen row, one of StepRows::read, f32 [vocab], on the host; the
  /// same on every rank.
  std::vector<float> read_logits(size_t chosen) const;
  /// Logits after `count` rows of the last step from `row` on, at most the constructor's `chosen`,
  /// f32 [count, vocab], on the host; the same on every rank. They take the place of those of the
  /// chosen rows. Collective.
  std::vector<float> compute_logits_after(int64_t row, int64_t count);
  /// Whether a step has either prompts or other rows.
  bool takes_turns() const { return takes_turns_; }
  /// Bytes of logits, or of what stands for them, that this rank has sent to each other one; on
  /// GPUs not those of steps that a graph replays.
  int64_t logit_bytes() const { return sampler_.sent_bytes() + gathered_bytes_; }
  /// Form of large steps.
  const RowsForm& form() const { return large_.form; }

 private:
  /// Tokens of a step on the host, in pages that hold nothing else, so that they can be pinned.
  struct Result {
    Result(const Exec& exec, int64_t max_chosen);

    Memory memory;
    Sampled* tokens;
    Download download;
    int64_t count = 0;
  };

  void run_all_sizes();
  StepRows dummy_rows(int64_t count) const;
  RowRunner& runner_of(int64_t count, bool has_prompts);
  void upload(const StepRows& rows);
  /// `count` bytes of inputs_ from `begin`.
  Tensor input(int64_t begin, int64_t count) const;
  Tensor tokens(int64_t count) const;
  Tensor chosen_rows(int64_t count) const;
  Tensor options(int64_t count) const;
  /// Enqueues or computes everything from the uploaded rows to the sampled tokens.
  void run_rows(int64_t count, int64_t chosen, bool is_fed);
  void fetch(int64_t chosen);
  const Result& last_launched() const;
  /// This rank's logits of the first `count` rows of last_.
  void compute_logits(int64_t count);
  Tensor local_logits(int64_t count) const;
  /// Gathers logits of some rows, ascending, as the first ones of logits().
  void gather_logits(std::span<const int32_t> rows);
  /// Logits of the gathered rows, [count, vocab], bitwise equal on every rank.
  Tensor logits(int64_t count) const;
  /// Logits of a chosen row that is whole on every rank, [1, vocab].
  Tensor whole_row(int32_t row) const;
  void sample_shards(int64_t chosen);

  DecoderContext context_;
  Progress progress_;
  int64_t max_rows_, max_chosen_;
  bool takes_turns_;
  StepMemory memory_;
  std::unique_ptr<StepExperts> experts_;
  ReplicatedRows small_;  ///< steps that large_ does not take
  ChosenRows large_;
  RowRunner* runner_ = &small_;  ///< of the last step
  Activation inputs_;            ///< u8: options, chosen rows and tokens of a step
  Upload upload_;
  std::vector<std::byte> host_inputs_;
  Activation last_, last_norm_, last_rms_, local_logits_, gathered_, logits_;
  Activation sample_scratch_, sampled_;
  std::array<Result, kMaxLaunched> results_;
  size_t num_launched_ = 0, num_collected_ = 0;
  Replay replay_;
  ShardSampler sampler_;
  std::vector<int32_t> read_, gathered_rows_;  // of the last step
  int64_t gathered_bytes_ = 0;
};

}  // namespace tandem
