// Decoder layers for inference on rows of several sequences: single tokens that follow others, and
// chunks of prompts. Every rank holds all rows' residuals; partial products are summed over the
// ranks. A row's bits depend on its sequence's tokens only: not on the other rows of a step, nor on
// how its prompt was divided (except if a codec of experts is lossy; and see rows_keep_bits in
// gemm/gemm.h).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "collectives/split_all_reduce.h"
#include "comm/progress.h"
#include "engine/infer/decoder.h"
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
  /// Up to `rows` rows in a step, `chosen` of them chosen. Collective.
  BatchDecoder(const DecoderContext& context, int64_t rows, int64_t chosen,
               const OverlapOptions& overlap);
  /// Appends the rows, at least one, to their sequences, and returns the tokens after the chosen
  /// ones, the same on every rank, valid until the next call. Collective.
  std::span<const Sampled> run(const BatchRows& rows);
  /// Logits of the last step's chosen row, f32 [vocab], on the host; the same on every rank.
  std::vector<float> read_logits(size_t chosen) const;

 private:
  struct Steps;
  /// out = x x weight^T.
  void multiply(const Tensor& x, const WeightMatrix& weight, const Tensor& out);
  void look_up(const BatchRows& rows);
  /// Sums of `partial` products over the ranks, which `compute` writes, in `residual_`.
  template <typename Compute>
  void sum(int64_t rows, const Wire& wire, const Compute& compute);
  Tensor logits(std::span<const int32_t> chosen);
  std::span<const Sampled> sample(const Tensor& logits, std::span<const SampleOptions> options);

  DecoderContext context_;
  Progress progress_;
  std::optional<RowSums> sums_;  ///< CPU ranks
  std::optional<DecoderExperts> experts_;
  TokenRows tokens_, chosen_;
  Activation x_, inverse_rms_, x_norm_, hidden_, inner_, residual_;
  Activation last_, last_norm_, local_logits_, gathered_, logits_;
  Activation options_, sample_scratch_, sampled_;
  Upload upload_options_;
  std::vector<Sampled> host_sampled_;
  Tensor last_logits_;  // of the chosen rows
};

}  // namespace tandem
