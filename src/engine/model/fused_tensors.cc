#include "engine/model/fused_tensors.h"

#include <utility>

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
  for (size_t i = 0; i < parameters.size(); i += all.back().count) {
    const Parameter& p = parameters[i];
    std::string fused = fused_name(p.name);
    const std::vector<FusedSlice> slices = fused_slices(config, fused);
    StoredParameters stored{slices.empty() ? p.name : std::move(fused), p.shape, i, 1};
    if (!slices.empty()) {
      stored.count = slices.size();
      stored.shape[0] = 0;
      for (const FusedSlice& slice : slices) stored.shape[0] += slice.rows;
    }
    all.push_back(std::move(stored));
  }
  return all;
}

}  // namespace tandem
