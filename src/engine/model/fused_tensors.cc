#include "engine/model/fused_tensors.h"

#include <deque>
#include <unordered_map>
#include <utility>

#include "engine/model/fused_experts.h"

namespace tandem {
namespace {

constexpr std::string_view kQkv = "self_attn.qkv_proj.weight", kGateUp = "mlp.gate_up_proj.weight";

/// Fused tensor whose first slice is the parameter, or empty.
std::string fused_name(std::string_view parameter) {
  for (const auto& [slice, fused] :
       {std::pair<std::string_view, std::string_view>("self_attn.q_proj.weight", kQkv),
        {"mlp.gate_proj.weight", kGateUp}}) {
    if (!parameter.ends_with(slice)) continue;
    parameter.remove_suffix(slice.size());
    return std::string(parameter) + std::string(fused);
  }
  return "";
}

/// Tensors of experts by the names of their parameters.
class StridedExperts {
 public:
  StridedExperts(const ModelConfig& config, const std::vector<Parameter>& parameters) {
    if (!config.fused_experts) return;
    for (int64_t layer = 0; layer < config.layers; ++layer) {
      if (!config.is_moe(layer)) continue;
      for (ExpertTensor& tensor : expert_tensors(config, layer))
        tensors_.push_back(std::move(tensor));
    }
    for (const ExpertTensor& tensor : tensors_) {
      for (const ExpertSlice& slice : tensor.slices) by_parameter_[slice.name] = &tensor;
    }
    for (size_t i = 0; i < parameters.size(); ++i) numbers_[parameters[i].name] = i;
  }
  /// nullptr if the parameter is in none.
  const ExpertTensor* find(const std::string& parameter) const {
    const auto found = by_parameter_.find(parameter);
    return found == by_parameter_.end() ? nullptr : found->second;
  }
  StoredParameters stored(const ExpertTensor& tensor) const {
    StoredParameters stored{tensor.name, tensor.shape, {}, true};
    for (const ExpertSlice& slice : tensor.slices) {
      stored.slices.push_back(
          {numbers_.at(slice.name), slice.first, slice.row_stride, slice.column_stride});
    }
    return stored;
  }

 private:
  std::deque<ExpertTensor> tensors_;
  std::unordered_map<std::string, const ExpertTensor*> by_parameter_;
  std::unordered_map<std::string, size_t> numbers_;
};

}  // namespace

std::vector<FusedSlice> fused_slices(const ModelConfig& c, std::string_view tensor) {
  if (!c.fused_projections) return {};
  const bool is_qkv = tensor.ends_with(kQkv);
  if (!is_qkv && !tensor.ends_with(kGateUp)) return {};
  const std::string before(tensor.substr(0, tensor.size() - (is_qkv ? kQkv : kGateUp).size()));
  if (!is_qkv) {
    return {{before + "mlp.gate_proj.weight", c.ffn}, {before + "mlp.up_proj.weight", c.ffn}};
  }
  return {{before + "self_attn.q_proj.weight", c.heads * c.head_dim},
          {before + "self_attn.k_proj.weight", c.kv_heads * c.head_dim},
          {before + "self_attn.v_proj.weight", c.kv_heads * c.head_dim}};
}

std::vector<StoredParameters> stored_parameters(const ModelConfig& config,
                                                const std::vector<Parameter>& parameters) {
  std::vector<StoredParameters> all;
  const StridedExperts experts(config, parameters);
  for (size_t i = 0; i < parameters.size();) {
    const Parameter& p = parameters[i];
    if (const ExpertTensor* const tensor = experts.find(p.name)) {
      if (tensor->slices.front().name == p.name) all.push_back(experts.stored(*tensor));
      ++i;
      continue;
    }
    std::string fused = fused_name(p.name);
    const std::vector<FusedSlice> slices = fused_slices(config, fused);
    const int64_t columns = p.shape.size() > 1 ? p.shape[1] : 1;
    StoredParameters stored{
        slices.empty() ? p.name : std::move(fused), p.shape, {{i++, 0, columns}}};
    for (size_t s = 1; s < slices.size(); ++s) {
      stored.slices.push_back({i++, stored.shape[0] * columns, columns});
      stored.shape[0] += slices[s].rows;
    }
    all.push_back(std::move(stored));
  }
  return all;
}

}  // namespace tandem
