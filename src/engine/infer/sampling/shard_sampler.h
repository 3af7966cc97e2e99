// Sampling from logits of which each CPU rank has a shard of the vocabulary: ranks exchange sums of
// weights and their likeliest tokens instead of the logits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cpu/token_choice.h"
#include "tandem/communicator.h"
#include "tandem/tensor.h"

namespace tandem {

class ShardSampler {
 public:
  /// Max tokens of a row that a rank sends; rows with a larger top_k are left.
  static constexpr int64_t kMaxCandidates = 256;

  ShardSampler(Communicator& tp, int64_t vocab) : tp_(tp), vocab_(vocab) {}
  /// Samples from rows of `vocab` logits; `logits`: this rank's shard of them, f32 [rows,
  /// shard_of(vocab, size, rank).count]. Each sampled[i] is sample_row's of the whole row, bit for
  /// bit, on every rank. Returns the rows that have no token because the exchanged ones do not
  /// determine it, ascending. Collective.
  std::vector<int32_t> run(const Tensor& logits, std::span<const SampleOptions> options,
                           std::span<Sampled> sampled);
  /// Bytes that this rank has sent to each other one.
  int64_t sent_bytes() const { return sent_bytes_; }

 private:
  struct Row {
    SampleOptions options;
    Tensor logits;  ///< this rank's
    cpu::Candidate max{}, chosen{0, -1};
    uint64_t sum_of_exponentials = 0, total = 0;  ///< at temperature 1 and at the row's
    size_t num_candidates = 0;                    ///< of a rank

    bool is_finite() const { return max.token >= 0; }
    bool has_temperature() const { return options.temperature != 0 && options.temperature != 1; }
  };
  /// Values of all ranks, rank by rank.
  template <typename T>
  std::vector<T> gather(const std::vector<T>& local);
  size_t num_candidates(const SampleOptions& options) const;
  bool draws_from_all(const Row& row) const;
  cpu::TokenWeights weights(const Row& row) const;
  void find_maxima(std::span<Row> rows);
  void exchange_sums(std::span<Row> rows);
  std::vector<uint64_t> pack(const Row& row) const;
  /// Reads what rank r packed at gathered[r * words].
  void unpack(std::span<const uint64_t> gathered, size_t words, Row& row) const;
  void draw_tokens(std::span<Row> rows);

  Communicator& tp_;
  const int64_t vocab_;
  int64_t sent_bytes_ = 0;
  std::vector<uint64_t> sums_before_;  ///< of the tokens of lower ranks, by row
};

}  // namespace tandem
