// A prompt's rows through all branches with the whole residual stream on every rank and the sums of
// a branch's partial products over the ranks between branches. In one chunk that is serial. In two,
// it is ISO (arXiv 2409.11155): while one chunk's sums travel, the other chunk's rows are computed;
// the second chunk's attention reads the first one's keys and values, which are cached before.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "collectives/split_all_reduce.h"
#include "comm/progress.h"
#include "engine/infer/decoder.h"

namespace tandem {

class ChunkedPrefill final : public Prefill {
 public:
  /// Collective. At most `rows` tokens at once, in `chunks` of them, 1 or 2. A model without
  /// experts. However many chunks there are, the bits are the same (see rows_keep_bits in
  /// gemm/gemm.h), and without a format that loses bits they are PrefillBlock's.
  ChunkedPrefill(const DecoderContext& context, int64_t rows, int chunks);
  void run(std::span<const int32_t> tokens, int64_t position, const Tensor& last) override;

 private:
  void look_up(int chunk, std::span<const int32_t> tokens);
  /// Adds the chunk's sums to its rows of the residual stream.
  void take_sums(int chunk, bool is_first);
  struct Steps;
  void advance_others(int chunk);

  DecoderContext context_;
  Progress progress_;
  std::vector<std::unique_ptr<RowSums>> sums_;  ///< of the chunks
  std::vector<Shard> rows_;                     ///< of this run's chunks
  Activation x_, inverse_rms_, normed_, hidden_, inner_, residual_;
};

}  // namespace tandem
