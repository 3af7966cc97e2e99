// The two Mixture-of-Experts operators as one layer on CPU ranks, forward and backward. The
// backward pass swaps dispatch and combine: rows' gradients are sent to the experts as rows were,
// and their sums return as the results did.
#pragma once

#include <array>
#include <functional>
#include <vector>

#include "comm/call_card.h"
#include "comm/progress.h"
#include "overlap/moe/activation.h"
#include "overlap/moe/cpu/dispatch_gemm.h"
#include "overlap/moe/cpu/gemm_combine.h"
#include "overlap/moe/on_ranks.h"
#include "overlap/moe/quantization.h"
#include "overlap/moe/rows.h"
#include "schedule/moe_pass.h"
#include "tune/tuner.h"

namespace tandem {

class MoeLayerOnRanks final : public MoeOnRanks {
 public:
  enum Stage : uint8_t { dispatch, combine, dispatch_backward, combine_backward };
  static constexpr int kStages = 4;

  MoeLayerOnRanks(Communicator& comm, const MoeShape& shape, const MoeOptions& options);
  void prepare(MoeRows& rows) override;
  void forward(const Tensor& x, const MoeRouting& routing, const Tensor& w_in, const Tensor& w_out,
               const Tensor& out, MoeRows& rows,
               const std::function<void()>& meanwhile = {}) override;
  void backward(const Tensor& dout, const Tensor& w_in, const Tensor& w_out, const MoeRows& rows,
                const Tensor& dx, const Tensor& dweights, const Tensor& dw_in, const Tensor& dw_out,
                WeightGradients gradients = WeightGradients::add,
                const std::function<void()>& meanwhile = {}) override;
  Strategy dispatch_strategy() const override { return plan(dispatch, 0).strategy; }
  Strategy combine_strategy() const override { return plan(combine, 0).strategy; }
  int64_t dropped_routings() const override { return 0; }
  /// Strategy, chunks (of remote rows in a dispatch, of columns in a combine) and wire
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
  /// Whether backward passes whose stages overlap compute the gradients of local rows while others'
  /// arrive, at all levels. The bits are the same.
  void set_local_dx_first(bool first) { local_dx_first_.assign(local_dx_first_.size(), first); }
  const MoeRankCoords& coords() const { return coords_; }

  // Passes and their halves, for measurements; operands as for `forward` and `backward`.
  /// Without `out` only the first half.
  void run_forward(const Tensor& x, const MoeRouting& routing, const Tensor& w_in,
                   const Tensor& w_out, const Tensor& out, MoeRows& rows,
                   const std::function<void()>& meanwhile = {});
  void run_combine(const Tensor& w_out, const MoeRows& rows, const Tensor& out);
  struct Gradients {
    Tensor dx, dweights, dw_in, dw_out;
    WeightGradients mode = WeightGradients::add;
    const std::function<void()>* meanwhile = nullptr;  ///< null: none
  };
  enum class BackwardHalf : uint8_t { dispatch, combine, both };
  void run_backward(const Tensor& dout, const Tensor& w_in, const Tensor& w_out,
                    const MoeRows& rows, const Gradients& gradients,
                    BackwardHalf half = BackwardHalf::both);

 private:
  struct PassArgs;  ///< operands and progress of one pass

  void check(const char* name, const Tensor& tensor, int64_t rows, int64_t columns, DType dtype,
             DType other) const;
  /// Runs `call`, or throws the InvalidArgument of `check`: the other ranks' calls then throw
  /// Mismatch.
  void together(CallOnCard& card, const std::function<void()>& check,
                const std::function<void()>& call);
  void check_weights(const Tensor& w_in, const Tensor& w_out) const;
  /// Choices at level 0, for the receipts.
  struct Tuned {
    std::array<Choice, kStages> stages;
    struct {
      Choice choice;
      std::vector<NamedForm> forms;
    } backward;  ///< of the pass as a whole
  };
  Tuned tune_stages(Communicator& comm, const MoeOptions& options);
  void list_choices(const MoeOptions& options, const Tuned& tuned);

  // layer_pass.cc
  schedule::MoePassForm form(Stage rows, Stage sums, int level) const;
  /// Runs the pass that `make` makes of the plans of the rows' level.
  void run_pass(schedule::MoePass (*make)(const schedule::MoePassForm&), PassArgs& args);
  void launch(const schedule::PassStep& step, PassArgs& args);
  void gather(const schedule::PassStep& step, const PassArgs& args);
  void multiply_rows(const schedule::PassStep& step, const PassArgs& args);
  void multiply_first(int expert, schedule::Range slots, const PassArgs& args);
  void multiply_d_act(int expert, schedule::Range range, const PassArgs& args);
  MoeGemmCombineCpu::Call combine_call(const PassArgs& args) const;
  void weight_gradient(const schedule::PassStep& step, const PassArgs& args);
  /// out = rows as they were sent x a quantized weight^T.
  void multiply_sent(const Tensor& sent, const QuantizedRows& weight, const Tensor& out);
  MoeGemmCombineCpu::Call quantized_combine_call(const PassArgs& args) const;
  /// Values of sorted rows, for the GEMM of a weight's gradient.
  Tensor values_of(const Tensor& sorted, schedule::Range slots);
  void sort_again(const MoeRows& rows) const;
  void make_room(MoeRows& rows);
  void make_room_to_go_back(const MoeRows& rows);
  /// Rows as they are sent and sorted: x, or quantized.
  Tensor make_sent(const Tensor& x);
  DType sent_dtype() const { return quantization_ ? DType::e4m3 : coords_.shape.dtype; }
  int64_t sent_columns() const {
    return quantization_ ? packed_row_bytes(coords_.shape.hidden) : coords_.shape.hidden;
  }
  size_t sent_row_bytes() const { return size_t(sent_columns()) * size_of(sent_dtype()); }
  // By slot: saved activations, or this layer's memory for those that are not.
  Tensor sorted_x(const MoeRows& rows) const;
  Tensor sorted_dout(const MoeRows& rows) const;
  Tensor gate_up(const MoeRows& rows) const;
  Tensor inner(const MoeRows& rows) const;

  Communicator& comm_;
  MoeRankCoords coords_;
  MoeSave save_;
  const MoeQuantization* quantization_;  ///< nullptr: none
  const MoeActivation& activation_;
  std::array<std::vector<OverlapOptions>, kStages> plans_;  ///< by level
  std::vector<bool> local_dx_first_;                        ///< by level
  Progress progress_;
  MoeDispatchGemmCpu dispatch_;
  MoeGemmCombineCpu combine_;
  GrowingTensor x_, gate_up_, inner_;                       ///< by slot, if not saved
  GrowingTensor dout_, d_act_, weighted_inner_, dgate_up_;  ///< by slot, of a backward pass
  std::vector<float> d_gate_weight_;
  /// Memory of quantized rows: codes and scales.
  struct QuantizedMemory {
    GrowingTensor codes, scales;
    QuantizedRows of(int64_t rows, int64_t columns);
    QuantizedRows view(int64_t rows, int64_t columns) const;
  };
  QuantizedMemory rows_, inner_codes_, dgate_up_codes_;  ///< the last two by slot
  GrowingTensor sent_, exact_values_, values_;
};

/// Plans that a stage's tuner tries, uncompressed ones first and serial before overlapped; a single
/// one for a fixed strategy. Backward stages are uncompressed.
std::vector<OverlapOptions> moe_plans(const MoeOptions& options, MoeLayerOnRanks::Stage stage,
                                      const MoeRankCoords& coords);
/// Name as a candidate: "overlapped, 3 chunks", "serial, 1 chunk as int8".
std::string moe_candidate_name(const OverlapOptions& plan);

}  // namespace tandem
