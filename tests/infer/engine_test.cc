// Many requests at once give each the tokens that it has with no other, bit for bit, for any number
// of ranks, rows and pages.
#include "engine/infer/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "engine/infer/generator.h"
#include "engine/model/layout.h"
#include "gemm/gemm.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/flat.h"
#include "tests/model/harness.h"

namespace tandem {
namespace {
using namespace tandem::testing;

constexpr int64_t kCapacity = 200;

struct Choice {
  uint64_t seed, count = 0;
  int64_t below(int64_t bound) { return int64_t(philox(seed, 7, count++)[0] % uint64_t(bound)); }
};

ModelConfig engine_model(const Variant& variant) {
  ModelConfig config = small_model(variant);
  config.vocab = 257;
  config.max_seq = kCapacity;
  if (std::string_view(variant.name) == "experts") {
    config.experts = 6;
    config.top_k = 2;
    config.shared_ffn = 16;
    config.moe_layer_freq = 2;
  }
  return config;
}

template <typename Model>
void fill_engine(Model& model, const ModelConfig& config, Communicator& tp) {
  initialize_parameters({}, ModelLayout(config, tp.size(), tp.rank()), config, 17,
                        model.parameters());
  for (float& w : floats(model.parameters())) w = w == 1 ? w : w * 6;
  model.parameters_changed();
}

std::vector<Request> random_requests(int64_t count, uint64_t seed, int64_t max_prompt,
                                     int64_t max_text) {
  std::vector<Request> all;
  Choice choice{seed};
  for (int64_t i = 0; i < count; ++i) {
    Request request;
    for (int64_t j = 0, n = 1 + choice.below(max_prompt); j < n; ++j) {
      request.prompt.push_back(int32_t(choice.below(256)));
    }
    request.max_tokens = 1 + choice.below(max_text);
    request.sampling = {.temperature = choice.below(3) * 0.5,
                        .top_k = choice.below(2) * 9,
                        .top_p = choice.below(2) == 0 ? 1 : 0.9,
                        .seed = uint64_t(choice.below(1000))};
    if (choice.below(4) == 0) request.stops = {std::string(1, char(choice.below(256)))};
    all.push_back(request);
  }
  return all;
}

struct Written {
  std::vector<int32_t> tokens;
  std::vector<double> log_probs;
  std::string text;
  std::optional<Finish> finish;
  bool operator==(const Written&) const = default;
};

constexpr int kMaxIdleSteps = 10000;

/// Texts of the requests, submitted a few at a time between the steps.
std::vector<Written> run_all(Engine& engine, const std::vector<Request>& requests, Choice choice) {
  std::vector<Written> all(requests.size());
  size_t submitted = 0;
  int64_t first = -1;
  int idle_steps = 0;  // since the last token
  while (submitted < requests.size() || !engine.is_idle()) {
    if (++idle_steps > kMaxIdleSteps) {
      ADD_FAILURE() << "no token in " << kMaxIdleSteps << " steps";
      return all;
    }
    for (int64_t n = choice.below(4); n > 0 && submitted < requests.size(); --n) {
      const int64_t id = engine.submit(requests[submitted]);
      if (submitted++ == 0) first = id;
    }
    for (const TokenEvent& event : engine.step()) {
      Written& written = all[size_t(event.request - first)];
      idle_steps = 0;
      EXPECT_FALSE(written.finish) << "an event after the last";
      written.tokens.push_back(event.token);
      written.log_probs.push_back(event.log_prob);
      written.text += event.text;
      written.finish = event.finish;
    }
  }
  EXPECT_EQ(engine.pages().free(), engine.pages().size());
  return all;
}

std::vector<Variant> engine_variants() {
  std::vector<Variant> all(std::begin(kVariants), std::end(kVariants));
  all.push_back({"experts", true, false, 4});
  return all;
}

class EngineTest : public ::testing::TestWithParam<Variant> {};
INSTANTIATE_TEST_SUITE_P(Variants, EngineTest, ::testing::ValuesIn(engine_variants()),
                         [](const auto& test) { return std::string(test.param.name); });

void on_ranks(int ranks, const std::function<void(Communicator&)>& body) {
  WorldOptions world;
  world.ranks = ranks;
  run_threads(world, [&](Communicator& tp) {
    set_kernel_threads(1);
    body(tp);
  });
}

/// Each request with no other, on one row at a time.
std::vector<Written> run_separately(Communicator& tp, const ModelConfig& config, DType dtype,
                                    const CodecPolicy& codec,
                                    const std::vector<Request>& requests) {
  Engine engine(tp, config, {.dtype = dtype, .sequences = 1, .rows = 1, .codec = codec});
  fill_engine(engine, config, tp);
  std::vector<Written> all;
  for (const Request& request : requests) {
    all.push_back(run_all(engine, {request}, {1})[0]);
  }
  return all;
}

TEST_P(EngineTest, OneRequestHasTheTokensOfTheGenerator) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = engine_model(GetParam());
  const std::vector<Request> requests = random_requests(3, 1, 90, 40);
  for (const int ranks : {1, 2, 4}) {
    if (config.kv_heads % ranks != 0) continue;
    on_ranks(ranks, [&](Communicator& tp) {
      const std::vector<Written> all = run_separately(tp, config, DType::f32, {}, requests);
      Generator generator(tp, config, {.overlap = {Strategy::serial, 0}});
      fill_engine(generator, config, tp);
      for (size_t i = 0; i < requests.size(); ++i) {
        std::vector<int32_t> tokens;
        generator.generate(requests[i].prompt, int64_t(all[i].tokens.size()), requests[i].sampling,
                           [&](int32_t token) {
                             tokens.push_back(token);
                             return true;
                           });
        EXPECT_EQ(tokens, all[i].tokens) << "request " << i << ", tp " << ranks;
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
    int64_t sequences, rows, pages;
  };
  const Size sizes[] = {{2, 2, 4}, {3, 50, 6}, {7, 7, 7}, {64, 300, 0}};
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

/// Each group of 64 inputs of a row as multiples of its max / 127, rounded up to bf16.
void quantize_rows(std::span<float> weights, int64_t columns) {
  for (size_t row = 0; row < weights.size(); row += size_t(columns)) {
    for (int64_t first = 0; first < columns; first += 64) {
      const auto group =
          weights.subspan(row + size_t(first), size_t(std::min<int64_t>(64, columns - first)));
      float max = 0;
      for (const float w : group) max = std::max(max, std::abs(w));
      BFloat16 scale = BFloat16::from_float(max / 127);
      if (scale.to_float() < max / 127) ++scale.bits;
      for (float& w : group) w = std::round(w / scale.to_float()) * scale.to_float();
    }
  }
}

/// A model whose weights may be in int8 on up to 4 ranks.
ModelConfig int8_model() {
  ModelConfig config = small_model();
  config.vocab = 257;
  config.max_seq = kCapacity;
  config.hidden = 72;  // a group and a shorter one
  config.heads = 8;
  config.kv_heads = 4;
  config.head_dim = 32;
  config.ffn = 256;
  config.tie_word_embeddings = false;
  return config;
}

/// Fills an engine; `dequantized`: with what int8 weights hold.
void fill_int8_engine(Engine& engine, const ModelConfig& config, Communicator& tp,
                      bool dequantized) {
  const ModelLayout layout(config, tp.size(), tp.rank());
  initialize_parameters({}, layout, config, 17, engine.parameters());
  const std::span<float> all = floats(engine.parameters());
  for (float& w : all) w = w == 1 ? w : w * 4;
  const auto quantize = [&](const WeightMatrix& m) {
    quantize_rows(all.subspan(size_t(m.offset), size_t(m.rows * m.columns)), m.columns);
  };
  for (const BranchLayout& branch : layout.branches) {
    if (dequantized) quantize(branch.in), quantize(branch.out);
  }
  if (dequantized) quantize(layout.head);
  engine.parameters_changed();
}

TEST(Engine, Int8WeightsGiveTheTextsOfTheWeightsThatTheyHold) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  for (const bool is_parallel : {false, true}) {
    ModelConfig config = int8_model();
    config.parallel_block = is_parallel;
    const std::vector<Request> requests = random_requests(6, 4, 60, 30);
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const int ranks : {1, 2, 4}) {
        on_ranks(ranks, [&](Communicator& tp) {
          const auto texts = [&](const EngineOptions& options, bool dequantized) {
            Engine engine(tp, config, options);
            fill_int8_engine(engine, config, tp, dequantized);
            return run_all(engine, requests, {5});
          };
          const auto expected = texts({.dtype = DType::f32, .sequences = 4}, true);
          const auto unquantized = texts({.dtype = DType::f32, .sequences = 4}, false);
          const auto int8 = texts({.dtype = dtype, .sequences = 4, .int8_weights = true}, false);
          const auto separately =
              texts({.dtype = dtype, .sequences = 1, .rows = 1, .int8_weights = true}, false);
          double error = 0, quantization_error = 0;
          for (size_t i = 0; i < int8.size(); ++i) {
            EXPECT_TRUE(int8[i] == separately[i]) << "request " << i << " with others";
            for (size_t token = 0; token < int8[i].tokens.size(); ++token) {
              if (token >= expected[i].tokens.size()) break;
              if (int8[i].tokens[token] != expected[i].tokens[token]) break;
              error = std::max(error,
                               std::abs(int8[i].log_probs[token] - expected[i].log_probs[token]));
            }
            quantization_error = std::max(quantization_error, std::abs(unquantized[i].log_probs[0] -
                                                                       expected[i].log_probs[0]));
          }
          EXPECT_LT(error, dtype == DType::f32 ? 2e-4 : 0.2);
          if (dtype == DType::f32) {
            EXPECT_GT(quantization_error, 10 * error) << "the weights are not int8";
            for (size_t i = 0; i < int8.size(); ++i) {
              EXPECT_EQ(int8[i].tokens, expected[i].tokens) << "request " << i << ", tp " << ranks;
            }
          }
        });
      }
    }
  }
}

TEST(Engine, Int8WeightsOfOtherModelsAreRefused) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  ModelConfig narrow = int8_model(), experts = int8_model();
  narrow.ffn = 192;
  experts.experts = 4, experts.top_k = 2;
  on_ranks(2, [&](Communicator& tp) {
    EXPECT_THROW(Engine(tp, narrow, {.int8_weights = true}), Unsupported);
    EXPECT_THROW(Engine(tp, experts, {.int8_weights = true}), Unsupported);
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
    EXPECT_EQ(engine.pages().free(), engine.pages().size());
  });
}

TEST(Engine, WithItsDefaultPagesAllTextsAreWrittenInEachStep) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = engine_model(kVariants[0]);
  on_ranks(1, [&](Communicator& tp) {
    Engine engine(tp, config, {.capacity = 40, .sequences = 5, .rows = 20});
    fill_engine(engine, config, tp);
    for (int i = 0; i < 5; ++i) {
      engine.submit({.prompt = {1, 2, 3, i}, .max_tokens = 30, .ends = {-1}});
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
    request.ends = {-1};
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
        Generator generator(tp, config, {.overlap = {Strategy::serial, 0}});
        fill_engine(generator, config, tp);
        Engine engine(tp, config, {.sequences = c.sequences, .rows = c.rows, .pages = c.pages});
        fill_engine(engine, config, tp);
        EXPECT_EQ(engine.pages().size(), c.pages > 0 ? c.pages : 3 * 3);
        const auto all = run_all(engine, requests, {uint64_t(c.rows)});
        for (size_t i = 0; i < requests.size(); ++i) {
          std::vector<int32_t> tokens;
          generator.generate(requests[i].prompt, 150, requests[i].sampling, [&](int32_t token) {
            tokens.push_back(token);
            return true;
          });
          EXPECT_EQ(tokens, all[i].tokens)
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
    refuses({.prompt = {1}, .sampling = {.top_p = 0}}, "top-p 0");
    refuses({.prompt = {1}, .stops = {""}}, "stop ''");
    EXPECT_TRUE(engine.is_idle());
    EXPECT_THROW(Engine(tp, config, {.sequences = 0}), InvalidArgument);
    EXPECT_THROW(Engine(tp, config, {.sequences = 8, .rows = 7}), InvalidArgument);
    EXPECT_THROW(Engine(tp, config, {.pages = -1}), InvalidArgument);
    EXPECT_THROW(Engine(tp, config, {.capacity = 201}), InvalidArgument);
  });
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
