// Generation on GPU ranks: in f32 the texts of CPU ranks, for any batch, chunks, preemption and
// number of ranks; in bf16 the same bits in any batch, where asked for.
#include "engine/infer/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/infer/rank_model.h"
#include "gemm/cuda/rows_gemm.h"
#include "tandem/error.h"
#include "tests/engine/infer/engine_cases.h"
#include "tests/gpu/gpu_ranks.h"

namespace tandem::test {
namespace {

/// Sizes that 1, 2, 3 and 4 GPU ranks divide.
ModelConfig gpu_engine_model(const Variant& variant) {
  ModelConfig config = engine_model(variant);
  config.vocab = 288;
  config.hidden = 64;
  config.head_dim = 16;
  config.heads = 24;
  config.kv_heads = 6 * variant.kv_heads;
  if (config.kv_heads % 12 != 0) config.kv_heads = 12;
  config.ffn = 96;
  return config;
}

std::vector<Written> on_one_cpu_rank(const ModelConfig& config,
                                     const std::vector<Request>& requests) {
  std::vector<Written> texts;
  run_threads({}, [&](Communicator& tp) {
    Engine engine(tp, config, {.sequences = 1, .rows = 64});
    fill_engine(engine, config, tp);
    for (const Request& request : requests) texts.push_back(run_all(engine, {request}, {1})[0]);
  });
  return texts;
}

/// Sums in another order move log-probabilities a little, and seldom choose another token: then the
/// rest of the text is another one. Expects that of one request at most.
void expect_texts(const std::vector<Written>& found, const std::vector<Written>& expected,
                  const std::string& what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  std::vector<size_t> others;
  for (size_t i = 0; i < found.size(); ++i) {
    const std::vector<int32_t>&a = found[i].tokens, &b = expected[i].tokens;
    const auto equal = size_t(std::ranges::mismatch(a, b).in1 - a.begin());
    for (size_t j = 0; j < equal; ++j) {
      EXPECT_NEAR(found[i].log_probs[j], expected[i].log_probs[j], 1e-3)
          << what << ", request " << i << " token " << j;
    }
    if (a != b) {
      others.push_back(i);
      continue;
    }
    EXPECT_EQ(found[i].text, expected[i].text) << what << ", request " << i;
    EXPECT_EQ(found[i].finish, expected[i].finish) << what << ", request " << i;
  }
  EXPECT_LE(others.size(), 1u) << what << ": other texts, first of request "
                               << (others.empty() ? 0 : others[0]);
}

class GpuEngine : public OnGpus {
 protected:
  void on_gpus(const std::function<void(Communicator&)>& body) const {
    run_gpus({ranks(), {}, 60, ranks_per_gpu(ranks())}, body);
  }
};

/// Prompts of mixed lengths; some requests have rules, or ask for other likely tokens.
std::vector<Request> mixed_requests(uint64_t seed) {
  std::vector<Request> requests = random_requests(12, seed, 100, 90);
  for (size_t i = 0; i < requests.size(); ++i) {
    if (i % 3 != 0) requests[i].eos_token_ids = {-1};  // the others end at one of 32 tokens
  }
  for (size_t i = 0; i < requests.size(); i += 4) {
    requests[i].rules.frequency_penalty = 0.5;
    requests[i].rules.biases = {{7, -100}};
    requests[i].alternatives = 3;
  }
  requests[1].prompt.resize(1);
  requests[2].prompt = random_requests(1, seed + 1, 1, 1)[0].prompt;
  requests[2].prompt.resize(150, 65);
  return requests;
}

TEST_P(GpuEngine, TextsInF32AreThoseOfCpuRanksForAnyBatch) {
  struct Size {
    int64_t sequences, rows, pages;
  };
  const Size sizes[] = {{1, 1, 0}, {3, 50, 4}, {7, 7, 5}, {12, 12, 8}, {64, 300, 0}};
  int64_t preempted = 0;
  size_t first = 0;  // each variant has two of the sizes
  for (const Variant& variant : kVariants) {
    const ModelConfig config = gpu_engine_model(variant);
    const std::vector<Request> requests = mixed_requests(2);
    const std::vector<Written> expected = on_one_cpu_rank(config, requests);
    std::set<Finish> finishes;
    for (const Written& each : expected) finishes.insert(*each.finish);
    EXPECT_GE(finishes.size(), 2u) << "stop strings and token counts";
    on_gpus([&](Communicator& tp) {
      for (const size_t i : {first, first + 2}) {
        const Size& size = sizes[i % std::size(sizes)];
        Engine engine(tp, config,
                      {.sequences = size.sequences, .rows = size.rows, .pages = size.pages});
        fill_engine(engine, config, tp);
        expect_texts(run_all(engine, requests, {uint64_t(size.rows)}), expected,
                     fmt::format("{} of {}, {} at once, {} rows", variant.name, tp.size(),
                                 size.sequences, size.rows));
        if (tp.rank() == 0) preempted += engine.stats().preempted;
      }
    });
    ++first;
  }
  EXPECT_GT(preempted, 0) << "no case runs out of pages";
}

TEST_P(GpuEngine, CancelledRequestsEndAndOthersKeepTheirTexts) {
  const ModelConfig config = gpu_engine_model(kVariants[0]);
  const std::vector<Request> requests = mixed_requests(3);
  const std::vector<Written> expected = on_one_cpu_rank(config, requests);
  on_gpus([&](Communicator& tp) {
    Engine engine(tp, config, {.sequences = 5, .rows = 9, .pages = 12});
    fill_engine(engine, config, tp);
    for (const Request& request : requests) engine.submit(request);
    std::vector<Written> texts(requests.size());
    std::set<int64_t> cancelled;
    for (int64_t step = 0; !engine.is_idle(); ++step) {
      for (const TokenEvent& event : engine.step()) {
        EXPECT_FALSE(cancelled.contains(event.request));
        texts[size_t(event.request)].add(event);
      }
      if (step % 7 != 0 || step / 7 * 2 >= 12) continue;
      const int64_t id = step / 7 * 2;  // running, waiting or finished
      if (engine.cancel(id)) cancelled.insert(id);
      EXPECT_FALSE(engine.cancel(id));
    }
    EXPECT_GE(cancelled.size(), 3u);
    std::vector<Written> found, of_cpu;
    for (size_t i = 0; i < requests.size(); ++i) {
      if (cancelled.contains(int64_t(i))) continue;
      found.push_back(texts[i]);
      of_cpu.push_back(expected[i]);
    }
    expect_texts(found, of_cpu, "others");
    EXPECT_EQ(engine.free_pages(), engine.num_pages());
  });
}

// A few rows of bf16 (one or two on Hopper) are multiplied by a kernel whose rows do not depend on
// each other, and sums of two ranks have one order. A prompt of one token is a chunk in any batch.
// Prompts are divided and shared, and texts preempted, in every way.
TEST_P(GpuEngine, BatchInvariantBitsInBf16DoNotDependOnTheBatch) {
  ModelConfig config = gpu_engine_model(kVariants[0]);
  config.head_dim = 64, config.heads = config.kv_heads = 4, config.ffn = 256;
  const auto options = [](int64_t sequences, int64_t rows, int64_t pages) {
    return EngineOptions{.dtype = DType::bf16,
                         .sequences = sequences,
                         .rows = rows,
                         .pages = pages,
                         .batch_invariant = true};
  };
  if (config.heads % ranks() != 0) GTEST_SKIP() << "heads that the ranks do not divide";
  if (ranks() > 1 || gpu::max_gemm_rows() < kMaxFewRows) {
    on_gpus([&](Communicator& tp) {
      EXPECT_THROW(Engine(tp, config, options(2, 16, 0)), Unsupported);
    });
    return;
  }
  std::vector<Request> requests = mixed_requests(5);
  requests[5].prompt = requests[6].prompt = requests[2].prompt;
  requests[6].prompt.push_back(9);
  on_gpus([&](Communicator& tp) {
    EXPECT_THROW(Engine(tp, config, options(65, 65, 0)), Unsupported);
    Engine alone(tp, config, options(1, 1, 0));
    fill_engine(alone, config, tp);
    std::vector<Written> expected;
    for (const Request& request : requests) expected.push_back(run_all(alone, {request}, {1})[0]);
    struct Size {
      int64_t sequences, rows, pages;
    };
    int64_t preempted = 0, shared = 0;
    for (const Size& size :
         {Size{2, 2, 4}, {5, 17, 6}, {9, 64, 5}, {12, 100, 0}, {12, 300, 9}, {64, 1000, 0}}) {
      Engine engine(tp, config, options(size.sequences, size.rows, size.pages));
      fill_engine(engine, config, tp);
      const std::vector<Written> all = run_all(engine, requests, {uint64_t(size.rows)});
      for (size_t i = 0; i < all.size(); ++i) {
        EXPECT_TRUE(all[i] == expected[i])
            << "request " << i << ", " << size.sequences << " at once, " << size.rows << " rows";
      }
      preempted += engine.stats().preempted;
      shared += engine.stats().shared_tokens;
    }
    EXPECT_GT(preempted, 0);
    EXPECT_GT(shared, 0);
  });
}

TEST_P(GpuEngine, StepsThatRunAheadKeepTheBitsOfThoseThatWait) {
  ModelConfig config = gpu_engine_model(kVariants[0]);
  config.head_dim = 64, config.heads = config.kv_heads = 4, config.ffn = 256;
  if (ranks() > 1 || gpu::max_gemm_rows() < kMaxFewRows) {
    GTEST_SKIP() << "needs one Hopper GPU, where bits do not depend on the batch";
  }
  std::vector<Request> requests = random_requests(12, 9, 60, 70);
  for (size_t i = 0; i < requests.size(); i += 2) requests[i].eos_token_ids = {-1};
  on_gpus([&](Communicator& tp) {
    for (const auto& [sequences, pages] : {std::pair<int64_t, int64_t>{1, 0}, {5, 7}, {12, 0}}) {
      std::vector<Written> expected;
      for (const bool runs_ahead : {false, true}) {
        Engine engine(tp, config,
                      {.dtype = DType::bf16,
                       .sequences = sequences,
                       .rows = 64,
                       .pages = pages,
                       .batch_invariant = true,
                       .runs_ahead = runs_ahead});
        fill_engine(engine, config, tp);
        const std::vector<Written> texts = run_all(engine, requests, {64});
        EXPECT_EQ(engine.stats().ahead > 0, runs_ahead) << sequences;
        EXPECT_EQ(engine.free_pages(), engine.num_pages());
        if (!runs_ahead) expected = texts;
        for (size_t i = 0; i < texts.size(); ++i) {
          EXPECT_TRUE(texts[i] == expected[i])
              << "request " << i << ", " << sequences << " at once";
        }
      }
    }
  });
}

TEST_P(GpuEngine, FullStepsOfAnyNumberOfRowsHaveTheTextsOfCpuRanks) {
  ModelConfig config = gpu_engine_model(kVariants[4]);  // has a window
  config.max_seq = 2400;
  std::vector<Request> requests = random_requests(5, 7, 40, 8);
  for (size_t i = 0; const int64_t length : {2300, 900, 1, 700, 1100}) {
    requests[i++].prompt = random_requests(1, uint64_t(length), 1, 1)[0].prompt;
    for (int64_t j = 1; j < length; ++j) {
      requests[i - 1].prompt.push_back(int32_t((j * j + length) % 251));
    }
  }
  const std::vector<Written> expected = on_one_cpu_rank(config, requests);
  on_gpus([&](Communicator& tp) {
    for (const int64_t rows : {513, 1025, 2049, 2048}) {
      for (const Strategy strategy : {Strategy::serial, Strategy::automatic}) {
        Engine engine(tp, config, {.sequences = 5, .rows = rows, .overlap = {strategy, 0}});
        fill_engine(engine, config, tp);
        std::vector<Written> texts(requests.size());
        for (const Request& request : requests) engine.submit(request);
        while (!engine.is_idle()) {
          for (const TokenEvent& event : engine.step()) {
            texts[size_t(event.request)].add(event);
          }
        }
        expect_texts(texts, expected,
                     fmt::format("{} rows of {}, {}", rows, tp.size(), name_of(strategy)));
      }
    }
  });
}

TEST_P(GpuEngine, LateRankIsNamedByTheOthers) {
  if (ranks() == 1) GTEST_SKIP() << "needs another rank";
  ModelConfig config = gpu_engine_model(kVariants[0]);
  config.max_seq = 800;
  struct Step {
    const char* name;
    int64_t prompt, rows;
    int steps;  ///< before the late one
  };
  const Step kinds[] = {
      {"a prompt", 100, 64, 0}, {"a full step of prompts", 700, 640, 0}, {"a token", 20, 64, 9}};
  for (const Step& kind : kinds) {
    SCOPED_TRACE(kind.name);
    const auto late = timeout_without_last([&](gpu::GpuCommunicator& tp) -> std::function<void()> {
      auto engine =
          std::make_shared<Engine>(tp, config, EngineOptions{.sequences = 4, .rows = kind.rows});
      fill_engine(*engine, config, tp);
      engine->submit({.prompt = std::vector<int32_t>(size_t(kind.prompt), 65),
                      .max_tokens = 50,
                      .eos_token_ids = {-1}});
      for (int i = 0; i < kind.steps; ++i) engine->step();
      return [engine] { engine->step(); };
    });
    EXPECT_TRUE(late);
  }
}

/// Logits after the last tokens of two prompts in a step of `rows` of at most `max_rows` rows, of
/// which the last ones are the second's.
std::vector<float> logits_of_step(Communicator& tp, const ModelConfig& config, int64_t max_rows,
                                  int64_t rows, Strategy strategy) {
  constexpr int64_t second = 65;
  const int64_t line = pages_of(config.max_seq);
  RankModel model(tp, config, DType::f32, {2 * line, 2, max_rows, config.max_seq, 2}, {});
  fill_engine(model, config, tp);
  Decoder decoder(model.context, max_rows, 2, {.overlap = {strategy, 0}});
  std::vector<float> all;
  for (int step = 0; step < 2; ++step) {  // the second one overwrites the same tokens
    StepRows batch;
    for (int64_t i = 0; i < rows; ++i) {
      const bool of_second = i >= rows - second;
      batch.tokens.push_back(int32_t((i * i + 3 * i) % config.vocab));
      batch.sequences.push_back(of_second ? 1 : 0);
      batch.positions.push_back(int32_t(of_second ? i - (rows - second) : i));
    }
    for (int64_t page = 0; page < 2 * line; ++page) batch.pages.push_back(int32_t(page));
    batch.chunks = {{0, rows - second}, {rows - second, second}};
    batch.chosen = {int32_t(rows - second - 1), int32_t(rows - 1)};
    batch.options.resize(2);
    decoder.run(batch);
    for (const size_t chosen : {0, 1}) {
      const std::vector<float> logits = decoder.read_logits(chosen);
      all.insert(all.end(), logits.begin(), logits.end());
    }
  }
  return all;
}

TEST_P(GpuEngine, StepsOfRowsThatRanksDoNotDivideHaveTheLogitsOfCpuRanks) {
  for (const Variant& variant : {kVariants[0], kVariants[3]}) {
    ModelConfig config = gpu_engine_model(variant);
    config.max_seq = 2100;
    struct Rows {
      int64_t max, count;
    };
    for (const Rows& rows :
         {Rows{513, 513}, {513, 490}, {1025, 1025}, {2049, 2049}, {2049, 1999}}) {
      std::vector<float> expected;
      run_threads({}, [&](Communicator& tp) {
        expected = logits_of_step(tp, config, rows.max, rows.count, Strategy::serial);
      });
      double largest = 0;
      for (const float logit : expected) largest = std::max(largest, double(std::abs(logit)));
      on_gpus([&](Communicator& tp) {
        for (const Strategy strategy : {Strategy::serial, Strategy::automatic}) {
          const std::vector<float> found =
              logits_of_step(tp, config, rows.max, rows.count, strategy);
          ASSERT_EQ(found.size(), expected.size());
          double worst = 0;
          for (size_t i = 0; i < found.size(); ++i) {
            const double error = std::abs(double(found[i]) - double(expected[i]));
            worst = std::isnan(error) ? INFINITY : std::max(worst, error);
          }
          EXPECT_LE(worst, 2e-4 * largest)
              << variant.name << ", " << rows.count << " of " << rows.max << " rows, " << tp.size()
              << " ranks, " << name_of(strategy);
        }
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Gpus, GpuEngine, ::testing::Values(1, 2, 3, 4), gpus_name);

}  // namespace
}  // namespace tandem::test
