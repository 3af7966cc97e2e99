// Many requests at once give each the tokens that it has with no other, bit for bit, for any number
// of ranks, rows and pages.
#include "engine/infer/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tandem/error.h"
#include "tests/engine/infer/engine_cases.h"
#include "tests/engine/infer/fed_text.h"

namespace tandem {
namespace {
using namespace tandem::test;

std::vector<Variant> engine_variants() {
  std::vector<Variant> all(std::begin(kVariants), std::end(kVariants));
  all.push_back({"experts", true, false, 4});
  return all;
}

class EngineTest : public ::testing::TestWithParam<Variant> {};
INSTANTIATE_TEST_SUITE_P(Variants, EngineTest, ::testing::ValuesIn(engine_variants()),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_P(EngineTest, OneRequestHasTheTokensOfItsLogits) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = engine_model(GetParam());
  const std::vector<Request> requests = random_requests(3, 1, 90, 40);
  for (const int ranks : {1, 2, 4}) {
    if (config.kv_heads % ranks != 0) continue;
    on_ranks(ranks, [&](Communicator& tp) {
      const std::vector<Written> all = run_separately(tp, config, DType::f32, {}, requests);
      FedText text(tp, config);
      fill_engine(text, config, tp);
      for (size_t i = 0; i < requests.size(); ++i) {
        EXPECT_EQ(text.write(requests[i], all[i].tokens.size()), all[i].tokens)
            << "request " << i << ", tp " << ranks;
      }
    });
  }
}

TEST_P(EngineTest, TokensDoNotDependOnOtherRequests) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  if (!rows_keep_bits()) GTEST_SKIP() << "a GEMM's rows depend on their number";
  const ModelConfig config = engine_model(GetParam());
  const std::vector<Request> requests = random_requests(12, 2, 100, 90);
  struct Size {
    int64_t sequences, rows, pages, mixed_rows = 0;
  };
  const Size sizes[] = {{2, 2, 4}, {3, 50, 6}, {7, 7, 7}, {64, 300, 0}, {5, 80, 6, 9}};
  for (const int ranks : {1, 2, 4}) {
    if (config.kv_heads % ranks != 0) continue;
    on_ranks(ranks, [&](Communicator& tp) {
      const DType dtype = ranks == 2 ? DType::bf16 : DType::f32;
      const CodecPolicy codec = CodecPolicy::parse(
          ranks == 4 && config.experts == 0 ? "attention=int8,mlp=int4:g32" : "none");
      const auto expected = run_separately(tp, config, dtype, codec, requests);
      std::set<Finish> finishes;
      for (const Written& each : expected) finishes.insert(*each.finish);
      EXPECT_GE(finishes.size(), 2u) << "stop strings and token counts";
      int64_t preempted = 0;
      for (const Size& size : sizes) {
        Engine engine(tp, config,
                      {.dtype = dtype,
                       .sequences = size.sequences,
                       .rows = size.rows,
                       .mixed_rows = size.mixed_rows,
                       .pages = size.pages,
                       .codec = codec});
        fill_engine(engine, config, tp);
        const auto all = run_all(engine, requests, {uint64_t(size.rows)});
        for (size_t i = 0; i < all.size(); ++i) {
          EXPECT_TRUE(all[i] == expected[i])
              << "request " << i << ", tp " << ranks << ", " << size.sequences << " at once";
        }
        preempted += engine.stats().preempted;
      }
      EXPECT_GT(preempted, 0) << "no case runs out of pages";
    });
  }
}

TEST(Engine, StepsThatWriteTokensHaveAtMostMixedRows) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = engine_model(kVariants[0]);
  on_ranks(1, [&](Communicator& tp) {
    Engine engine(tp, config, {.sequences = 4, .rows = 60, .mixed_rows = 10});
    fill_engine(engine, config, tp);
    const auto rows_of_step = [&] {
      const int64_t before = engine.stats().rows;
      engine.step();
      return engine.stats().rows - before;
    };
    const auto submit = [&](size_t tokens) {
      engine.submit(
          {.prompt = std::vector<int32_t>(tokens, 1), .max_tokens = 50, .eos_token_ids = {-1}});
    };
    submit(100);
    EXPECT_EQ(rows_of_step(), 60) << "no text is written yet";
    EXPECT_EQ(rows_of_step(), 40);
    submit(30);
    for (const int64_t rows : {10, 10, 10, 4}) EXPECT_EQ(rows_of_step(), rows);
    EXPECT_EQ(rows_of_step(), 2) << "both are written";
  });
}

TEST(Engine, PromptScoresDoNotDependOnSteps) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = engine_model(kVariants[0]);
  std::vector<Request> requests = random_requests(4, 8, 1, 1);
  for (size_t i = 0; i < requests.size(); ++i) {
    Choice choice{i};
    Request& request = requests[i];
    for (int j = 0; j < 100; ++j) request.prompt.push_back(int32_t(choice.below(256)));
    request.stops = {}, request.eos_token_ids = {-1}, request.max_tokens = 60;
    request.prompt_alternatives = int64_t(i);
  }
  on_ranks(2, [&](Communicator& tp) {
    const auto run = [&](const EngineOptions& options, bool is_preempted) {
      Engine engine(tp, config, options);
      fill_engine(engine, config, tp);
      for (const Request& request : requests) engine.submit(request);
      std::vector<std::vector<TokenScore>> scores(requests.size());
      while (!engine.is_idle()) {
        for (TokenEvent& event : engine.step()) {
          auto& of_prompt = scores[size_t(event.request)];
          EXPECT_TRUE(of_prompt.empty() || event.prompt.empty()) << "with the first event only";
          if (!event.prompt.empty()) of_prompt = std::move(event.prompt);
        }
      }
      EXPECT_EQ(engine.stats().preempted > 0, is_preempted);
      return scores;
    };
    const auto whole = run({.sequences = 4, .rows = 500}, false);
    const auto divided = run({.sequences = 3, .rows = 7, .pages = 5}, true);
    for (size_t i = 0; i < requests.size(); ++i) {
      ASSERT_EQ(whole[i].size(), requests[i].prompt.size() - 1);
      ASSERT_EQ(divided[i].size(), whole[i].size());
      for (size_t j = 0; j < whole[i].size(); ++j) {
        const TokenScore &a = whole[i][j], &b = divided[i][j];
        EXPECT_EQ(a.log_prob, b.log_prob) << i << " " << j;
        EXPECT_EQ(a.rank, b.rank);
        ASSERT_EQ(a.likeliest.size(), i);
        const bool is_likeliest = i > 0 && a.likeliest[0].log_prob == a.log_prob;
        EXPECT_EQ(is_likeliest, i > 0 && a.rank == 1);
      }
    }
  });
}

TEST(Engine, RulesChangeOnlyTheirRequest) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = engine_model(kVariants[0]);
  std::vector<Request> requests = random_requests(9, 6, 60, 40);
  for (Request& request : requests) request.stops = {}, request.max_tokens = 30;
  on_ranks(2, [&](Communicator& tp) {
    const auto without_rules = run_separately(tp, config, DType::f32, {}, requests);
    std::vector<Request> changed = requests;
    for (size_t i = 0; i < changed.size(); i += 2) {
      changed[i].rules.biases = {{without_rules[i].tokens[0], -100}};
      changed[i].rules.frequency_penalty = 2;
      changed[i].rules.min_p = i % 4 == 0 ? 0.1 : 0;
      changed[i].alternatives = 3;
    }
    const auto expected = run_separately(tp, config, DType::f32, {}, changed);
    Engine engine(tp, config, {.sequences = 5, .rows = 40, .pages = 7});
    fill_engine(engine, config, tp);
    const auto all = run_all(engine, changed, {8});
    for (size_t i = 0; i < all.size(); ++i) {
      EXPECT_TRUE(all[i] == expected[i]) << "request " << i;
      if (i % 2 == 1) {
        EXPECT_TRUE(all[i] == without_rules[i]) << "request " << i << " has no rules";
      } else {
        EXPECT_EQ(std::ranges::count(all[i].tokens, without_rules[i].tokens[0]), 0) << i;
      }
    }
  });
}

TEST(Engine, CancelledRequestsEndAndOthersKeepTheirTokens) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = engine_model(kVariants[0]);
  const std::vector<Request> requests = random_requests(12, 3, 100, 60);
  on_ranks(2, [&](Communicator& tp) {
    const auto expected = run_separately(tp, config, DType::f32, {}, requests);
    Engine engine(tp, config, {.sequences = 5, .rows = 9, .pages = 12});
    fill_engine(engine, config, tp);
    for (const Request& request : requests) engine.submit(request);
    std::vector<std::vector<int32_t>> tokens(requests.size());
    std::set<int64_t> cancelled;
    for (int64_t step = 0; !engine.is_idle(); ++step) {
      for (const TokenEvent& event : engine.step()) {
        EXPECT_FALSE(cancelled.contains(event.request));
        tokens[size_t(event.request)].push_back(event.token);
      }
      if (step % 7 != 0 || step / 7 * 2 >= 12) continue;
      const int64_t id = step / 7 * 2;  // running, waiting or finished
      if (tokens[size_t(id)].size() < expected[size_t(id)].tokens.size()) cancelled.insert(id);
      engine.cancel(id);
      engine.cancel(id);
    }
    engine.cancel(99);
    EXPECT_GE(cancelled.size(), 3u);
    for (size_t i = 0; i < requests.size(); ++i) {
      if (cancelled.contains(int64_t(i))) continue;
      EXPECT_EQ(tokens[i], expected[i].tokens);
    }
    EXPECT_EQ(engine.free_pages(), engine.num_pages());
  });
}

TEST(Engine, WithItsDefaultPagesAllTextsAreWrittenInEachStep) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = engine_model(kVariants[0]);
  on_ranks(1, [&](Communicator& tp) {
    Engine engine(tp, config, {.capacity = 40, .sequences = 5, .rows = 20});
    fill_engine(engine, config, tp);
    for (int i = 0; i < 5; ++i) {
      engine.submit({.prompt = {1, 2, 3, i}, .max_tokens = 30, .eos_token_ids = {-1}});
    }
    for (int step = 0; step < 30; ++step) EXPECT_EQ(engine.step().size(), 5u) << step;
    EXPECT_TRUE(engine.is_idle());
    EXPECT_EQ(engine.stats().preempted, 0);
  });
}

TEST(Engine, TextsWithWindowsTakePagesForTheirWindowsOnly) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  if (!rows_keep_bits()) GTEST_SKIP() << "a GEMM's rows depend on their number";
  ModelConfig base = engine_model(kVariants[1]);
  base.max_seq = 700;
  std::vector<Request> requests = random_requests(3, 6, 90, 1);
  requests[1].prompt = random_requests(1, 7, 1, 1)[0].prompt;
  for (int i = 0; i < 400; ++i) requests[1].prompt.push_back(i % 256);
  for (Request& request : requests) {
    request.max_tokens = 150;
    request.stops = {};
    request.eos_token_ids = {-1};
  }
  struct Case {
    int64_t window, rows, sequences, pages;
  };
  // Pages of one text: those of window + rows - 1 consecutive tokens.
  const Case cases[] = {{1, 3, 1, 2}, {4, 9, 1, 2},    {65, 8, 1, 3}, {64, 64, 1, 3},
                        {4, 9, 3, 3}, {130, 20, 3, 5}, {65, 8, 3, 0}};
  for (const int ranks : {1, 2}) {
    on_ranks(ranks, [&](Communicator& tp) {
      int64_t preempted = 0;
      for (const Case& c : cases) {
        ModelConfig config = base;
        config.sliding_window = c.window;
        FedText text(tp, config);  // keeps all pages
        fill_engine(text, config, tp);
        Engine engine(tp, config, {.sequences = c.sequences, .rows = c.rows, .pages = c.pages});
        fill_engine(engine, config, tp);
        EXPECT_EQ(engine.num_pages(), c.pages > 0 ? c.pages : 3 * 3);
        const auto all = run_all(engine, requests, {uint64_t(c.rows)});
        for (size_t i = 0; i < requests.size(); ++i) {
          EXPECT_EQ(text.write(requests[i], 150), all[i].tokens)
              << "request " << i << ", window " << c.window << ", tp " << ranks;
        }
        preempted += engine.stats().preempted;
      }
      EXPECT_GT(preempted, 0) << "no case runs out of pages";
    });
  }
}

TEST(Engine, InvalidRequestsAreRefused) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = engine_model(kVariants[0]);
  on_ranks(1, [&](Communicator& tp) {
    Engine engine(tp, config, {.sequences = 2, .rows = 4, .pages = 2});
    const auto refuses = [&](const Request& request, const std::string& words) {
      try {
        engine.submit(request);
        ADD_FAILURE() << words << ": accepted";
      } catch (const InvalidArgument& error) {
        EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
      }
    };
    refuses({.prompt = {}}, "tokens: expected at least one");
    refuses({.prompt = {1, 257}}, "tokens: 257 at position 1: expected 0 to 256");
    refuses({.prompt = {1}, .max_tokens = 0}, "max_tokens 0: expected at least 1");
    refuses({.prompt = std::vector<int32_t>(200, 1)}, "prompt of 200 tokens: expected fewer");
    refuses({.prompt = std::vector<int32_t>(120, 1), .max_tokens = 30},
            "request of 149 tokens: expected at most 128");
    refuses({.prompt = {1}, .sampling = {.top_p = 0}}, "top_p 0");
    refuses({.prompt = {1}, .stops = {""}}, "stop ''");
    EXPECT_TRUE(engine.is_idle());
    EXPECT_THROW(Engine(tp, config, {.sequences = 0}), InvalidArgument);
    EXPECT_THROW(Engine(tp, config, {.sequences = 8, .rows = 7}), InvalidArgument);
    EXPECT_THROW(Engine(tp, config, {.sequences = 8, .rows = 9, .mixed_rows = 10}),
                 InvalidArgument);
    EXPECT_THROW(Engine(tp, config, {.pages = -1}), InvalidArgument);
    EXPECT_THROW(Engine(tp, config, {.capacity = 201}), InvalidArgument);
  });
}

TEST(Engine, AModelWhoseCacheDoesNotFitIsRefusedOnAllRanks) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = engine_model(kVariants[0]);
  std::mutex mutex;
  std::set<std::string> errors;
  on_ranks(2, [&](Communicator& tp) {
    try {
      const Engine engine(tp, config, {.pages = int64_t{1} << 36});
      ADD_FAILURE() << "accepted";
    } catch (const InvalidArgument& error) {
      const std::lock_guard lock(mutex);
      errors.insert(error.what());
    }
  });
  ASSERT_EQ(errors.size(), 1u);
  const std::string& error = *errors.begin();
  EXPECT_NE(error.find("weights of "), std::string::npos) << error;
  // Two layers of keys and values of 24 features each.
  EXPECT_NE(error.find("of 4398046511104 tokens of 1.69e+06 GB: expected at most the "),
            std::string::npos)
      << error;
}

TEST(EngineLong, ThreeThousandRandomRequestsLoseNoPage) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = engine_model(kVariants[1]);
  const std::vector<Request> requests = random_requests(3000, 4, 90, 110);
  for (const int ranks : {1, 2}) {
    on_ranks(ranks, [&](Communicator& tp) {
      Engine engine(tp, config, {.sequences = 64, .rows = 96, .pages = 40});
      fill_engine(engine, config, tp);
      const auto all = run_all(engine, requests, {5});
      EXPECT_GT(engine.stats().preempted, 100);
      const auto expected = run_separately(tp, config, DType::f32, {}, requests);
      for (size_t i = 0; rows_keep_bits() && i < all.size(); ++i) {
        ASSERT_TRUE(all[i] == expected[i]) << "request " << i << ", tp " << ranks;
      }
    });
  }
}

TEST(PagePool, PagesAreTakenOnceAndReturnedOnce) {
  PagePool pool(3);
  const std::vector<int32_t> all{pool.take(), pool.take(), pool.take()};
  EXPECT_EQ(std::set<int32_t>(all.begin(), all.end()), (std::set<int32_t>{0, 1, 2}));
  EXPECT_THROW(pool.take(), InvalidArgument);
  pool.give_back(std::span(all).first(1));
  EXPECT_THROW(pool.give_back(all), InvalidArgument);
  EXPECT_THROW(pool.give_back(std::vector<int32_t>{all[1], all[1]}), InvalidArgument);
  EXPECT_THROW(pool.give_back(std::vector<int32_t>{3}), InvalidArgument);
  EXPECT_EQ(pool.free(), 1);
  pool.give_back(std::span(all).last(2));
  EXPECT_EQ(pool.free(), 3);
}

}  // namespace
}  // namespace tandem
