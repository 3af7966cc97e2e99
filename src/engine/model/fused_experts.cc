#include "engine/model/fused_experts.h"

#include <fmt/format.h>

#include "engine/model/program/program.h"

namespace tandem {
namespace {

/// Position of a matrix [rows, columns] among the elements of one expert, of which it has every
/// `step`-th row from `row` on.
ExpertSlice make_slice(std::string name, int64_t rows, int64_t columns, int64_t row, int64_t step,
                       ExpertOrder order) {
  const bool by_rows = order == ExpertOrder::by_rows;
  return {std::move(name),
          {rows, columns},
          by_rows ? row * columns : row,
          by_rows ? step * columns : step,
          by_rows ? 1 : step * rows};
}

void add_expert(ExpertTensor& tensor, int64_t expert, std::vector<ExpertSlice> slices) {
  int64_t elements = 1;
  for (size_t i = 1; i < tensor.shape.size(); ++i) elements *= tensor.shape[i];
  for (ExpertSlice& slice : slices) {
    slice.first += expert * elements;
    tensor.slices.push_back(std::move(slice));
  }
}

}  // namespace

std::vector<ExpertTensor> expert_tensors(const ModelConfig& c, int64_t layer, ExpertOrder order) {
  const program::BranchProgram moe = program::make_layer(c, layer).branches.back();
  const std::string before = fmt::format("model.layers.{}.", layer);
  const std::vector<size_t>& weights = moe.find(program::kExperts)->weights;
  const std::string& pattern = moe.weights[weights[0]].name;
  const std::string experts = before + pattern.substr(0, pattern.find('*'));
  const int64_t hidden = c.hidden, ffn = c.ffn_per_expert();
  const bool by_rows = order == ExpertOrder::by_rows;
  using Shape = std::vector<int64_t>;
  std::vector<ExpertTensor> all{
      {experts + "gate_up_proj",
       by_rows ? Shape{c.experts, 2 * ffn, hidden} : Shape{c.experts, hidden, 2 * ffn},
       {},
       true},
      {experts + "down_proj",
       by_rows ? Shape{c.experts, hidden, ffn} : Shape{c.experts, ffn, hidden},
       {},
       true}};
  if (c.expert_bias)
    all.push_back({experts + "gate_up_proj_bias", {c.experts, 2 * ffn}, {}, false});
  for (int64_t e = 0; e < c.experts; ++e) {
    const auto name = [&](size_t i) { return before + moe.weights[weights[i]].name_of(e); };
    add_expert(all[0], e,
               {make_slice(name(0), ffn, hidden, 0, 2, order),
                make_slice(name(2), ffn, hidden, 1, 2, order)});
    add_expert(all[1], e, {make_slice(name(1), hidden, ffn, 0, 1, order)});
    if (c.expert_bias)
      add_expert(all[2], e, {{name(3), {ffn}, 0, 0, 2}, {name(4), {ffn}, 1, 0, 2}});
  }
  if (const program::Op* const bias = moe.find(program::kExpertBias)) {
    const std::string name = before + moe.weights[bias->weights[0]].name;
    all.push_back({name, {c.experts, hidden}, {{name, {c.experts * hidden}, 0, 0, 1}}, false});
  }
  return all;
}

}  // namespace tandem
