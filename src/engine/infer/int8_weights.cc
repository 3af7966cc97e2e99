#include "engine/infer/int8_weights.h"

#include <fmt/format.h>

#include "tandem/error.h"

namespace tandem {
namespace {

template <typename Visit>
void for_each_int8(const ModelLayout& layout, const Visit& visit) {
  for (const BranchLayout& branch : layout.branches) {
    for (const WeightMatrix& m : {branch.in, branch.out, branch.experts_in, branch.experts_out}) {
      if (m.rows > 0) visit(m);
    }
  }
  visit(layout.head);
}

Tensor matrix_in(const Tensor& values, const WeightMatrix& m) {
  const Tensor flat = values.narrow(0, m.offset, m.rows * m.columns);
  return Tensor(flat.data(), DType::f32, {m.rows, m.columns});
}

}  // namespace

void check_int8_weights(const ModelConfig& config, int tp) {
  const auto check = [&](const char* key, int64_t inputs) {
    if (tp == 1 || inputs % (kInt8Group * tp) == 0) return;
    throw Unsupported(fmt::format(
        "weights in int8: {} = {} over {} ranks: expected a multiple of {} a rank, as many weights "
        "share a scale",
        key, inputs, tp, kInt8Group));
  };
  check("heads x head_dim", config.heads * config.head_dim);
  if (config.moe_layers() < config.layers) check("intermediate_size", config.ffn);
  if (config.moe_layers() == 0) return;
  check("moe_intermediate_size", config.ffn_per_expert());
  check("shared_expert_intermediate_size", config.shared_ffn);
}

void round_to_int8(const ModelLayout& layout, const Tensor& values) {
  for_each_int8(layout, [&](const WeightMatrix& m) {
    const Tensor matrix = matrix_in(values, m);
    Int8Weight(matrix).read(matrix);
  });
}

void Int8Weights::set(const ModelLayout& layout, const SetParameter& set) {
  matrices_.clear();
  for_each_int8(layout, [&](const WeightMatrix& m) {
    const FlatRange range{m.offset, m.rows * m.columns};
    const Memory memory(size_t(range.count) * sizeof(float));
    const WeightViews values(memory.view(DType::f32, {range.count}));
    for (const Parameter& p : layout.parameters) {
      const FlatRange local = local_range(p);
      if (local.count == 0 || local.begin < range.begin || local.end() > range.end()) continue;
      set(p, values.narrow({local.begin - range.begin, local.count}));
    }
    matrices_.try_emplace(m.offset, memory.view(DType::f32, {m.rows, m.columns}));
  });
}

size_t Int8Weights::bytes() const {
  size_t bytes = 0;
  for (const auto& [offset, matrix] : matrices_) bytes += matrix.bytes();
  return bytes;
}

}  // namespace tandem
