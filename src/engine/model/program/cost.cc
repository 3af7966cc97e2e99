#include "engine/model/program/cost.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "engine/model/program/op_row.h"
#include "tandem/error.h"

namespace tandem::program {
namespace {

/// Rows times columns of a value on a rank, those of its ranges included.
double elements(const BranchProgram& program, ValueId id, const Sizes& s) {
  const Value& value = program.values[size_t(id)];
  const double share = value.columns.division == Division::whole ? 1 : s.tp,
               rows = value.rows == Rows::local ? s.tokens / s.tp
                      : value.rows == Rows::all ? s.tokens
                                                : 1;
  double all = rows * double(value.columns.count()) / share;
  for (size_t i = size_t(id) + 1; i < program.values.size(); ++i) {
    if (program.values[i].range_of == id) all += elements(program, ValueId(i), s);
  }
  return all;
}

double value_bytes(const BranchProgram& program, ValueId id, const Sizes& s) {
  const std::optional<DType> dtype = program.values[size_t(id)].dtype;
  return elements(program, id, s) * (dtype ? double(size_of(*dtype)) : s.element);
}

double elements(const Weight& w) {
  return double(w.rows.count()) * (w.is_vector() ? 1 : double(w.columns.count()));
}

/// Layers of a model that have the same list.
struct EqualLayers {
  int64_t count = 0;
  LayerProgram program;
};
/// Layers with and without experts; `by_window`: also by their windows, which takes a visit of
/// each.
std::vector<EqualLayers> layer_kinds(const ModelConfig& c, bool by_window) {
  std::vector<EqualLayers> kinds;
  const auto add = [&](int64_t count, int64_t layer) {
    if (count > 0) kinds.push_back({count, make_layer(c, layer)});
  };
  if (!by_window || c.sliding_window == 0) {
    add(c.layers - c.moe_layers(), 0);
    add(c.moe_layers(), c.moe_layer_freq - 1);
    return kinds;
  }
  std::map<std::pair<bool, int64_t>, EqualLayers> by_kind;
  for (int64_t i = 0; i < c.layers; ++i) {
    const auto [found, is_new] = by_kind.try_emplace({c.is_moe(i), c.window(i)});
    if (is_new) found->second = {0, make_layer(c, i)};
    ++found->second.count;
  }
  for (auto& [kind, layers] : by_kind) kinds.push_back(std::move(layers));
  return kinds;
}

template <typename Visit>
void for_each_op(const ModelConfig& c, bool by_window, const Visit& visit) {
  for (const auto& [count, layer] : layer_kinds(c, by_window)) {
    for (const BranchProgram& branch : layer.branches) {
      for (const Op& op : branch.ops) visit(double(count), branch, op);
    }
  }
}

}  // namespace

double BranchBytes::saved_by(Recompute mode) const {
  if (mode == Recompute::none) return all();
  return mode == Recompute::selective ? saved : 0;
}

BranchBytes branch_bytes(const BranchProgram& program, const Sizes& s) {
  BranchBytes bytes;
  for (size_t i = 0; i < program.values.size(); ++i) {
    const Value& value = program.values[i];
    if (value.range_of >= 0 || value.life == Life::scratch) continue;
    (value.life == Life::saved ? bytes.saved : bytes.recomputed) +=
        value_bytes(program, ValueId(i), s);
  }
  for (const Op& op : program.ops) {
    if (op.row->bytes) bytes.recomputed += op.row->bytes(s);
    if (!op.row->is_gemm) continue;
    for (const ValueId id : op.in) bytes.operands += value_bytes(program, id, s);
    for (const ValueId id : op.out) bytes.gradients += value_bytes(program, id, s);
    if (op.out.empty()) bytes.gradients += s.tokens * double(s.model.hidden) * s.element;
  }
  return bytes;
}

double layer_bytes(const Sizes& s) {
  const double residual = s.tokens / s.tp * double(s.model.hidden) * 4;
  double sum = 0;
  for (const auto& [count, layer] : layer_kinds(s.model, false)) {
    for (const BranchProgram& branch : layer.branches) {
      sum += double(count) * (residual + branch_bytes(branch, s).all());
    }
  }
  return sum;
}

double layer_parameters(const ModelConfig& c) {
  double sum = 0;
  for_each_op(c, false, [&](double count, const BranchProgram& branch, const Op& op) {
    for (const size_t i : op.weights) {
      sum += count * double(op.copies) * elements(branch.weights[i]);
    }
  });
  return sum;
}

double layer_products(const ModelConfig& c, int64_t seq) {
  double sum = 0;
  for_each_op(c, true, [&](double count, const BranchProgram& branch, const Op& op) {
    if (op.row->keys) sum += count * op.row->keys(branch, op, seq);
    for (const size_t i : op.weights) {
      const Weight& w = branch.weights[i];
      if (w.is_vector() || w.in_projection) continue;
      sum += count * double(op.row == &kExperts ? c.top_k : 1) * elements(w);
    }
  });
  return sum;
}

std::string gpu_refusal(const BranchProgram& program, const ModelConfig& c, int64_t tp) {
  for (const Op& op : program.ops) {
    const std::string refusal = op.row->refusal ? op.row->refusal(program, op, c, tp) : "";
    if (!refusal.empty()) return refusal;
  }
  return "";
}

void check_gpu_operations(const ModelConfig& c) {
  for_each_op(c, false, [&](double, const BranchProgram&, const Op& op) {
    const char* const keys = op.row->needs_cpu ? op.row->needs_cpu(c) : op.row->cpu_only;
    if (!keys) return;
    throw ConfigError(
        fmt::format("{}: GPUs have no kernel of {}: expected --device cpu", keys, op.row->name));
  });
}

void check_gpus(const ModelConfig& c, int64_t tp) {
  check_gpu_operations(c);
  for (const auto& [count, layer] : layer_kinds(c, false)) {
    for (const BranchProgram& branch : layer.branches) {
      const std::string refusal = gpu_refusal(branch, c, tp);
      if (!refusal.empty()) throw ConfigError(refusal);
    }
  }
}

std::string refuse_unless_multiple(const char* key, int64_t value, int64_t unit) {
  if (value % unit == 0) return "";
  return fmt::format("model.{} = {}: expected a multiple of {} on GPUs", key, value, unit);
}

std::string refuse_above(const char* key, int64_t value, int64_t max) {
  if (value <= max) return "";
  return fmt::format("model.{} = {}: expected at most {} on GPUs", key, value, max);
}

}  // namespace tandem::program
