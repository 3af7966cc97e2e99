// The two Mixture-of-Experts operators as one layer on CPU ranks, forward and backward. The
// backward pass swaps dispatch and combine: rows' gradients are sent to the experts as rows were,
// and their sums return as the results did.
#pragma once

#include <array>
#include <functional>
#include <vector>

#include "comm/call_card.h"
#include "comm/progress.h"
#include "overlap/moe/cpu/dispatch_gemm.h"
#include "overlap/moe/cpu/gemm_combine.h"
#include "overlap/moe/on_ranks.h"
#include "overlap/moe/rows.h"

namespace tandem {

class MoeLayerOnRanks final : public MoeOnRanks {
 public:
  enum Stage : uint8_t { dispatch, combine, dispatch_backward, combine_backward };
  static constexpr int kStages = 4;

  MoeLayerOnRanks(Communicator& comm, const MoeShape& shape, const MoeOptions& options);
  void prepare(MoeRows& rows) override;
  void forward(const Tensor& x, const MoeRouting& routing, const Tensor& w_in, const Tensor& w_out,
               const Tensor& out, MoeRows& rows) override;
  void backward(const Tensor& dout, const Tensor& w_in, const Tensor& w_out, const MoeRows& rows,
                const Tensor& dx, const Tensor& dweights, const Tensor& dw_in,
                const Tensor& dw_out) override;
  Strategy dispatch_strategy() const override { return plan(dispatch, 0).strategy; }
  Strategy combine_strategy() const override { return plan(combine, 0).strategy; }
  int64_t dropped_routings() const override { return 0; }
  /// Strategy, chunks (waves of remote rows in a dispatch, groups of columns in a combine) and wire
  /// format, none or the layer's, of calls whose rows have imbalance `level` (schedule/moe.h). All
  /// of one wire format give the same bits.
  const OverlapOptions& plan(Stage stage, int level) const { return plans_[stage][size_t(level)]; }
  int levels() const { return int(plans_[0].size()); }
  /// Must be the same on all ranks, one of moe_plans, and of one wire format at all levels.
  void set_plan(Stage stage, int level, const OverlapOptions& plan) {
    plans_[stage][size_t(level)] = plan;
  }
  void set_plan(Stage stage, const OverlapOptions& plan) {
    plans_[stage].assign(plans_[stage].size(), plan);
  }
  const MoeRankCoords& coords() const { return coords_; }

  // Single stages, for measurements; operands as for `forward` and `backward`.
  void run_dispatch(const Tensor& x, const MoeRouting& routing, const Tensor& w_in, MoeRows& rows);
  void run_combine(const Tensor& w_out, const MoeRows& rows, const Tensor& out);
  void run_dispatch_backward(const Tensor& dout, const Tensor& w_out, const MoeRows& rows);
  void run_combine_backward(const Tensor& w_in, const MoeRows& rows, const Tensor& dx,
                            const Tensor& dweights, const std::function<void()>& meanwhile);

 private:
  void check(const char* name, const Tensor& tensor, int64_t rows, int64_t columns, DType dtype,
             DType other) const;
  /// Runs `call`, or throws the InvalidArgument of `check`: the other ranks' calls then throw
  /// Mismatch.
  void together(CallOnCard& card, const std::function<void()>& check,
                const std::function<void()>& call);
  void check_weights(const Tensor& w_in, const Tensor& w_out) const;
  void weight_gradients(const MoeRows& rows, const Tensor& dw_in, const Tensor& dw_out);
  void tune_stages(Communicator& comm, const MoeOptions& options);

  Communicator& comm_;
  MoeRankCoords coords_;
  std::array<std::vector<OverlapOptions>, kStages> plans_;  ///< by level
  Progress progress_;
  MoeDispatchGemmCpu dispatch_;
  MoeGemmCombineCpu combine_;
  GrowingTensor dout_, d_act_, weighted_inner_, dgate_up_;  ///< by slot, of a backward pass
  std::vector<float> d_gate_weight_;
};

/// Plans that a stage's tuner tries, uncompressed ones first and serial before overlapped; a single
/// one for a fixed strategy. Backward stages are uncompressed.
std::vector<OverlapOptions> moe_plans(const MoeOptions& options, MoeLayerOnRanks::Stage stage,
                                      const MoeRankCoords& coords);
/// Name as a candidate: "overlapped, 3 chunks", "serial, 1 chunk as int8".
std::string moe_candidate_name(const OverlapOptions& plan);

}  // namespace tandem
