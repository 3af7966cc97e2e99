// The rules of placements are true of the operators: ranks that hold the operands as a rule accepts
// them, placed over two axes in every combination, compute a result with the placements that it
// states.
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "gemm/gemm.h"
#include "kernels/attention/attention.h"
#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/norm.h"
#include "kernels/optimizer.h"
#include "kernels/row_ops.h"
#include "kernels/swiglu.h"
#include "placed_values.h"
#include "tandem/collectives.h"
#include "tandem/overlap.h"

namespace tandem {
namespace {

using placement::Operands;

constexpr int64_t kTokens = 10, kHidden = 6, kFeatures = 8, kVocab = 9;
constexpr int64_t kSequences = 4, kSeq = 3, kHeads = 4, kHeadDim = 2;
constexpr double kEpsilon = 1e-5, kBound = 2e-5;
const Exec kHost{};

/// Operands of an operator on a rank.
struct Local {
  const ParallelGroups& groups;
  std::vector<Values> operands;
  int64_t tp_rows = 0;  ///< of the first operand, all rows of the tp ranks
  int64_t begin = 0;    ///< first of the last operand's rows or columns in the whole
};

struct Operator {
  const char* name;
  std::vector<Values> operands;
  std::function<PlacedTensor(const Operands&)> rule;
  std::function<Values(Local&)> run;
  size_t num_accepted;     ///< combinations of placements
  bool has_equal = false;  ///< operands with one placement for all
};

Tensor tensor(Values& v) {
  return Tensor(v.values.data(), DType::f32, {v.rows, v.columns});
}
Tensor vector(Values& v) {
  return Tensor(v.values.data(), DType::f32, {int64_t(v.values.size())});
}
Values zeros(int64_t rows, int64_t columns) {
  return {rows, columns, std::vector<float>(size_t(rows * columns))};
}
std::vector<int32_t> integers(const Values& v) {
  return {v.values.begin(), v.values.end()};
}
/// Values in [0, end).
Values random_integers(int64_t rows, int64_t end, uint64_t seed) {
  Values v = random_values(rows, 1, seed);
  for (float& value : v.values) value = std::floor((value + 1) / 2.001f * float(end));
  return v;
}

Values run_gemm(Local& l) {
  Values out = zeros(l.operands[0].rows, l.operands[1].columns);
  gemm(kHost, tensor(l.operands[0]), tensor(l.operands[1]), tensor(out));
  return out;
}
Values run_add(Local& l) {
  Values out = zeros(l.operands[0].rows, l.operands[0].columns);
  tandem::add(kHost, tensor(l.operands[0]), tensor(l.operands[1]), tensor(out));
  return out;
}
Values run_swiglu(Local& l) {
  Values out = zeros(l.operands[0].rows, l.operands[0].columns);
  swiglu_forward(kHost, tensor(l.operands[0]), tensor(l.operands[1]), tensor(out));
  return out;
}
Values run_norm(Local& l) {
  Values out = zeros(l.operands[0].rows, l.operands[0].columns), scales = zeros(out.rows, 1);
  rms_norm_forward(kHost, tensor(l.operands[0]), vector(l.operands[1]), kEpsilon, tensor(out),
                   vector(scales));
  return out;
}
/// Gradients of a norm's input and weight.
std::pair<Values, Values> norm_gradients(Local& l, Values weight) {
  Values out = zeros(l.operands[0].rows, kHidden), scales = zeros(out.rows, 1),
         dx = zeros(out.rows, kHidden), dweight = zeros(kHidden, 1);
  rms_norm_forward(kHost, tensor(l.operands[0]), vector(weight), kEpsilon, tensor(out),
                   vector(scales));
  rms_norm_backward(kHost, tensor(l.operands[0]), vector(weight), vector(scales),
                    tensor(l.operands[1]), tensor(dx), vector(dweight));
  return {dx, dweight};
}
Values run_norm_weight_gradient(Local& l) {
  return norm_gradients(l, random_values(kHidden, 1, 77)).second;
}
Values run_norm_gradient(Local& l) {
  return norm_gradients(l, l.operands[2]).first;
}
Values run_column_sums(Local& l) {
  Values sums = zeros(l.operands[0].columns, 1);
  column_sums(kHost, tensor(l.operands[0]), vector(sums), false);
  return sums;
}
Values run_squares(Local& l) {
  return {1, 1, {float(sum_of_squares(tensor(l.operands[0])))}};
}
Values run_attention(Local& l) {
  const Values& q = l.operands[0];
  const RopeTable rope(kHost, kSeq, kHeadDim, 10000);
  const int64_t heads = q.columns / kHeadDim;
  Attention attention(kHost, {q.rows / kSeq, kSeq, heads, heads, kHeadDim}, rope);
  Values out = zeros(q.rows, q.columns), log_sums = zeros(q.rows / kSeq * heads, kSeq);
  attention.forward(kHost, tensor(l.operands[0]), tensor(l.operands[1]), tensor(l.operands[2]),
                    tensor(out), tensor(log_sums));
  return out;
}
Values run_embedding(Local& l) {
  std::vector<int32_t> tokens = integers(l.operands[0]);
  Values out = zeros(l.operands[0].rows, l.operands[1].columns);
  embedding_forward(kHost, Tensor::of(std::span(tokens), {out.rows}), tensor(l.operands[1]),
                    l.begin, tensor(out));
  return out;
}
/// Operands: tokens, dx, table.
Values run_embedding_gradient(Local& l) {
  std::vector<int32_t> tokens = integers(l.operands[0]);
  Values out = zeros(l.operands[2].rows, l.operands[2].columns);
  embedding_backward(kHost, Tensor::of(std::span(tokens), {l.operands[0].rows}),
                     tensor(l.operands[1]), l.begin, tensor(out));
  return out;
}

Values run_all_reduce(Local& l) {
  all_reduce(l.groups.tp(), tensor(l.operands[0]));
  return l.operands[0];
}
Values run_all_gather(Local& l) {
  Values out = zeros(l.tp_rows, l.operands[0].columns);
  all_gather(l.groups.tp(), tensor(l.operands[0]), tensor(out));
  return out;
}
Values run_reduce_scatter(Local& l) {
  const Communicator& tp = l.groups.tp();
  Values out =
      zeros(shard_of(l.operands[0].rows, tp.size(), tp.rank()).count, l.operands[0].columns);
  reduce_scatter(l.groups.tp(), tensor(l.operands[0]), tensor(out));
  return out;
}
Values run_ag_gemm(Local& l) {
  Values out = zeros(l.tp_rows, l.operands[1].rows);
  AgGemm(l.groups.tp(), {l.tp_rows, out.columns, l.operands[0].columns}, {Strategy::serial})
      .run(tensor(l.operands[0]), tensor(l.operands[1]), tensor(out));
  return out;
}
Values run_gemm_rs(Local& l) {
  const Communicator& tp = l.groups.tp();
  Values out = zeros(shard_of(l.operands[0].rows, tp.size(), tp.rank()).count, l.operands[1].rows);
  GemmRs(l.groups.tp(), {l.operands[0].rows, out.columns, l.operands[0].columns},
         {Strategy::serial})
      .run(tensor(l.operands[0]), tensor(l.operands[1]), tensor(out));
  return out;
}
/// Operands: x, dy.
Values run_ag_wgrad(Local& l) {
  Values out = zeros(l.operands[1].columns, l.operands[0].columns);
  AgWgrad(l.groups.tp(), {l.tp_rows, out.rows, out.columns}, {Strategy::serial})
      .run(tensor(l.operands[0]), tensor(l.operands[1]), tensor(out));
  return out;
}

/// Loss and gradient of the logits, as the head computes them.
std::pair<Values, Values> run_head(Local& l) {
  Values& logits = l.operands[0];
  std::vector<int32_t> integer_targets = integers(l.operands[1]);
  const Tensor targets = Tensor::of(std::span(integer_targets), {logits.rows});
  Values maxima = zeros(1, logits.rows), sums = zeros(2, logits.rows), d_logits = logits;
  const Tensor row = tensor(sums).rows(0, 1), picked = tensor(sums).rows(1, 1);
  cross_entropy_max(kHost, tensor(logits), tensor(maxima));
  all_reduce(l.groups.tp(), tensor(maxima), ReduceOp::max);
  cross_entropy_sum(kHost, tensor(logits), targets, l.begin, tensor(maxima), row, picked);
  all_reduce(l.groups.tp(), tensor(sums));
  double loss = 0;
  cross_entropy_loss(kHost, targets, row, picked, Tensor(&loss, DType::u8, {8}));
  cross_entropy_backward(kHost, tensor(logits), targets, l.begin, tensor(maxima), row, 1,
                         tensor(d_logits));
  return {{1, 1, {float(loss)}}, d_logits};
}

std::vector<Operator> local_operators() {
  const Values x = random_values(kTokens, kHidden, 1), y = random_values(kTokens, kHidden, 2),
               weight = random_values(kHidden, 1, 3), b = random_values(kHidden, kFeatures, 4),
               tokens = random_integers(kTokens, kVocab, 5),
               table = random_values(kVocab, kHidden, 6);
  std::vector<Operator> all{
      {"gemm",
       {x, b},
       [](const Operands& o) { return placement::gemm(o[0], o[1], "out"); },
       run_gemm,
       36},
      {"add",
       {x, y},
       [](const Operands& o) { return placement::add(o[0], o[1], "out"); },
       run_add,
       16},
      {"elementwise",
       {x, y},
       [](const Operands& o) { return placement::elementwise("swiglu", o, "out"); },
       run_swiglu,
       9},
      {"by_rows",
       {x, weight},
       [](const Operands& o) { return placement::by_rows("rms_norm", {o[0]}, {o[1]}, "out"); },
       run_norm,
       4},
      {"by_rows, backward",
       {x, y, weight},
       [](const Operands& o) {
         return placement::by_rows("rms_norm_backward", {o[0], o[1]}, {o[2]}, "out");
       },
       run_norm_gradient,
       4},
      {"sum_of_rows",
       {x, y},
       [](const Operands& o) { return placement::sum_of_rows("rms_norm_backward", o, "out"); },
       run_norm_weight_gradient,
       4},
      {"column_sums",
       {x},
       [](const Operands& o) { return placement::column_sums(o[0], "out"); },
       run_column_sums,
       16},
      {"sum_of_squares",
       {x},
       [](const Operands& o) { return placement::sum_of_squares(o[0], "out"); },
       run_squares,
       9},
      {"embedding",
       {tokens, table},
       [](const Operands& o) { return placement::embedding(o[0], o[1], "out"); },
       run_embedding,
       9},
      {"embedding_gradient",
       {tokens, y, table},
       [](const Operands& o) { return placement::embedding_gradient(o[0], o[1], o[2], "out"); },
       run_embedding_gradient,
       9},
  };
  const int64_t rows = kSequences * kSeq, columns = kHeads * kHeadDim;
  all.push_back({"attention",
                 {random_values(rows, columns, 7), random_values(rows, columns, 8),
                  random_values(rows, columns, 9)},
                 [](const Operands& o) { return placement::attention("attention", o, "out"); },
                 run_attention,
                 2,
                 true});
  return all;
}

std::vector<Operator> communicating_operators() {
  const Values x = random_values(kTokens, kHidden, 1), w_in = random_values(kFeatures, kHidden, 2),
               inner = random_values(kTokens, kFeatures, 3),
               w_out = random_values(kHidden, kFeatures, 4),
               logits = random_values(kTokens, kVocab, 5),
               targets = random_integers(kTokens, kVocab, 6);
  const auto entropy = [](const Operands& o) {
    return placement::cross_entropy(o[0], o[1], "out");
  };
  const auto entropy_backward = [](const Operands& o) {
    return placement::cross_entropy_backward(o[0], o[1], "out");
  };
  return {
      {"all_reduce",
       {x},
       [](const Operands& o) { return placement::all_reduce(o[0], kTp, "out"); },
       run_all_reduce,
       4},
      {"all_gather",
       {x},
       [](const Operands& o) { return placement::all_gather(o[0], kTp, placement::kRows, "out"); },
       run_all_gather,
       4},
      {"reduce_scatter",
       {x},
       [](const Operands& o) {
         return placement::reduce_scatter(o[0], kTp, placement::kRows, "out");
       },
       run_reduce_scatter,
       4},
      {"ag_gemm",
       {x, w_in},
       [](const Operands& o) { return placement::ag_gemm(o[0], o[1], "out"); },
       run_ag_gemm,
       6},
      {"gemm_rs",
       {inner, w_out},
       [](const Operands& o) { return placement::gemm_rs(o[0], o[1], "out"); },
       run_gemm_rs,
       6},
      {"ag_wgrad",
       {x, inner},
       [](const Operands& o) { return placement::ag_wgrad(o[0], o[1], "out"); },
       run_ag_wgrad,
       6},
      {"cross_entropy", {logits, targets}, entropy, [](Local& l) { return run_head(l).first; }, 2},
      {"cross_entropy_backward",
       {logits, targets},
       entropy_backward,
       [](Local& l) { return run_head(l).second; },
       2},
  };
}

constexpr Placement kChoices[] = {placement::kReplicated, placement::kPartial, placement::kRows,
                                  placement::kColumns};
constexpr int kCombinations = 16;  // over two axes

PlacedTensor placed(size_t operand, int combination) {
  PlacedTensor result{fmt::format("operand {}", operand), "test"};
  result.over(Axis::tp) = kChoices[combination % 4];
  result.over(Axis::expert_dp) = kChoices[combination / 4];
  return result;
}

/// Placements of the operands and the result that the rule states.
struct Case {
  Operands operands;
  PlacedTensor result;
};

std::vector<Operands> all_operands(const Operator& op) {
  std::vector<Operands> all{{}};
  for (size_t i = 0; i < op.operands.size(); ++i) {
    std::vector<Operands> longer;
    for (const Operands& before : all) {
      for (int c = 0; c < kCombinations; ++c) {
        const PlacedTensor next = placed(i, c);
        if (op.has_equal && i > 0 && next.placements != before.front().placements) continue;
        longer.push_back(before);
        longer.back().push_back(next);
      }
    }
    all = std::move(longer);
  }
  return all;
}

std::vector<Case> accepted_cases(const Operator& op) {
  std::vector<Case> accepted;
  for (const Operands& operands : all_operands(op)) {
    try {
      accepted.push_back({operands, op.rule(operands)});
    } catch (const std::logic_error&) {
      continue;
    }
  }
  return accepted;
}

Local make_local(const ParallelGroups& groups, const Operator& op, const Operands& placements,
                 bool is_head) {
  const ParallelDims& dims = groups.dims();
  const int rank = groups.world().rank();
  Local local{groups, {}};
  for (size_t i = 0; i < placements.size(); ++i) {
    local.operands.push_back(local_values(op.operands[i], placements[i], dims, rank));
  }
  PlacedTensor rows = placements.front();
  rows.over(Axis::tp) = placement::kReplicated;
  local.tp_rows = local_values(op.operands.front(), rows, dims, rank).rows;
  const size_t sharded = is_head ? 0 : placements.size() - 1;
  Values positions = op.operands[sharded];
  for (int64_t i = 0; i < positions.rows; ++i) {
    for (int64_t j = 0; j < positions.columns; ++j) positions.at(i, j) = float(is_head ? j : i);
  }
  PlacedTensor shard = placements[sharded];
  for (Placement& p : shard.placements) {
    if (p == (is_head ? placement::kRows : placement::kColumns)) p = placement::kReplicated;
  }
  positions = local_values(positions, shard, dims, rank);
  local.begin = positions.values.empty() ? 0 : int64_t(positions.values.front());
  return local;
}

Values on_one_rank(const Operator& op, bool is_head) {
  Values result;
  run_threads({.ranks = 1}, [&](Communicator& world) {
    const ParallelGroups groups(world, ParallelDims(1, 1), false);
    Local local = make_local(groups, op, Operands(op.operands.size()), is_head);
    result = op.run(local);
  });
  return result;
}

void expect_true(const Operator& op) {
  SCOPED_TRACE(op.name);
  const bool is_head = std::string(op.name).starts_with("cross_entropy");
  const std::vector<Case> cases = accepted_cases(op);
  EXPECT_EQ(cases.size(), op.num_accepted);
  const Values expected = on_one_rank(op, is_head);
  const ParallelDims dims(2, 2);
  std::vector<std::vector<Values>> found(cases.size(), std::vector<Values>(size_t(dims.ranks())));
  run_threads({.ranks = dims.ranks()}, [&](Communicator& world) {
    set_kernel_threads(1);
    const ParallelGroups groups(world, dims, false);
    for (size_t i = 0; i < cases.size(); ++i) {
      Local local = make_local(groups, op, cases[i].operands, is_head);
      found[i][size_t(world.rank())] = op.run(local);
    }
  });
  for (size_t i = 0; i < cases.size(); ++i) {
    std::string text = op.name;
    for (const PlacedTensor& operand : cases[i].operands) {
      text += fmt::format(", {} x {}", operand.over(Axis::tp).describe(),
                          operand.over(Axis::expert_dp).describe());
    }
    const auto assembled = assemble(found[i], cases[i].result, dims, float(kBound));
    ASSERT_TRUE(assembled) << text;
    EXPECT_LE(max_difference(*assembled, expected), kBound) << text;
  }
}

TEST(PlacementRules, AreTrueOfLocalOperators) {
  for (const Operator& op : local_operators()) expect_true(op);
}

TEST(PlacementRules, AreTrueOfCommunicatingOperators) {
  for (const Operator& op : communicating_operators()) expect_true(op);
}

/// Whether a result on the ranks of one axis is the expected one with any placement.
bool has_placement(const std::vector<Values>& found, const Values& expected,
                   const ParallelDims& dims) {
  for (const Placement& choice : kChoices) {
    PlacedTensor result;
    result.over(Axis::tp) = choice;
    const auto assembled = assemble(found, result, dims, float(kBound));
    if (assembled && max_difference(*assembled, expected) <= kBound) return true;
  }
  return false;
}

// The rules of linear operators refuse only what no placement describes.
TEST(PlacementRules, RefuseWhatNoPlacementDescribes) {
  const ParallelDims dims(2, 1);
  int refused = 0;
  for (const Operator& op : local_operators()) {
    const std::string name = op.name;
    if (name != "gemm" && name != "add") continue;
    const Values expected = on_one_rank(op, false);
    for (int left = 0; left < 4; ++left) {
      for (int right = 0; right < 4; ++right) {
        const Operands operands{placed(0, left), placed(1, right)};
        std::vector<Values> found;
        for (int rank = 0; rank < 2; ++rank) {
          std::vector<Values> local;
          for (size_t i = 0; i < 2; ++i) {
            local.push_back(local_values(op.operands[i], operands[i], dims, rank));
          }
          const bool fits = name == "gemm" ? local[0].columns == local[1].rows
                                           : local[0].rows == local[1].rows &&
                                                 local[0].columns == local[1].columns;
          if (!fits) continue;
          run_threads({.ranks = 1}, [&](Communicator& world) {
            const ParallelGroups groups(world, ParallelDims(1, 1), false);
            Local on_rank{groups, local};
            found.push_back(op.run(on_rank));
          });
        }
        if (found.size() < 2) continue;  // cannot run at all
        bool accepted = true;
        try {
          op.rule(operands);
        } catch (const std::logic_error&) {
          accepted = false;
          ++refused;
        }
        EXPECT_EQ(accepted, has_placement(found, expected, dims))
            << name << ": " << operands[0].over(Axis::tp).describe() << ", "
            << operands[1].over(Axis::tp).describe();
      }
    }
  }
  EXPECT_GE(refused, 4);
}

}  // namespace
}  // namespace tandem
