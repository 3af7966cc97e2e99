// Stages: consecutive layers with and without the model's ends, and backward passes in two parts.
#include "engine/model/stage.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <set>

#include "core/exec.h"
#include "engine/model/transformer.h"
#include "tandem/error.h"
#include "tests/engine/model/harness.h"
#include "tests/flat.h"

namespace tandem {
namespace {
using namespace tandem::test;
using ::testing::HasSubstr;

ModelConfig stage_model(const Variant& variant) {
  ModelConfig c = small_model(variant);
  c.layers = 4;
  return c;
}

ModelConfig moe_stage_model() {
  ModelConfig c = small_model(kVariants[1]);
  c.layers = 4;
  c.experts = 4;
  c.top_k = 2;
  c.expert_ffn = 16;
  c.moe_layer_freq = 2;
  c.aux_loss_coeff = 0.5;
  return c;
}

std::vector<ModelConfig> stage_models() {
  std::vector<ModelConfig> all{moe_stage_model()};
  for (const Variant& variant : kVariants) {
    const ModelConfig config = stage_model(variant);
    if (!config.tie_word_embeddings) all.push_back(config);
  }
  return all;
}

/// The model cut before these layers.
std::vector<StageLayers> cut(const ModelConfig& config, std::vector<int64_t> cuts) {
  cuts.push_back(config.layers);
  std::vector<StageLayers> stages;
  int64_t begin = 0;
  for (const int64_t end : cuts) {
    stages.push_back({begin, end - begin, false, false});
    begin = end;
  }
  stages.front().embedding = stages.back().head = true;
  return stages;
}

/// Values of the parameters that are here, by name.
void add_values(const Stage& stage, const Tensor& flat_values, Tensors& all) {
  const std::span<float> values = floats(flat_values);
  for (const Parameter& p : stage.parameter_list()) {
    const LocalShard shard = local_shard(p);
    for (int64_t row = 0; row < shard.rows; ++row) {
      const auto begin = values.begin() + p.offset + row * shard.row_stride;
      all[p.name].insert(all[p.name].end(), begin, begin + shard.columns);
    }
  }
}

void scale_weights(Stage& stage) {
  for (float& w : floats(stage.parameters())) w = w == 1 ? w : w * 5;
  stage.parameters_changed();
}

TEST(Stage, ChainOfStagesHasTheBitsOfTheWholeModel) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  for (const ModelConfig& config : stage_models()) {
    for (const int ranks : {1, 2}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        WorldOptions world;
        world.ranks = ranks;
        run_threads(world, [&](Communicator& comm) {
          set_kernel_threads(1);
          const TransformerOptions options{.batch = 2, .seq = 9, .dtype = dtype};
          const Batch batch = make_batch(config, 18);
          Transformer whole(comm, config, options);
          whole.initialize(3);
          scale_weights(whole);
          const double loss = whole.forward(batch.tokens, batch.targets);
          whole.backward(0.1f);
          Tensors weights, gradients;
          add_values(whole, whole.parameters(), weights);
          add_values(whole, whole.gradients(), gradients);

          for (const std::vector<int64_t>& cuts :
               {std::vector<int64_t>{2}, {1, 3}, {0, 4}, {1, 2, 3}}) {
            std::vector<std::unique_ptr<Stage>> stages;
            std::vector<Microbatch> microbatches;
            for (const StageLayers& layers : cut(config, cuts)) {
              stages.push_back(std::make_unique<Stage>(comm, config, options, layers));
              stages.back()->initialize(3);
              scale_weights(*stages.back());
              microbatches.push_back(stages.back()->make_microbatch());
            }
            double found = 0;
            for (size_t i = 0; i < stages.size(); ++i) {
              if (i > 0) {
                copy({}, stages[i - 1]->output(microbatches[i - 1]),
                     stages[i]->input(microbatches[i]));
              }
              found = stages[i]->forward(batch.tokens, batch.targets, microbatches[i]);
            }
            EXPECT_EQ(found, loss);
            Tensors stage_weights, stage_gradients;
            for (size_t i = stages.size(); i-- > 0;) {
              if (i + 1 < stages.size()) {
                copy({}, stages[i + 1]->residual_gradient(), stages[i]->residual_gradient());
              }
              stages[i]->backward(microbatches[i], 0.1f);
            }
            for (const auto& stage : stages) {
              add_values(*stage, stage->parameters(), stage_weights);
              add_values(*stage, stage->gradients(), stage_gradients);
            }
            EXPECT_EQ(stage_weights, weights);
            EXPECT_EQ(stage_gradients, gradients);
          }
        });
      }
    }
  }
}

TEST(Stage, ReportsEachOfItsElementsOnce) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = moe_stage_model();
  for (const StageLayers& layers : cut(config, {0, 1, 3})) {
    for (const bool is_split : {false, true}) {
      run_threads({}, [&](Communicator& comm) {
        Stage stage(comm, config, {.batch = 1, .seq = 9}, layers);
        Microbatch microbatch = stage.make_microbatch();
        const Batch batch = make_batch(config, 9);
        stage.forward(batch.tokens, batch.targets, microbatch);
        std::vector<int> reports(size_t(stage.parameters().elements()));
        const auto ready = [&](FlatRange range) {
          for (int64_t i = range.begin; i < range.end(); ++i) ++reports[size_t(i)];
        };
        if (is_split) {
          stage.backward_input(microbatch, 1);
          stage.backward_weight(microbatch, ready);
        } else {
          stage.backward(microbatch, 1, ready);
        }
        EXPECT_EQ(std::ranges::count(reports, 1), int64_t(reports.size()));
      });
    }
  }
}

TEST(Stage, BackwardInTwoPassesHasTheBitsOfOne) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  std::vector<ModelConfig> configs = stage_models();
  for (const Variant& variant : kVariants) configs.push_back(stage_model(variant));
  for (const ModelConfig& config : configs) {
    for (const int ranks : {1, 2}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        WorldOptions world;
        world.ranks = ranks;
        run_threads(world, [&](Communicator& comm) {
          set_kernel_threads(1);
          const auto gradients = [&](const std::vector<int>& order) {
            Transformer model(comm, config, {.batch = 2, .seq = 9, .dtype = dtype});
            model.initialize(3);
            scale_weights(model);
            std::vector<Microbatch> microbatches;
            for (uint64_t i = 0; i < 2; ++i) {
              const Batch batch = make_batch(config, 18, i);
              microbatches.push_back(model.make_microbatch());
              model.forward(batch.tokens, batch.targets, microbatches.back());
            }
            for (const int pass : order) {  // 0: whole, 10: input, 20: weight; of a microbatch
              Microbatch& microbatch = microbatches[size_t(pass % 10)];
              if (pass < 10) model.backward(microbatch, 0.1f);
              if (pass / 10 == 1) model.backward_input(microbatch, 0.1f);
              if (pass / 10 == 2) model.backward_weight(microbatch);
            }
            const std::span<float> values = floats(model.gradients());
            return std::vector<float>(values.begin(), values.end());
          };
          const std::vector<float> whole = gradients({0, 1});
          EXPECT_EQ(gradients({10, 20, 11, 21}), whole);
          EXPECT_EQ(gradients({10, 11, 20, 21}), whole);
          EXPECT_EQ(gradients({10, 20, 1}), whole);
          EXPECT_NE(gradients({10, 11, 20}), whole);
        });
      }
    }
  }
}

TEST(Stage, InvalidStagesAndPassesAreRefused) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  ModelConfig config = stage_model(kVariants[0]);
  const auto error_of = [&](const StageLayers& layers) -> std::string {
    std::string text = "no error";
    run_threads({}, [&](Communicator& comm) {
      try {
        const Stage stage(comm, config, {.batch = 1, .seq = 9}, layers);
      } catch (const ConfigError& error) {
        text = error.what();
      }
    });
    return text;
  };
  config.tie_word_embeddings = false;
  EXPECT_THAT(error_of({3, 2}), HasSubstr("stage of layers 3 to 5: expected a range of 0 to 4"));
  EXPECT_THAT(error_of({-1, 2}), HasSubstr("stage of layers -1"));
  EXPECT_EQ(error_of({0, 2, true, false}), "no error");
  config.tie_word_embeddings = true;
  EXPECT_EQ(error_of({0, 2, true, false}), "no error");
  run_threads({}, [&](Communicator& comm) {
    Stage stage(comm, config, {.batch = 1, .seq = 9}, {2, 2, false, true});
    Microbatch microbatch = stage.make_microbatch();
    const Batch batch = make_batch(config, 9);
    const auto add_lookups = [&] {
      stage.backward_embedding(microbatch, stage.residual_gradient());
    };
    EXPECT_THROW(add_lookups(), InvalidArgument);
    stage.forward(batch.tokens, batch.targets, microbatch);
    stage.backward(microbatch, 1);
    EXPECT_THROW(stage.forward(batch.tokens, batch.targets, microbatch), InvalidArgument);
    EXPECT_NO_THROW(add_lookups());
    EXPECT_NO_THROW(stage.forward(batch.tokens, batch.targets, microbatch));
  });
  run_threads({}, [&](Communicator& comm) {
    Transformer model(comm, config, {.batch = 1, .seq = 9});
    Microbatch microbatch = model.make_microbatch();
    EXPECT_THROW(model.backward_input(microbatch, 1), InvalidArgument);
    EXPECT_THROW(model.backward_weight(microbatch), InvalidArgument);
    const Batch batch = make_batch(config, 9);
    model.forward(batch.tokens, batch.targets, microbatch);
    model.backward_input(microbatch, 1);
    EXPECT_THROW(model.forward(batch.tokens, batch.targets, microbatch), InvalidArgument);
    EXPECT_THROW(model.backward(microbatch, 1), InvalidArgument);
    EXPECT_THROW(model.backward_input(microbatch, 1), InvalidArgument);
    EXPECT_NO_THROW(model.backward_weight(microbatch));
    EXPECT_NO_THROW(model.forward(batch.tokens, batch.targets, microbatch));
  });
}

}  // namespace
}  // namespace tandem
