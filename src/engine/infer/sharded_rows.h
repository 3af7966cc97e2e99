// Rows that the ranks divide: the residual stream is sharded by rows, and the gathers and sums of
// the rows overlap the GEMMs (FLUX). Steps of a few rows less are padded.
#pragma once

#include <array>
#include <memory>

#include "engine/infer/decoder_context.h"
#include "engine/infer/row_runner.h"
#include "engine/infer/step_experts.h"
#include "engine/model/axes.h"
#include "tandem/overlap.h"

namespace tandem {

class ShardedRows final : public RowRunner {
 public:
  /// Steps of exactly `rows` rows. `experts`: nullptr for a model without. Collective: times the
  /// operators, unless `overlap` says which to use.
  ShardedRows(const DecoderContext& context, int64_t rows, const OverlapOptions& overlap,
              StepMemory& memory, StepExperts* experts);
  /// Whether a step is faster padded than with all rows on every rank: on CPU ranks one that is
  /// large enough to be what was timed.
  bool takes(int64_t count) const override {
    const int64_t padding = context_.forms().has_row_sums ? rows_ / 2 : rows_ / 8;
    return count <= rows_ && count >= rows_ - padding;
  }
  void run(const Tensor& tokens, int64_t count) override;
  void gather(const Tensor& chosen, const Tensor& out) override;

 private:
  struct Steps;
  /// Operators of a branch.
  struct Products {
    AgGemm in;
    GemmRs out;
  };

  DecoderContext context_;
  int64_t rows_;
  Shard local_;
  StepMemory& memory_;
  StepExperts* experts_;
  std::array<std::unique_ptr<Products>, kBranchKinds> products_;  ///< by kind
};

}  // namespace tandem
