// Steps that are launched before the tokens of the one before are known give the same texts.
#include <gtest/gtest.h>

#include <vector>

#include "kernels/sample.h"
#include "tests/engine/infer/engine_cases.h"

namespace tandem {
namespace {
using namespace test;

TEST(RunAhead, FedTokensAreThoseOfTheSampledRows) {
  std::vector<Sampled> sampled;
  for (int i = 0; i < 70; ++i) sampled.push_back({i % 9 == 5 ? -1 : 1000 + i, -0.5f});
  std::vector<int32_t> tokens{7, -1, 0, -6, -70, 12, -33};
  const Tensor bytes(sampled.data(), DType::u8,
                     {int64_t(sampled.size()), int64_t(sizeof(Sampled))});
  feed_tokens({}, bytes, host_tensor(tokens));
  EXPECT_EQ(tokens, (std::vector<int32_t>{7, 1000, 0, 0, 1069, 12, 0}));
}

/// Requests of which some share first tokens, read logits, or have contexts that roll.
std::vector<Request> requests_of_all_kinds(uint64_t seed) {
  std::vector<Request> all = random_requests(24, seed, 40, 60);
  Choice choice{seed + 9};
  for (Request& request : all) {
    if (choice.below(3) == 0) {
      request.prompt.insert(request.prompt.begin(), size_t(kPageTokens), int32_t(choice.below(2)));
    }
    if (choice.below(8) == 0) request.rules.frequency_penalty = 1;
    if (choice.below(8) == 0) request.alternatives = 3;
    if (choice.below(8) == 0) request.prompt_alternatives = 1;
    if (choice.below(6) == 0 && request.prompt_alternatives < 0) {
      request.rolls = true, request.max_tokens = 120;
    }
    if (choice.below(2) == 0) request.eos_token_ids = {int32_t(choice.below(256))};
  }
  return all;
}

TEST(RunAhead, TextsAreThoseOfStepsThatWait) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  struct Size {
    int64_t sequences, rows, pages;
  };
  uint64_t seed = 3;
  for (const Variant& variant : kVariants) {
    const ModelConfig config = engine_model(variant);
    const std::vector<Request> requests = requests_of_all_kinds(++seed);
    on_ranks(2, [&](Communicator& tp) {
      int64_t preempted = 0, shared = 0;
      for (const Size& size : {Size{1, 4, 0}, {4, 40, 0}, {4, 30, 5}}) {
        EngineOptions options{.sequences = size.sequences, .rows = size.rows, .pages = size.pages};
        std::vector<std::vector<Written>> texts;
        for (const bool runs_ahead : {false, true}) {
          options.runs_ahead = runs_ahead;
          Engine engine(tp, config, options);
          fill_engine(engine, config, tp);
          texts.push_back(run_all(engine, requests, {seed}));
          const Engine::Stats& stats = engine.stats();
          EXPECT_EQ(stats.ahead > 0, runs_ahead);
          if (!runs_ahead) continue;
          EXPECT_GT(stats.ahead, size.sequences == 1 ? stats.steps / 3 : 0);
          preempted += stats.preempted, shared += stats.shared_tokens;
        }
        for (size_t i = 0; rows_keep_bits() && i < requests.size(); ++i) {
          EXPECT_TRUE(texts[0][i] == texts[1][i])
              << variant.name << ", request " << i << ", " << size.sequences << " at once";
        }
      }
      EXPECT_GT(preempted, 0);
      EXPECT_TRUE(shared > 0 || config.window(0) > 0);
    });
  }
}

}  // namespace
}  // namespace tandem
