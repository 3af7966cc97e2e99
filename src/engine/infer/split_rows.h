// Decoder layers of one full step on rows that GPU ranks divide: the residual stream is sharded by
// rows, and the gathers and sums of the rows overlap the GEMMs (FLUX). Steps of a few rows less are
// padded.
#pragma once

#include "engine/infer/decoder.h"

namespace tandem {

/// With fewer rows a sum takes little time, and less than its operators' kernels need.
constexpr int64_t kMinSplitRows = 512;

class SplitRows {
 public:
  /// Steps of exactly `rows` rows; `hidden` and `inner`: memory of that many. Collective: times the
  /// operators, unless `overlap` says which to use.
  SplitRows(const DecoderContext& context, int64_t rows, const OverlapOptions& overlap,
            const Tensor& hidden, const Tensor& inner);

  int64_t rows() const { return rows_; }
  /// Whether a step of `count` rows is faster padded to `rows` than without a division.
  bool takes(int64_t count) const { return count <= rows_ && count >= rows_ - rows_ / 8; }
  /// From this rank's partial embeddings [rows, hidden] to the last layer's residuals. The first
  /// `count` rows are the cache's; the others' values are any. Collective.
  void run(const Tensor& partial_embeddings, int64_t count, DecoderExperts* experts);
  /// out = residuals of the rows `chosen`, f32 [chosen, hidden], on every rank. Collective.
  void gather(const Tensor& chosen, const Tensor& out);

 private:
  struct Steps;

  DecoderContext context_;
  int64_t rows_;
  Shard local_;
  BranchProducts products_;
  Tensor hidden_, inner_;
  Activation x_, inverse_rms_, x_norm_, residual_;
};

}  // namespace tandem
