// A toy model feature, put into a layer's list: the output of each attention head times a learned
// factor. Two files add it, this one and CMakeLists.txt; memory, parameters, placements, passes and
// what GPUs refuse follow from the list. `tandem train` has it after four more: its member in
// src/engine/model/config.h, its key in src/engine/model/config_keys.cc, its name in
// src/engine/model/config_json.cc, and the lines of `with_head_scale` in
// src/engine/model/program/layer.cc; the operation then is a file of src/engine/model/program/ops/
// that program.h names.
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "engine/model/layout.h"
#include "engine/model/program/cost.h"
#include "engine/model/program/op_row.h"
#include "engine/model/stage_placements.h"
#include "kernels/elementwise.h"
#include "tests/engine/model/harness.h"

namespace tandem::program {
namespace {

/// Results: the scaled columns, and those before for the factors' gradient.
struct HeadScale {
  static void forward(const Op& op, Frame& f) {
    const Tensor &rows = f.at(op.out[0]), &before = f.at(op.out[1]);
    copy(f.exec(), rows, before);
    const int64_t head_dim = f.view.config.head_dim;
    const Tensor factors = f.vector(op, rows.dim(1) / head_dim);
    for (int64_t i = 0; i < rows.dim(0); ++i) {
      float* const row = rows.as<float>() + i * rows.stride(0);
      for (int64_t j = 0; j < rows.dim(1); ++j) row[j] *= factors.as<float>()[j / head_dim];
    }
  }

  static void declare_backward(const Op& op, Declaration& d) {
    d.add_between(d.gradients_of(op, placement::column_sums(d.gradients[kInner], "")));
  }

  static std::string refusal(const BranchProgram&, const Op&, const ModelConfig&, int64_t) {
    return "model.head_scale = true: expected false on GPUs";
  }
};
const OpRow kHeadScale = make_row<HeadScale>("head_scale");

BranchProgram with_head_scale(const ModelConfig& c) {
  BranchProgram branch = make_layer(c, 0).branches.front();
  const Op& attention = *branch.find(kAttention);
  const Features heads{c.heads, c.head_dim, Division::divided};
  Op scale{&kHeadScale, {}, {attention.out[0]}, {branch.weights.size()}};
  scale.out.push_back(branch.add({"unscaled", Rows::all, heads, Life::saved}));
  branch.weights.push_back({"self_attn.head_scale", {c.heads, 1, Division::divided}});
  branch.ops.insert(branch.ops.begin() + (&attention - branch.ops.data()) + 1, scale);
  return branch;
}

ModelConfig model() {
  ModelConfig c = test::small_model();
  c.hidden = 32, c.head_dim = 8, c.ffn = 32;
  return c;
}

TEST(NewFeature, MemoryFollows) {
  const ModelConfig c = model();
  const BranchProgram without = make_layer(c, 0).branches.front(), branch = with_head_scale(c);
  const Sizes sizes{.model = c, .tokens = 48, .tp = 2, .ep = 1, .element = 2, .on_gpus = false};
  const BranchBytes before = branch_bytes(without, sizes), after = branch_bytes(branch, sizes);
  EXPECT_EQ(after.saved - before.saved, 48 * 4 * 8 / 2 * 2);
  EXPECT_EQ(after.recomputed, before.recomputed);
  EXPECT_EQ(after.saved_by(Recompute::full), 0);
  EXPECT_EQ(branch.weights.back().elements(), 4);
}

TEST(NewFeature, PlacementsFollow) {
  const ModelConfig c = model();
  const ModelLayout layout(c, 2, 0);
  const BranchProgram branch = with_head_scale(c);
  PlacementTable table;
  for (const Parameter& p : layout.parameters) table.add(placed_parameter(p, 0));
  PlacedTensor factors{"model.layers.0.self_attn.head_scale", "parameter"};
  factors.over(Axis::tp) = placement::kRows;
  factors.over(Axis::pp) = Placement::on_rank(0);
  table.add(factors);
  PlacedTensor x = factors;
  x.name = "x", x.made_by = "read";
  for (const Axis axis : {Axis::tp, Axis::cp, Axis::ep, Axis::expert_dp}) {
    x.over(axis) = placement::kRows;
  }
  PlacedTensor dx = x;
  Declaration declaration(c, branch, "layers.0.", 0, table);
  declaration.forward(x);
  declaration.backward(dx);
  const PlacedTensor& gradient = table.at(gradient_name(factors.name));
  EXPECT_EQ(gradient.over(Axis::tp), factors.over(Axis::tp));
  EXPECT_EQ(gradient.over(Axis::expert_dp), Placement::partial());
  EXPECT_EQ(x.name, "layers.0.attention.output");
}

TEST(NewFeature, GpusRefuseItByItsKey) {
  const ModelConfig c = model();
  EXPECT_EQ(gpu_refusal(make_layer(c, 0).branches.front(), c, 1), "");
  EXPECT_EQ(gpu_refusal(with_head_scale(c), c, 1),
            "model.head_scale = true: expected false on GPUs");
}

/// In generation, whose attention here repeats the queries.
TEST(NewFeature, RunsBetweenAttentionAndTheNextGemm) {
  const ModelConfig c = model();
  const ModelLayout layout(c, 1, 0);
  Weights weights({}, layout, DType::f32);
  BranchLayout branch = layout.branches.front();
  branch.program = with_head_scale(c);
  branch.columns.push_back({0, layout.q});
  branch.offsets.push_back(layout.final_norm);
  std::iota(weights.values().as<float>() + layout.final_norm,
            weights.values().as<float>() + layout.final_norm + c.heads, 2.0f);
  const Activation x_norm(DType::f32, 1, c.hidden), hidden(DType::f32, 1, branch.in.rows),
      inner(DType::f32, 1, branch.out.columns), unscaled(DType::f32, 1, layout.q);
  Values values{x_norm, {}, hidden, inner};
  values[branch.program.values.size() - 1] = unscaled;
  set_ranges(branch, values);
  struct TestRunner final : Runner {
    void forward(const Op& op, const Frame& f) override {
      if (op.row == &kColumnGemm) {
        for (int64_t i = 0; i < f.at(kHidden).dim(1); ++i) f.at(kHidden).as<float>()[i] = float(i);
      } else if (op.row == &kAttention) {
        copy(f.exec(), f.at(op.in[0]), f.at(op.out[0]));
      } else {
        const float* const inner = f.at(kInner).as<float>();
        result.assign(inner, inner + f.at(kInner).elements());
      }
    }
    void sum_over_ranks(const Tensor&) override {}
    std::vector<float> result;
  } run;
  const LayerView view{c, layout, weights, {}};
  Frame frame{view, branch, values, run};
  run_normalized(frame);
  for (int64_t i = 0; i < layout.q; ++i) {
    EXPECT_EQ(run.result[size_t(i)], float(i) * float(2 + i / c.head_dim));
    EXPECT_EQ(unscaled->as<float>()[i], float(i));
  }
}

}  // namespace
}  // namespace tandem::program
