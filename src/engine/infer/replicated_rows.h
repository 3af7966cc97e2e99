// Rows that every rank has, all of them; partial products of a branch are summed over the ranks.
// With two chunks on CPU ranks (ISO, arXiv 2409.11155), one is computed while the other's sums are
// in flight; the second chunk's attention reads the first one's cached keys and values.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "collectives/split_all_reduce.h"
#include "engine/infer/decoder_context.h"
#include "engine/infer/row_runner.h"
#include "engine/infer/step_experts.h"

namespace tandem {

class ReplicatedRows final : public RowRunner {
 public:
  /// At most `rows` rows, in `chunks` chunks; more than one only on CPU ranks, for a model without
  /// experts, or with coded weights. Results are bitwise equal for any number of chunks (see
  /// rows_keep_bits in gemm/gemm.h). `experts`: nullptr for a model without. Collective.
  ReplicatedRows(const DecoderContext& context, int64_t rows, int chunks, StepMemory& memory,
                 StepExperts* experts);
  /// A chunk has at least two rows.
  bool takes(int64_t count) const override {
    return chunks_.size() == 1 || count >= 2 * int64_t(chunks_.size());
  }
  void run(const Tensor& tokens, int64_t count) override;
  void gather(const Tensor& chosen, const Tensor& out) override;

 private:
  struct Steps;
  /// Rows that are computed one after the other's.
  struct Chunk {
    std::unique_ptr<RowSums> sums;  ///< of CPU ranks
    Shard rows;
    Residuals residuals;
    bool is_sent = false;                  ///< the last sum, which has not been taken
    const BranchLayout* sum_of = nullptr;  ///< branch whose operations finish it
  };

  /// Sums of `partial` products over the ranks, which `compute` writes, in the chunk's residuals.
  /// CPU ranks take them later.
  template <typename Compute>
  void sum(Chunk& chunk, const Wire& wire, const Compute& compute);
  /// The chunk's sum in its residuals, if it was sent.
  void take_sum(Chunk& chunk);
  /// Runs the operations of chunk.sum_of on the complete sum.
  void finish_sum(Chunk& chunk);
  void look_up(Chunk& chunk, const Tensor& tokens);
  void run_branch(size_t branch, Chunk& chunk);
  void advance_other_chunks(const Chunk& chunk);
  /// Whether GEMMs add to the residual stream.
  bool adds_in_gemm() const;

  DecoderContext context_;
  StepMemory& memory_;
  StepExperts* experts_;
  std::vector<Chunk> chunks_;
};

}  // namespace tandem
