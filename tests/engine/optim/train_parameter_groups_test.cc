// Weight decay and learning rates by pattern.
#include <gtest/gtest.h>

#include "core/formats/safetensors.h"
#include "engine/data/corpus.h"
#include "engine/model/layout.h"
#include "engine/model/parameter_patterns.h"
#include "engine/optim/optimizer.h"
#include "engine/parallel/sharded/sharded_optimizer.h"
#include "engine/train/trainer.h"
#include "tandem/random.h"
#include "tests/engine/train/sample_text.h"
#include "tests/engine/train/temp_dir.h"
#include "tests/flat.h"

namespace tandem {
namespace {

TEST(ParameterGroups, PatternsSetDecayAndLearningRateOfWhatTheyMatch) {
  TrainConfig config;
  config.optimizer.no_decay = {"model.embed_tokens.weight", "*.down_proj.*"};
  config.optimizer.lr_scale = {"*layers.0.*=0.5", "model.norm.weight=0"};
  std::vector<Parameter> list = ModelLayout(config.model, 1, 0).parameters;
  apply_patterns(config.optimizer.no_decay, config.optimizer.lr_scale, list);
  for (const Parameter& p : list) {
    const auto has = [&](const char* text) { return p.name.find(text) != std::string::npos; };
    EXPECT_EQ(p.decay, !has("norm") && !has("embed_tokens") && !has("down_proj")) << p.name;
    EXPECT_EQ(p.lr_scale, has("layers.0.")                ? 0.5f
                          : p.name == "model.norm.weight" ? 0
                                                          : 1)
        << p.name;
  }
}

constexpr int64_t kCount = 40;

/// Weights after a step of a tensor with the given properties, next to one without any.
std::vector<float> updated(bool is_lamb, float lr, float lr_scale, bool decay) {
  std::vector<float> w(2 * kCount), g(w.size());
  for (size_t i = 0; i < w.size(); ++i) w[i] = normal(1, 1, i), g[i] = normal(1, 2, i);
  const std::vector<Parameter> list{{"a", {1, kCount}, {0, 0, 1}, 0, kCount, decay, 1, lr_scale},
                                    {"b", {1, kCount}, {0, 0, 1}, kCount, kCount}};
  WorldOptions options;
  options.ranks = 2;
  run_threads(options, [&](Communicator& comm) {
    std::vector<float> weights = w, gradients = g;
    for (float& x : gradients) x /= 2;
    std::vector<ParameterGroup> groups{{comm, {0, 2 * kCount}, list}};
    ShardedOptimizerOptions sharded;
    sharded.optimizer = find_optimizer(is_lamb ? "lamb" : "adamw");
    sharded.norm_axes = {&comm};
    ShardedOptimizer optimizer({}, flat(weights), flat(gradients), groups, 30, sharded);
    optimizer.ready({0, 2 * kCount});
    optimizer.reduce();
    optimizer.update(AdamStep::make({}, 0, lr, 0));
    optimizer.await_all();
    if (comm.rank() == 0) w = weights;
  });
  w.resize(kCount);
  return w;
}

TEST(ParameterGroups, BothOptimizersScaleTheLearningRateAndSkipDecay) {
  for (const bool is_lamb : {false, true}) {
    EXPECT_EQ(updated(is_lamb, 0.02f, 0.5f, true), updated(is_lamb, 0.01f, 1, true));
    EXPECT_EQ(updated(is_lamb, 0.02f, 0, true), updated(is_lamb, 0, 1, true));
    EXPECT_NE(updated(is_lamb, 0.02f, 1, true), updated(is_lamb, 0.01f, 1, true));
    EXPECT_NE(updated(is_lamb, 0.02f, 1, true), updated(is_lamb, 0.02f, 1, false));
  }
}

TEST(ParameterGroups, TrainingLeavesFrozenTensorsAsTheyWere) {
  const TempDir dir;
  std::vector<SafetensorsFile> models;
  for (const char* steps : {"train.steps=1", "train.steps=4"}) {
    TrainRequest request;
    const std::vector<std::string> overrides{
        "train.seq=16", steps, "optimizer.lr_scale={\"*embed_tokens*\" = 0, \"*layers.1.*\" = 0}"};
    request.config =
        load_config(TANDEM_SOURCE_DIR "/configs/tiny.toml", with_sample_text(overrides));
    request.config.parallel.tp = request.config.parallel.dp = 2;
    request.out = dir / steps;
    check_config(request.config);
    const Corpus corpus(request.config.data.paths, 0);
    WorldOptions options;
    options.ranks = 4;
    run_threads(options, [&](Communicator& comm) { train(comm, request, corpus); });
    models.emplace_back(request.out + "/final/model.safetensors");
  }
  const ModelConfig model = load_config(TANDEM_SOURCE_DIR "/configs/tiny.toml", {}).model;
  for (const Parameter& p : ModelLayout(model, 1, 0).parameters) {
    std::vector<float> values[2];
    for (size_t i = 0; i < 2; ++i) {
      int64_t count = 1;
      for (const int64_t dim : p.shape) count *= dim;
      values[i].resize(size_t(count));
      models[i].read_f32(models[i].require(p.name, p.shape), 0, values[i]);
    }
    const bool frozen = p.name.find("embed_tokens") != std::string::npos ||
                        p.name.find("layers.1.") != std::string::npos;
    EXPECT_EQ(values[0] == values[1], frozen) << p.name;
  }
}

}  // namespace
}  // namespace tandem
