#include "engine/infer/int8_weights.h"

#include <fmt/format.h>

#include "tandem/error.h"

namespace tandem {

void check_int8_weights(const ModelConfig& config, int tp) {
  if (config.experts > 0) {
    throw Unsupported(
        fmt::format("weights in int8: {} experts: expected a dense model", config.experts));
  }
  const auto check = [&](const char* key, int64_t inputs) {
    if (tp == 1 || inputs % (kInt8Group * tp) == 0) return;
    throw Unsupported(fmt::format(
        "weights in int8: {} = {} over {} ranks: expected a multiple of {} a rank, as many weights "
        "share a scale",
        key, inputs, tp, kInt8Group));
  };
  check("heads x head_dim", config.heads * config.head_dim);
  check("intermediate_size", config.ffn);
}

void Int8Weights::quantize(const ModelLayout& layout, const Weights& weights) {
  const auto add = [&](const WeightMatrix& m) {
    const Tensor values = weights.vector(m.offset, m.rows * m.columns);
    matrices_.try_emplace(m.offset, Tensor(values.data(), DType::f32, {m.rows, m.columns}));
  };
  for (const BranchLayout& branch : layout.branches) {
    add(branch.in);
    add(branch.out);
  }
  add(layout.head);
}

}  // namespace tandem
