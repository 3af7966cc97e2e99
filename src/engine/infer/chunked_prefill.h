// Prefill with the whole residual stream on every rank; partial products of a branch are summed
// over the ranks between branches. One chunk is serial. Two chunks are ISO (arXiv 2409.11155): one
// chunk is computed while the other's sums are in flight; the second chunk's attention reads the
// first one's cached keys and values.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "collectives/split_all_reduce.h"
#include "comm/progress.h"
#include "engine/infer/decoder.h"

namespace tandem {

class ChunkedPrefill {
 public:
  /// At most `rows` tokens at once, in `chunks` chunks, 1 or 2, for a model without experts,
  /// or with experts in int8. Results are bitwise equal for any number of chunks (see
  /// rows_keep_bits in gemm/gemm.h), and equal to PrefillBlock's unless the wire format is lossy.
  /// Collective.
  ChunkedPrefill(const DecoderContext& context, int64_t rows, int chunks);
  /// Runs the layers on a prompt (Prefill::run in prefill.h).
  void run(std::span<const int32_t> tokens, int64_t position, const Tensor& last);

 private:
  void look_up(int chunk, std::span<const int32_t> tokens);
  /// Adds the chunk's sums to its rows of the residual stream.
  /// `of`: branch that they are of; nullptr: of the embedding, the first ones.
  void take_sums(int chunk, const BranchLayout* of);
  struct Steps;
  void advance_other_chunks(int chunk);

  DecoderContext context_;
  Progress progress_;
  std::vector<std::unique_ptr<RowSums>> sums_;  ///< one per chunk
  std::vector<Shard> rows_;                     ///< chunks of this run
  std::optional<RowExperts> experts_;           ///< of int8 weights
  Activation x_, inverse_rms_, x_norm_, hidden_, inner_, residual_;
};

}  // namespace tandem
