#include "engine/model/placement.h"

#include <fmt/format.h>

#include <stdexcept>
#include <utility>

namespace tandem {

std::string Placement::describe() const {
  switch (kind_) {
    case Kind::replicated:
      return "replicated";
    case Kind::partial:
      return "partial";
    case Kind::sharded:
      return index_ == kFlat ? "sharded(flat)" : fmt::format("sharded({})", index_);
    case Kind::one_rank:
      return fmt::format("rank {}", index_);
  }
  __builtin_unreachable();
}

const char* name_of(Axis axis) {
  switch (axis) {
    case Axis::tp:
      return "tp";
    case Axis::cp:
      return "cp";
    case Axis::ep:
      return "ep";
    case Axis::expert_dp:
      return "expert_dp";
    case Axis::pp:
      return "pp";
    case Axis::sync:
      return "sync";
  }
  __builtin_unreachable();
}

const PlacedTensor& PlacementTable::add(PlacedTensor tensor) {
  tensors_.push_back(std::move(tensor));
  const PlacedTensor& added = tensors_.back();
  if (by_name_.emplace(added.name, &added).second) return added;
  throw std::logic_error(fmt::format("{}: declared twice", added.name));
}

const PlacedTensor& PlacementTable::at(const std::string& name) const {
  const auto found = by_name_.find(name);
  if (found != by_name_.end()) return *found->second;
  throw std::logic_error(fmt::format("{}: not declared", name));
}

namespace placement {
namespace {

using Kind = Placement::Kind;

[[noreturn]] void fail(const char* op, const PlacedTensor& tensor, Axis axis,
                       const std::string& expected) {
  throw std::logic_error(fmt::format("{}: {} over {}: found {}, expected {}", op, tensor.name,
                                     name_of(axis), tensor.over(axis).describe(), expected));
}

/// Applies rule(axis) -> Placement to every axis.
template <typename Rule>
PlacedTensor make(const char* op, std::string name, const Rule& rule) {
  PlacedTensor result{std::move(name), op};
  for (int axis = 0; axis < kNumLearnerAxes; ++axis) result.over(Axis(axis)) = rule(Axis(axis));
  return result;
}

/// x with `at` applied on some axes.
template <typename Rule>
PlacedTensor along(const char* op, const PlacedTensor& x, Axes axes, std::string name,
                   const Rule& at) {
  return make(op, std::move(name),
              [&](Axis axis) { return axes.has(int(axis)) ? at(axis) : x.over(axis); });
}

bool is_on_one_rank(const PlacedTensor& x, Axis axis) {
  return x.over(axis).kind() == Kind::one_rank;
}

void expect_all(const char* op, const Operands& operands, Axis axis, Placement expected) {
  for (const PlacedTensor& operand : operands) expect(op, operand, axis, expected);
}

/// Placement of operands that must have the same one, and not terms of a sum: f(a) + f(b) is not
/// f(a + b).
Placement nonlinear(const char* op, const Operands& operands, Axis axis) {
  const PlacedTensor& first = operands.front();
  if (first.over(axis) == kPartial) fail(op, first, axis, "no partial sum");
  expect_all(op, operands, axis, first.over(axis));
  return first.over(axis);
}

Placement whole_rows(const char* op, const Operands& operands, Axis axis) {
  const Placement rows = nonlinear(op, operands, axis);
  if (rows == kReplicated || rows == kRows || is_on_one_rank(operands.front(), axis)) return rows;
  fail(op, operands.front(), axis, "whole rows");
}

/// Placement of weights that all rows read.
Placement weights_of(Placement rows) {
  return rows == kRows ? kReplicated : rows;
}

Placement sum_rows(const char* op, const Operands& operands, Axis axis) {
  const Placement rows = whole_rows(op, operands, axis);
  return rows == kRows ? kPartial : rows;
}

Placement product(const char* op, const PlacedTensor& a, const PlacedTensor& b, Axis axis) {
  const Placement left = a.over(axis), right = b.over(axis);
  switch (left.kind()) {
    case Kind::replicated:
      if (right == kReplicated || right == kColumns || right == kPartial) return right;
      fail(op, b, axis, "replicated, sharded(1) or partial");
    case Kind::partial:
      expect(op, b, axis, kReplicated);
      return kPartial;
    case Kind::sharded:
      if (left == kFlat) fail(op, a, axis, "a matrix");
      expect(op, b, axis, left == kRows ? kReplicated : kRows);
      return left == kRows ? kRows : kPartial;
    case Kind::one_rank:
      expect(op, b, axis, left);
      return left;
  }
  __builtin_unreachable();
}

PlacedTensor relabel(PlacedTensor tensor, const char* op) {
  tensor.made_by = op;
  return tensor;
}

PlacedTensor gather_rows(const char* op, const PlacedTensor& x) {
  expect(op, x, Axis::tp, kRows);
  PlacedTensor result = x;
  result.over(Axis::tp) = kReplicated;
  return result;
}

/// x as `to` on some axes, on which it must be as `from`.
PlacedTensor replace(const char* op, const PlacedTensor& x, Axes axes, Placement from, Placement to,
                     std::string name) {
  return along(op, x, axes, std::move(name), [&](Axis axis) {
    expect(op, x, axis, from);
    return to;
  });
}

}  // namespace

void expect(const char* op, const PlacedTensor& tensor, Axis axis, Placement expected) {
  if (tensor.over(axis) != expected) fail(op, tensor, axis, expected.describe());
}

PlacedTensor all_gather(const PlacedTensor& x, Axes axes, Placement shards, std::string name) {
  return replace("all_gather", x, axes, shards, kReplicated, std::move(name));
}

PlacedTensor reduce_scatter(const PlacedTensor& x, Axes axes, Placement shards, std::string name) {
  return replace("reduce_scatter", x, axes, kPartial, shards, std::move(name));
}

PlacedTensor all_reduce(const PlacedTensor& x, Axes axes, std::string name) {
  return replace("all_reduce", x, axes, kPartial, kReplicated, std::move(name));
}

PlacedTensor send(const PlacedTensor& x, Axis axis, int rank, std::string name) {
  return along("send", x, {axis}, std::move(name), [&](Axis) {
    if (!is_on_one_rank(x, axis)) fail("send", x, axis, "one rank");
    return Placement::on_rank(rank);
  });
}

PlacedTensor count_once(const PlacedTensor& x, Axes axes, std::string name) {
  return along("count_once", x, axes, std::move(name), [&](Axis axis) {
    if (x.over(axis) != kReplicated && !is_on_one_rank(x, axis)) {
      fail("count_once", x, axis, "replicated or one rank");
    }
    return kPartial;
  });
}

PlacedTensor owned_shard(const PlacedTensor& x, Axes axes, std::string name) {
  return replace("owned_shard", x, axes, kReplicated, kFlat, std::move(name));
}

PlacedTensor transposed(const PlacedTensor& matrix) {
  PlacedTensor result = matrix;
  result.name += "^T";
  for (Placement& p : result.placements) {
    if (p == kRows || p == kColumns) p = p == kRows ? kColumns : kRows;
  }
  return result;
}

PlacedTensor gemm(const PlacedTensor& a, const PlacedTensor& b, std::string name) {
  return make("gemm", std::move(name), [&](Axis axis) { return product("gemm", a, b, axis); });
}

PlacedTensor add(const PlacedTensor& a, const PlacedTensor& b, std::string name) {
  return make("add", std::move(name), [&](Axis axis) {
    expect("add", b, axis, a.over(axis));
    return a.over(axis);
  });
}

PlacedTensor fuse(const Operands& matrices, std::string name) {
  return make("fuse", std::move(name), [&](Axis axis) {
    expect_all("fuse", matrices, axis, matrices.front().over(axis));
    return matrices.front().over(axis);
  });
}

PlacedTensor elementwise(const char* op, const Operands& operands, std::string name) {
  return make(op, std::move(name), [&](Axis axis) { return nonlinear(op, operands, axis); });
}

PlacedTensor by_rows(const char* op, const Operands& operands, const Operands& weights,
                     std::string name) {
  return make(op, std::move(name), [&](Axis axis) {
    const Placement rows = whole_rows(op, operands, axis);
    expect_all(op, weights, axis, weights_of(rows));
    return rows;
  });
}

PlacedTensor sum_of_rows(const char* op, const Operands& operands, std::string name) {
  return make(op, std::move(name), [&](Axis axis) { return sum_rows(op, operands, axis); });
}

PlacedTensor column_sums(const PlacedTensor& x, std::string name) {
  return make("column_sums", std::move(name), [&](Axis axis) {
    if (x.over(axis) == kFlat) fail("column_sums", x, axis, "a matrix");
    if (x.over(axis) == kRows) return kPartial;
    return x.over(axis) == kColumns ? kRows : x.over(axis);
  });
}

PlacedTensor sum_of_squares(const PlacedTensor& x, std::string name) {
  return make("sum_of_squares", std::move(name), [&](Axis axis) {
    return nonlinear("sum_of_squares", {x}, axis) == kReplicated ? kReplicated : kPartial;
  });
}

PlacedTensor attention(const char* op, const Operands& operands, std::string name) {
  return make(op, std::move(name), [&](Axis axis) {
    if (axis != Axis::tp) return whole_rows(op, operands, axis);
    expect_all(op, operands, axis, kColumns);
    return kColumns;
  });
}

PlacedTensor embedding(const PlacedTensor& tokens, const PlacedTensor& table, std::string name) {
  return make("embedding", std::move(name), [&](Axis axis) {
    const Placement rows = whole_rows("embedding", {tokens}, axis);
    if (rows == kReplicated && table.over(axis) == kRows) return kPartial;
    expect("embedding", table, axis, weights_of(rows));
    return rows;
  });
}

PlacedTensor embedding_gradient(const PlacedTensor& tokens, const PlacedTensor& dx,
                                const PlacedTensor& table, std::string name) {
  const char* const op = "embedding_backward";
  return make(op, std::move(name), [&](Axis axis) {
    const Placement sum = sum_rows(op, {tokens, dx}, axis);
    if (sum == kReplicated && table.over(axis) == kRows) return kRows;
    expect(op, table, axis, weights_of(tokens.over(axis)));
    return sum;
  });
}

PlacedTensor ag_gemm(const PlacedTensor& x, const PlacedTensor& weight, std::string name) {
  expect("ag_gemm", weight, Axis::tp, kRows);
  const PlacedTensor gathered = gather_rows("ag_gemm", x);
  return make("ag_gemm", std::move(name), [&, b = transposed(weight)](Axis axis) {
    return product("ag_gemm", gathered, b, axis);
  });
}

PlacedTensor gemm_rs(const PlacedTensor& x, const PlacedTensor& weight, std::string name) {
  expect("gemm_rs", x, Axis::tp, kColumns);
  expect("gemm_rs", weight, Axis::tp, kColumns);
  const PlacedTensor partial = make("gemm", "partial product", [&](Axis axis) {
    return product("gemm_rs", x, transposed(weight), axis);
  });
  return relabel(reduce_scatter(partial, kTp, kRows, std::move(name)), "gemm_rs");
}

PlacedTensor ag_wgrad(const PlacedTensor& x, const PlacedTensor& dy, std::string name) {
  expect("ag_wgrad", dy, Axis::tp, kColumns);
  const PlacedTensor gathered = gather_rows("ag_wgrad", x);
  return make("ag_wgrad", std::move(name), [&, a = transposed(dy)](Axis axis) {
    return product("ag_wgrad", a, gathered, axis);
  });
}

PlacedTensor cross_entropy(const PlacedTensor& logits, const PlacedTensor& targets,
                           std::string name) {
  const char* const op = "cross_entropy";
  return make(op, std::move(name), [&](Axis axis) {
    if (axis != Axis::tp) return sum_rows(op, {logits, targets}, axis);
    expect(op, logits, axis, kColumns);
    expect(op, targets, axis, kReplicated);
    return kReplicated;
  });
}

PlacedTensor cross_entropy_backward(const PlacedTensor& logits, const PlacedTensor& targets,
                                    std::string name) {
  const char* const op = "cross_entropy_backward";
  return make(op, std::move(name), [&](Axis axis) {
    if (axis != Axis::tp) return whole_rows(op, {logits, targets}, axis);
    expect(op, logits, axis, kColumns);
    expect(op, targets, axis, kReplicated);
    return kColumns;
  });
}

PlacedTensor fuse_experts(const Operands& experts, std::string name) {
  return make("fuse_experts", std::move(name), [&](Axis axis) {
    const PlacedTensor& first = experts.front();
    if (axis != Axis::ep) {
      expect_all("fuse_experts", experts, axis, first.over(axis));
      return first.over(axis);
    }
    for (const PlacedTensor& expert : experts) {
      if (!is_on_one_rank(expert, axis)) fail("fuse_experts", expert, axis, "one rank");
    }
    return kRows;
  });
}

PlacedTensor one_expert(const PlacedTensor& all, int ep_rank, std::string name) {
  return along(all.made_by.c_str(), all, {Axis::ep}, std::move(name), [&](Axis axis) {
    expect("one_expert", all, axis, kRows);
    return Placement::on_rank(ep_rank);
  });
}

PlacedTensor experts(const char* op, const Operands& rows, const PlacedTensor& w_in,
                     const PlacedTensor& w_out, std::string name) {
  return make(op, std::move(name), [&](Axis axis) {
    const Placement placement = whole_rows(op, rows, axis);
    if (axis == Axis::tp || axis == Axis::ep) {
      expect(op, rows.front(), axis, kRows);
      expect(op, w_in, axis, kRows);
      expect(op, w_out, axis, axis == Axis::tp ? kColumns : kRows);
    } else {
      expect_all(op, {w_in, w_out}, axis, weights_of(placement));
    }
    return placement;
  });
}

PlacedTensor experts_gradient(const Operands& rows, const PlacedTensor& weight, std::string name) {
  const char* const op = "experts_backward";
  return make(op, std::move(name), [&](Axis axis) {
    const Placement sum = sum_rows(op, rows, axis);
    if (axis == Axis::tp || axis == Axis::ep) {
      expect(op, rows.front(), axis, kRows);
      return weight.over(axis);
    }
    return sum;
  });
}

PlacedTensor gradient_sync(const PlacedTensor& gradient, const PlacedTensor& parameter, Axes axes,
                           std::string name) {
  const char* const op = "gradient_sync";
  for (int axis = 0; axis < kNumLearnerAxes; ++axis) {
    if (!axes.has(axis)) expect(op, gradient, Axis(axis), parameter.over(Axis(axis)));
  }
  return along(op, gradient, axes, std::move(name), [&](Axis axis) {
    expect(op, gradient, axis, kPartial);
    return kFlat;
  });
}

PlacedTensor update(const PlacedTensor& gradient, const PlacedTensor& parameter,
                    const PlacedTensor& norm, Axes axes, std::string name) {
  for (int axis = 0; axis < kNumLearnerAxes; ++axis)
    expect("update", norm, Axis(axis), kReplicated);
  const PlacedTensor shard = owned_shard(parameter, axes, parameter.name + ", owned elements");
  const PlacedTensor updated = elementwise("update", {shard, gradient}, shard.name + ", updated");
  return relabel(all_gather(updated, axes, kFlat, std::move(name)), "update");
}

}  // namespace placement
}  // namespace tandem
