// Choice of MoeLayerOnRanks' plans by measurement: each half of a pass, then the backward pass as a
// whole, whose halves may overlap, too.
#include <fmt/format.h>

#include <optional>
#include <utility>

#include "core/random_buffer.h"
#include "overlap/moe/cpu/layer.h"
#include "overlap/moe/load.h"
#include "tune/candidate.h"
#include "tune/measure.h"
#include "tune/tuner.h"

namespace tandem {

using namespace schedule;

namespace {

constexpr std::array<const char*, MoeLayerOnRanks::kStages> kStageNames = {
    "moe_dispatch_gemm", "moe_gemm_combine", "moe_dispatch_gemm backward",
    "moe_gemm_combine backward"};

/// Random operands of a layer's passes on one rank.
struct TuningOperands {
  explicit TuningOperands(const MoeRankCoords& coords_)
      : coords(coords_),
        memory{random_buffer(coords.shape.dtype, coords.shape.tokens * coords.shape.hidden, 1),
               random_buffer(coords.shape.dtype, coords.shape.tokens * coords.shape.hidden, 2),
               random_buffer(coords.shape.dtype, in_rows() * coords.shape.hidden, 3),
               random_buffer(coords.shape.dtype, out_rows() * coords.ffn, 4),
               random_buffer(coords.shape.dtype, in_rows() * coords.shape.hidden, 5),
               random_buffer(coords.shape.dtype, out_rows() * coords.ffn, 6)},
        weights(size_t(coords.shape.tokens * coords.shape.top_k), 1.0f / float(coords.shape.top_k)),
        dweights(weights.size()) {}
  int64_t in_rows() const { return coords.experts.count * 2 * coords.ffn; }
  int64_t out_rows() const { return coords.experts.count * coords.shape.hidden; }
  Tensor rows_at(size_t i) const { return at(i, coords.shape.tokens, coords.shape.hidden); }
  Tensor w_in(size_t i = 2) const { return at(i, in_rows(), coords.shape.hidden); }
  Tensor w_out(size_t i = 3) const { return at(i, out_rows(), coords.ffn); }
  MoeRouting routing() { return {by_choice(std::span(experts)), by_choice(std::span(weights))}; }
  MoeLayerOnRanks::Gradients gradients() {
    return {rows_at(1), by_choice(std::span(dweights)), w_in(4), w_out(5), WeightGradients::store};
  }

  const MoeRankCoords& coords;
  std::array<Memory, 6> memory;  ///< x, out, weights and their gradients
  std::vector<int32_t> experts;
  std::vector<float> weights, dweights;
  MoeRows rows;

 private:
  Tensor at(size_t i, int64_t rows_, int64_t columns) const {
    return memory[i].view(coords.shape.dtype, {rows_, columns});
  }
  template <typename T>
  Tensor by_choice(std::span<T> values) const {
    return Tensor::of(values, {coords.shape.tokens, coords.shape.top_k});
  }
};

/// Plan of a whole pass.
struct PassPlan {
  OverlapOptions rows, sums;
  bool local_dx_first = false;  ///< of a backward pass
  std::string name() const {
    return fmt::format("rows {}, sums {}{}", moe_candidate_name(rows), moe_candidate_name(sums),
                       local_dx_first ? ", local rows first" : "");
  }
  /// Overlapped if a half is.
  NamedForm form() const {
    const bool overlaps =
        rows.strategy == Strategy::overlapped || sums.strategy == Strategy::overlapped;
    return {name(), overlaps ? Strategy::overlapped : Strategy::serial};
  }
};

std::vector<PassPlan> backward_plans(const OverlapOptions& rows, const OverlapOptions& sums) {
  const auto overlapped = [](const OverlapOptions& plan) {
    return plan.strategy == Strategy::overlapped ? plan : OverlapOptions{Strategy::overlapped, 1};
  };
  std::vector<PassPlan> plans{{{Strategy::serial, 1}, {Strategy::serial, 1}}};
  if (rows.strategy != Strategy::serial || sums.strategy != Strategy::serial) {
    plans.push_back({rows, sums});
  }
  plans.push_back({overlapped(rows), overlapped(sums), true});
  return plans;
}

std::vector<NamedForm> list_forms(std::span<const PassPlan> plans) {
  std::vector<NamedForm> forms;
  for (const PassPlan& plan : plans) forms.push_back(plan.form());
  return forms;
}

}  // namespace

/// Measures on rows with each level's imbalance: the routing of a real call is not known yet.
MoeLayerOnRanks::Tuned MoeLayerOnRanks::tune_stages(Communicator& comm, const MoeOptions& options) {
  const MoeShape& s = coords_.shape;
  TuningOperands o(coords_);
  const MoeQuantization* const quantization = quantization_;
  std::optional<FixedQuantization> of_operands;
  if (quantization) {
    of_operands.emplace(o.w_in(), o.w_out(), coords_.experts.count, quantization->has_scales);
    quantization_ = &of_operands->quantization();
  }
  const auto backward_half = [&](BackwardHalf half) {
    return [this, &o, half] {
      run_backward(o.rows_at(0), o.w_in(), o.w_out(), o.rows, o.gradients(), half);
    };
  };
  const std::array<std::function<void()>, kStages> run = {
      [&] { run_forward(o.rows_at(0), o.routing(), o.w_in(), o.w_out(), {}, o.rows); },
      [&] { run_combine(o.w_out(), o.rows, o.rows_at(1)); }, backward_half(BackwardHalf::dispatch),
      backward_half(BackwardHalf::combine)};
  std::array<std::vector<OverlapOptions>, kStages> chosen;
  std::vector<bool> local_dx_first;
  Tuned tuned;
  const auto tune_stage = [&](Stage stage, const std::string& shape) {
    std::vector<OverlapOptions> plans = moe_plans(options, stage, coords_);
    if (!chosen[stage].empty()) {  // bits must not depend on the level
      std::erase_if(plans,
                    [&](const OverlapOptions& p) { return p.wire != chosen[stage][0].wire; });
    }
    std::vector<std::string> names;
    for (const OverlapOptions& plan : plans) names.push_back(moe_candidate_name(plan));
    const auto seconds = [&](size_t candidate) {
      set_plan(stage, plans[candidate]);
      return timed(comm, run[stage])();
    };
    const Choice best = tune(comm, kStageNames[stage], shape, names, seconds,
                             options.allow_uncompressed ? Bits::by_candidate : Bits::same);
    if (chosen[stage].empty()) tuned.stages[stage] = best;
    set_plan(stage, plans[best]);
    chosen[stage].push_back(plans[best]);
  };
  const auto tune_backward = [&](const std::string& shape) {
    const std::vector<PassPlan> plans =
        backward_plans(chosen[dispatch_backward].back(), chosen[combine_backward].back());
    std::vector<std::string> names;
    for (const PassPlan& plan : plans) names.push_back(plan.name());
    const auto set = [&](const PassPlan& plan) {
      set_plan(dispatch_backward, plan.rows);
      set_plan(combine_backward, plan.sums);
      set_local_dx_first(plan.local_dx_first);
    };
    const auto seconds = [&](size_t candidate) {
      set(plans[candidate]);
      return timed(comm, backward_half(BackwardHalf::both))();
    };
    const Choice choice = tune(comm, "moe backward", shape, names, seconds);
    if (local_dx_first.empty()) tuned.backward = {choice, list_forms(plans)};
    const PassPlan& best = plans[choice];
    chosen[dispatch_backward].back() = best.rows;
    chosen[combine_backward].back() = best.sums;
    local_dx_first.push_back(best.local_dx_first);
    set_local_dx_first(false);
  };
  progress_.during([&] {
    for (int level = 0; level < levels(); ++level) {
      const double imbalance = moe_level_imbalance(coords_.grid, s.top_k, level);
      o.experts =
          chosen_experts(coords_.grid, s.top_k, {imbalance, 1}, s.tokens * coords_.rank, s.tokens);
      run[dispatch]();
      run[dispatch_backward]();
      std::string shape =
          coords_.describe() + saves(options.save) + quantizes(options) + activates(options);
      if (level > 0) shape += fmt::format(" imbalance {}", imbalance);
      for (int i = 0; i < kStages; ++i) tune_stage(Stage(i), shape);
      tune_backward(shape);
    }
    plans_ = std::move(chosen);
    local_dx_first_ = std::move(local_dx_first);
  });
  quantization_ = quantization;
  return tuned;
}

void MoeLayerOnRanks::list_choices(const MoeOptions& options, const Tuned& tuned) {
  const std::vector<OverlapOptions> rows = moe_plans(options, dispatch, coords_),
                                    sums = moe_plans(options, combine, coords_);
  const Choice &row_choice = tuned.stages[dispatch], &sum_choice = tuned.stages[combine];
  // The halves follow each other.
  std::vector<PassPlan> plans;
  std::vector<double> us;
  for (size_t i = 0; i < rows.size(); ++i) {
    for (size_t j = 0; j < sums.size(); ++j) {
      plans.push_back({rows[i], sums[j]});
      if (row_choice.us.empty() || sum_choice.us.empty()) continue;
      us.push_back(row_choice.us[i] + sum_choice.us[j]);
    }
  }
  Receipt forward = make_moe_receipt("moe", coords_, options),
          backward = make_moe_receipt("moe backward", coords_, options);
  record_choice(forward, list_forms(plans), us, row_choice * sums.size() + sum_choice, {});
  auto [choice, forms] = tuned.backward;
  if (forms.empty()) {
    const PassPlan only{plan(dispatch_backward, 0), plan(combine_backward, 0), local_dx_first_[0]};
    forms = {only.form()};
  }
  record_choice(backward, forms, choice.us, choice, {});
  list(forward, backward, options);
}

}  // namespace tandem
