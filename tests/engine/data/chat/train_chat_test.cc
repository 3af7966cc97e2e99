// Training on chats with a loss on answers only, against transformers, on several layouts.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "chat_cases.h"
#include "engine/data/sampler.h"
#include "engine/model/config.h"
#include "tests/engine/data/open_configured.h"
#include "tests/engine/infer/families.h"
#include "tests/engine/train/layouts.h"
#include "tests/engine/train/run_results.h"

namespace tandem {
namespace {

using Json = nlohmann::ordered_json;

/// Three steps of AdamW, each on all chats of the case, from the weights of the case's model.
TrainRequest request_of(const TempDir& dir, const Json& expected, const std::string& name) {
  TrainRequest request;
  TrainConfig& config = request.config;
  request.init = dir / "model";
  request.out = dir / name;
  config.model = model_config_from_json(expected["config"].dump(), "config.json");
  config.train.steps = 3;
  config.train.seq = 208;
  config.train.dtype = "f32";
  config.optimizer.lr = 1e-3;
  config.optimizer.warmup = 0;
  config.optimizer.schedule = "constant";
  config.optimizer.beta2 = 0.95;
  config.optimizer.eps = 1e-6;
  config.optimizer.weight_decay = 0;
  config.optimizer.grad_clip = 0;
  config.parallel.strategy = "serial";
  config.data.paths = {dir / "chats.jsonl"};
  config.data.tokenizer = dir / "model";
  set_chat_keys(config.data);
  config.train.batch =
      Sampler(*open_configured(config), config.train.seq, 1, {{}, true, true}).windows();
  return request;
}

void write_model(const TempDir& dir, const std::string& name, const Json& expected) {
  write_chat_tokenizer(dir / "model", name, expected);
  test::write_folder(dir / "model", expected["config"], DType::f32, 1);
  write_chats(dir / "chats.jsonl", expected);
}

TEST(TrainChat, LossesAndGradientsAreThoseOfTransformers) {
  if (mpi_world) GTEST_SKIP() << "threads";
  const Json cases = chat_cases();
  for (const auto& [name, expected] : cases.items()) {
    if (!expected.contains("losses")) continue;
    const TempDir dir;
    write_model(dir, name, expected);
    struct {
      const char* name;
      int tp, dp, pp, zero;
    } const layouts[] = {
        {"one", 1, 1, 1, 1}, {"tp", 2, 1, 1, 1}, {"pp", 1, 1, 2, 1}, {"zero 2", 1, 2, 1, 2}};
    for (const auto& layout : layouts) {
      SCOPED_TRACE(name + ", " + layout.name);
      TrainRequest request = request_of(dir, expected, layout.name);
      ASSERT_EQ(request.config.train.batch % 2, 0);
      request.config.train.microbatch = request.config.train.batch / 2;
      request.config.parallel.tp = layout.tp;
      request.config.parallel.dp = layout.dp;
      request.config.parallel.pp = layout.pp;
      request.config.parallel.zero = layout.zero;
      run_on_threads(request);
      expect_close(losses(request.out), expected["losses"]);
      expect_close(values_of(request.out, "grad_norm"), expected["grad_norms"]);
    }
  }
}

}  // namespace
}  // namespace tandem
