// The tensors of a model on eight ranks, assembled as their placements say, are those of one rank.
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/model/branch.h"
#include "engine/model/head.h"
#include "engine/model/initialize.h"
#include "engine/model/stage.h"
#include "engine/model/stage_placements.h"
#include "gemm/gemm.h"
#include "generated_layouts.h"
#include "kernels/norm.h"
#include "placed_values.h"
#include "tandem/random.h"

namespace tandem {
namespace {

constexpr int64_t kSequences = 4, kSeq = 8;
constexpr double kBound = 2e-5;
constexpr uint64_t kSeed = 17;

/// A rank's tensors by name. Those that operators fuse are separate: "layers.0.attention.hidden/k".
using RankTensors = std::map<std::string, Values>;

Values to_values(const Tensor& t) {
  Values v{t.dim(0), t.dim(1), {}};
  for (int64_t i = 0; i < v.rows; ++i) {
    for (int64_t j = 0; j < v.columns; ++j) {
      v.values.push_back(t.as<const float>()[i * t.stride(0) + j]);
    }
  }
  return v;
}

struct Text {
  std::vector<int32_t> tokens, targets;
};
/// Text of the rank's sequences.
Text make_text(const ParallelGroups& groups, const ModelConfig& config) {
  const int64_t count = kSequences / groups.copies().size() * kSeq,
                first = groups.copies().rank() * count;
  Text text;
  for (int64_t i = first; i < first + count; ++i) {
    const auto words = philox(3, 1, uint64_t(i));
    text.tokens.push_back(int32_t(words[0] % uint64_t(config.vocab)));
    text.targets.push_back(i % 5 == 4 ? -1 : int32_t(words[1] % uint64_t(config.vocab)));
  }
  return text;
}

TransformerOptions make_options(const ParallelGroups& groups) {
  return {.batch = kSequences / groups.copies().size(),
          .seq = kSeq,
          .overlap = {Strategy::serial},
          .experts = groups.experts(),
          .step = groups.stage_axes()};
}

/// Weights larger than initialized ones, so that no layer is close to linear.
void initialize_large(const ModelLayout& layout, const ModelConfig& config, const Exec& exec,
                      const Tensor& values) {
  initialize_parameters(exec, layout, config, kSeed, values);
  for (int64_t i = 0; i < values.elements(); ++i) {
    float& value = values.as<float>()[i];
    if (value != 1) value *= 10;
  }
}

/// Parameters, their gradients, the residual stream at both ends, and the losses.
RankTensors stage_tensors(const ParallelGroups& groups, const ModelConfig& config) {
  Stage stage(groups.tp(), config, make_options(groups), {});
  const ModelLayout layout(config, groups.tp().size(), groups.tp().rank(),
                           {groups.dims().ep(), groups.experts()->rank() / groups.tp().size()});
  initialize_large(layout, config, stage.exec(), stage.parameters());
  stage.parameters_changed();
  const Text text = make_text(groups, config);
  Microbatch microbatch = stage.make_microbatch();
  const double loss = stage.forward(text.tokens, text.targets, microbatch);
  stage.backward(microbatch, 1.0f / float(kSequences * kSeq));
  RankTensors tensors;
  for (const Parameter& p : layout.parameters) {
    const LocalShard shard = local_shard(p);
    for (const auto& [name, flat] :
         {std::pair{p.name, stage.parameters()}, {gradient_name(p.name), stage.gradients()}}) {
      float* const values = flat.as<float>() + p.offset;
      const bool is_divided_vector = p.shape.size() == 1 && p.sharding.over_tp();
      tensors[name] =
          to_values(is_divided_vector ? Tensor(values, DType::f32, {shard.columns, 1})
                                      : Tensor(values, DType::f32, {shard.rows, shard.columns},
                                               {p.row_stride, 1}));
    }
  }
  tensors["embedding.output"] = to_values(stage.input(microbatch));
  tensors["loss"] = {1, 1, {float(loss)}};
  if (config.experts > 0) tensors["layers.1.moe.aux_loss"] = {1, 1, {float(stage.aux_loss())}};
  return tensors;
}

/// Activations and their gradients, of the passes that a stage runs, without an auxiliary loss.
class Passes {
 public:
  Passes(const ParallelGroups& groups, const ModelConfig& config)
      : context_(groups.tp(), config, make_options(groups), {}),
        embedding_(context_),
        head_(context_),
        dx_(context_.make(DType::f32, context_.local_rows.count, config.hidden)),
        dnorm_(context_.make(DType::f32, 1, config.hidden)) {
    initialize_large(context_.layout, config, context_.exec, context_.weights.values());
    context_.weights.refresh();
    for (const BranchLayout& b : context_.layout.branches) {
      if (b.moe && !experts_) experts_.emplace(context_, b);
      auto& products = products_[branch_kind(b)];
      if (b.has_products() && !products) products = std::make_unique<BranchProducts>(context_, b);
      branches_.emplace_back(context_, products.get(), b.moe ? &*experts_ : nullptr, b);
    }
    const Text text = make_text(groups, config);
    microbatch_.emplace(context_, true);
    std::ranges::copy(text.tokens, microbatch_->tokens->as<int32_t>());
    std::ranges::copy(text.targets, microbatch_->targets->as<int32_t>());
  }

  RankTensors run() {
    forward();
    backward();
    return std::move(tensors_);
  }

 private:
  std::string prefix(size_t branch) const {
    const BranchLayout& b = context_.layout.branches[branch];
    return "layers." + std::to_string(branch / size_t(context_.layout.branches_per_layer)) +
           (b.attention ? ".attention."
            : b.moe     ? ".moe."
                        : ".mlp.");
  }
  void save(const std::string& name, const Tensor& t) {
    if (t.data() && t.elements() > 0) tensors_[name] = to_values(t);
  }
  /// Saves the columns of a value that the branch names, of the value or its gradient.
  void save_columns(size_t i, program::ValueId of, const std::string& name, const Tensor& t) {
    const BranchLayout& b = context_.layout.branches[i];
    program::Values values;
    values[size_t(of)] = t;
    program::set_ranges(b, values);
    for (size_t j = 0; j < b.program.values.size(); ++j) {
      const program::Value& value = b.program.values[j];
      if (value.range_of == of) save(name + "/" + value.name, values[j]);
    }
  }
  Tensor vector_of(const Tensor& row) const {
    return Tensor(row.data(), row.dtype(), {row.elements()});
  }
  NextNorm norm_before(size_t i) {
    return i < branches_.size() ? branches_[i].norm(microbatch_->branches[i])
                                : head_.norm(*microbatch_->head);
  }

  void forward() {
    MicrobatchState& m = *microbatch_;
    embedding_.forward(vector_of(m.tokens), m.residuals[0]);
    save("embedding.output", m.residuals[0]);
    const NextNorm first = norm_before(0);
    rms_norm_forward(context_.exec, m.residuals[0], first.weight, context_.config.norm_eps,
                     first.x_norm, first.inverse_rms);
    for (size_t i = 0; i < branches_.size(); ++i) {
      BranchActivations& saved = m.branches[i];
      branches_[i].forward(m.residuals[i], m.residuals[i + 1], saved, nullptr, norm_before(i + 1));
      const std::string name = prefix(i);
      const program::BranchProgram& branch = context_.layout.branches[i].program;
      save(name + "x_norm", saved.values[program::kXNorm]);
      save(name + "output", m.residuals[i + 1]);
      save_columns(i, program::kHidden, name + "hidden", saved.values[program::kHidden]);
      save_columns(i, program::kInner, name + "inner", saved.values[program::kInner]);
      const program::Op* const router = branch.find(program::kRouter);
      if (!router) continue;
      save(name + "scores", saved.values[size_t(router->out[0])]);
      save(name + "routing", saved.values[size_t(router->out[2])]);
      save(name + "logits", experts_->logits);
      save(name + "routed", experts_->routed);
    }
    head_.forward(vector_of(m.targets), *m.head);
    save("head.x_norm", m.head->x_norm);
    save("head.logits", m.head->logits);
  }

  void backward() {
    MicrobatchState& m = *microbatch_;
    clear(context_.exec, dnorm_);
    head_.backward(m.residuals.back(), vector_of(m.targets), 1, *m.head, dx_, dnorm_);
    save("head.d_input", dx_);
    save(gradient_name("model.norm.weight") + ", local rows", dnorm_);
    for (size_t i = branches_.size(); i-- > 0;) {
      const BranchLayout& b = context_.layout.branches[i];
      clear(context_.exec, dnorm_);
      branches_[i].backward(m.residuals[i], dx_, dnorm_, m.branches[i], {}, false);
      const std::string name = prefix(i);
      save(name + "d_input", dx_);
      if (b.has_norm()) {
        const auto layer = i / size_t(context_.layout.branches_per_layer);
        const std::string norm = b.program.weights[b.program.ops.front().weights.front()].name;
        save(gradient_name("model.layers." + std::to_string(layer) + "." + norm) + ", local rows",
             dnorm_);
      }
      if (b.has_products()) {
        const BranchProducts& p = *products_[branch_kind(b)];
        save_columns(i, program::kInner, name + "d_inner", p.d_act);
        save_columns(i, program::kHidden, name + "d_hidden", p.dhidden);
        save(name + "d_x_norm", p.d_x_norm);
      }
      if (!b.moe) continue;
      save(name + (b.has_products() ? "d_routed_x_norm" : "d_x_norm"), experts_->d_x_norm);
      save(name + "d_logits", experts_->dlogits);
    }
  }

  ModelContext context_;
  Embedding embedding_;
  Head head_;
  std::array<std::unique_ptr<BranchProducts>, kBranchKinds> products_;
  std::optional<BranchExperts> experts_;
  std::vector<Branch> branches_;
  std::optional<MicrobatchState> microbatch_;
  Activation dx_, dnorm_;
  RankTensors tensors_;
};

using MakeTensors = std::function<RankTensors(const ParallelGroups&, const ModelConfig&)>;

std::vector<RankTensors> on_ranks(const ParallelDims& dims, const ModelConfig& config,
                                  const MakeTensors& make) {
  std::vector<RankTensors> of_ranks(size_t(dims.ranks()));
  run_threads({.ranks = dims.ranks()}, [&](Communicator& world) {
    set_kernel_threads(1);
    const ParallelGroups groups(world, dims, true);
    of_ranks[size_t(world.rank())] = make(groups, config);
  });
  return of_ranks;
}

void expect_placed(const ModelConfig& config, const ParallelDims& dims, const MakeTensors& make,
                   size_t min_tensors) {
  PlacementTable table;
  declare_stage(config, ModelLayout(config, dims.tp(), 0, {dims.ep(), 0}), {}, table);
  const RankTensors whole = on_ranks(ParallelDims(1, 1), config, make).front();
  const std::vector<RankTensors> found = on_ranks(dims, config, make);
  EXPECT_GE(whole.size(), min_tensors);
  for (const auto& [name, expected] : whole) {
    const PlacedTensor& placed = table.at(name.substr(0, name.find('/')));
    std::vector<Values> of_ranks;
    for (const RankTensors& rank : found) of_ranks.push_back(rank.at(name));
    float max = 0;
    for (const float value : expected.values) max = std::max(max, std::abs(value));
    const auto assembled = assemble(of_ranks, placed, dims, float(kBound) * max);
    ASSERT_TRUE(assembled) << name << " on " << dims.describe();
    EXPECT_LE(max_difference(*assembled, expected), kBound) << name << " on " << dims.describe();
  }
}

ModelConfig small_model(bool has_experts) {
  ModelConfig config = tiny_config(has_experts).model;
  config.layers = 2;
  config.shared_ffn = has_experts ? 8 : 0;
  config.parallel_block = !has_experts;
  return config;
}

ModelConfig norm_model(const char* position) {
  ModelConfig config = small_model(false);
  config.parallel_block = false;
  config.qk_norm = true, config.norm_position = position;
  config.qk_norm_all_heads = config.norm_position == "post";
  return config;
}

TEST(PlacedTensors, OfAStageAreThoseOfOneRank) {
  for (const char* position : {"post", "both"}) {
    expect_placed(norm_model(position), ParallelDims(2, 2), stage_tensors, 30);
  }
  for (const bool has_experts : {true, false}) {
    ModelConfig config = small_model(has_experts);
    for (const bool is_tied : {true, false}) {
      config.tie_word_embeddings = is_tied;
      expect_placed(config, ParallelDims(2, 4, has_experts ? 2 : 1), stage_tensors, 30);
    }
  }
}

TEST(PlacedTensors, OfItsPassesAreThoseOfOneRank) {
  const auto passes = [](const ParallelGroups& groups, const ModelConfig& model) {
    return Passes(groups, model).run();
  };
  for (const char* position : {"post", "both"}) {
    expect_placed(norm_model(position), ParallelDims(2, 2), passes, 30);
  }
  for (const bool has_experts : {true, false}) {
    ModelConfig config = small_model(has_experts);
    config.aux_loss_coeff = 0;
    expect_placed(config, ParallelDims(2, 4, has_experts ? 2 : 1), passes, 30);
    expect_placed(config, ParallelDims(4, 2, has_experts ? 2 : 1), passes, 30);
  }
}

}  // namespace
}  // namespace tandem
