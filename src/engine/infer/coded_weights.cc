#include "engine/infer/coded_weights.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/config/device_traits.h"
#include "gemm/gemm.h"
#include "tandem/error.h"

namespace tandem {
namespace {

template <typename Visit>
void for_each_of_branches(const ModelLayout& layout, const Visit& visit) {
  for (const BranchLayout& branch : layout.branches) {
    for (const WeightMatrix& m : {branch.in, branch.out, branch.experts_in, branch.experts_out}) {
      if (m.rows > 0) visit(m);
    }
  }
}

template <typename Visit>
void for_each_coded(const ModelLayout& layout, const Visit& visit) {
  for_each_of_branches(layout, visit);
  visit(layout.head);
}

Tensor matrix_in(const Tensor& values, const WeightMatrix& m) {
  const Tensor flat = values.narrow(0, m.offset, m.rows * m.columns);
  return Tensor(flat.data(), DType::f32, {m.rows, m.columns}, flat.device());
}

bool is_many(const Tensor& x, SameBits same_bits) {
  return x.dim(0) > kMaxFewRows || same_bits == SameBits::many_rows;
}

}  // namespace

void check_coded_weights(const ModelConfig& config, int tp, WeightFormat format) {
  const int64_t group = group_of(format);
  const auto check = [&](const char* key, int64_t inputs) {
    if (tp == 1 || inputs % (group * tp) == 0) return;
    throw Unsupported(fmt::format(
        "weights in {}: {} = {} over {} ranks: expected a multiple of {} a rank, as many weights "
        "share a scale",
        name_of(format), key, inputs, tp, group));
  };
  check("heads x head_dim", config.heads * config.head_dim);
  if (config.moe_layers() < config.layers) check("intermediate_size", config.ffn);
  if (config.moe_layers() == 0) return;
  check("moe_intermediate_size", config.ffn_per_expert());
  check("shared_expert_intermediate_size", config.shared_ffn);
}

void round_to_format(const Exec& exec, const ModelLayout& layout, WeightFormat format,
                     const Tensor& values) {
  for_each_coded(layout, [&](const WeightMatrix& m) {
    const Tensor matrix = matrix_in(values, m);
    CodedWeight coded(exec, format, m.rows, m.columns);
    coded.quantize(exec, matrix);
    coded.read(exec, matrix);
    wait(exec);  // before the memory is freed
  });
}

CodedWeights::CodedWeights(const Exec& exec, const ModelLayout& layout, WeightFormat format,
                           int64_t max_head_rows)
    : exec_(exec), format_(format) {
  int64_t largest = 0;
  const auto add_rounded = [&](const WeightMatrix& m) {
    largest = std::max(largest, m.rows * m.columns);
  };
  for_each_coded(layout, [&](const WeightMatrix& m) {
    matrices_.try_emplace(m.offset, exec, format, m.rows, m.columns);
  });
  if (device_traits(exec).is_host) return;
  // Steps with prompts may have few rows, too (SameBits::many_rows); the head has none of these.
  for_each_of_branches(layout, add_rounded);
  if (max_head_rows > kMaxFewRows) add_rounded(layout.head);
  rounded_ = Memory(size_t(largest) * sizeof(BFloat16), exec.device);
}

void CodedWeights::set(const ModelLayout& layout, const SetParameter& set) {
  for_each_coded(layout, [&](const WeightMatrix& m) {
    const FlatRange range{m.offset, m.rows * m.columns};
    const Memory memory(size_t(range.count) * sizeof(float), exec_.device);
    const WeightViews values(memory.view(DType::f32, {range.count}));
    for (const Parameter& p : layout.parameters) {
      const FlatRange local = local_range(p);
      if (local.count == 0 || local.begin < range.begin || local.end() > range.end()) continue;
      set(p, values.narrow({local.begin - range.begin, local.count}));
    }
    matrices_.at(m.offset).quantize(exec_, memory.view(DType::f32, {m.rows, m.columns}));
    wait(exec_);  // before the memory is freed
  });
}

size_t CodedWeights::bytes() const {
  size_t bytes = 0;
  for (const auto& [offset, matrix] : matrices_) bytes += matrix.bytes();
  return bytes;
}

void CodedWeights::multiply(const WeightMatrix& matrix, const Tensor& x, const Tensor& out,
                            SameBits same_bits, bool accumulate) const {
  if (rounded_.data() && is_many(x, same_bits)) {
    return gemm(exec_, x, rounded(matrix).transposed(), out,
                {.accumulate = accumulate, .same_bits = same_bits});
  }
  at(matrix).multiply(exec_, x, out, {.accumulate = accumulate});
}

bool CodedWeights::multiply_swiglu(const WeightMatrix& matrix, const Tensor& x, const Tensor& out,
                                   SameBits same_bits) const {
  return !is_many(x, same_bits) && at(matrix).multiply_swiglu(exec_, x, out);
}

Tensor CodedWeights::rounded(const WeightMatrix& matrix) const {
  const Tensor to = rounded_.view(DType::bf16, {matrix.rows, matrix.columns});
  at(matrix).read(exec_, to);
  return to;
}

}  // namespace tandem
