// One text alone: its logits against a training pass, and on any number of ranks; contexts that
// roll.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "engine/model/layout.h"
#include "tandem/error.h"
#include "tests/engine/infer/engine_cases.h"
#include "tests/engine/infer/fed_text.h"
#include "tests/engine/model/harness.h"
#include "tests/flat.h"

namespace tandem {
namespace {
using namespace tandem::test;
using Doubles = std::vector<double>;

constexpr int64_t kContext = 32;
constexpr OverlapOptions kSerial{Strategy::serial, 0};

std::vector<Variant> variants() {
  std::vector<Variant> all(std::begin(kVariants), std::end(kVariants));
  all.push_back({"experts", true, false, 4});
  return all;
}

/// Log-likelihood of `token` given `logits`.
double log_likelihood(std::span<const float> logits, int32_t token) {
  double sum = 0;
  for (const float x : logits) sum += std::exp(double(x));
  return double(logits[size_t(token)]) - std::log(sum);
}

class OneTextOf : public ::testing::TestWithParam<Variant> {};
INSTANTIATE_TEST_SUITE_P(Variants, OneTextOf, ::testing::ValuesIn(variants()),
                         [](const auto& test) { return std::string(test.param.name); });

/// likelihoods[i]: that of token i + 1 (of token 0 at the end) after tokens 0 to i, by the training
/// forward pass of one rank.
Doubles full_forward(const ModelConfig& config, const std::vector<int32_t>& tokens) {
  Doubles likelihoods;
  run_threads({}, [&](Communicator& tp) {
    Transformer model(tp, config, {.batch = 1, .seq = kContext, .overlap = kSerial});
    fill_engine(model, config, tp);
    for (size_t i = 0; i < tokens.size(); ++i) {
      std::vector<int32_t> only(tokens.size(), -1);
      only[i] = tokens[(i + 1) % tokens.size()];
      likelihoods.push_back(-model.forward(tokens, only));
    }
  });
  return likelihoods;
}

// Holds for any split of the tokens into prefill blocks and single steps.
TEST_P(OneTextOf, CachedStepsMatchTheFullForward) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = variant_model(GetParam(), kContext);
  const std::vector<int32_t> tokens = make_batch(config, kContext).tokens;
  const Doubles expected = full_forward(config, tokens);
  const std::vector<int64_t> splits[] = {
      std::vector<int64_t>(kContext, 1), {7, 7, 7, 11}, {1, 9, 2, 20}, {30, 2}, {32}};
  for (const int ranks : {1, 2}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      WorldOptions world;
      world.ranks = ranks;
      run_threads(world, [&](Communicator& tp) {
        set_kernel_threads(1);
        FedText text(tp, config, {.dtype = dtype, .block = 7});
        fill_engine(text, config, tp);
        for (const auto& split : splits) {
          text.reset();
          size_t at = 0;
          for (const int64_t count : split) {
            const auto logits = text.feed(std::span(tokens).subspan(at, size_t(count)));
            at += size_t(count);
            EXPECT_NEAR(log_likelihood(logits, tokens[at % tokens.size()]), expected[at - 1],
                        dtype == DType::f32 ? 1e-4 : 0.1)
                << "after " << at << " of " << split.size() << " feeds, tp " << ranks;
          }
          EXPECT_EQ(text.position(), kContext);
        }
      });
    }
  }
}

/// A rolling text of `count` tokens after a prompt.
struct Rolled {
  std::vector<int32_t> tokens;
  int64_t dropped = 0, rolled = 0;
};
Rolled rolled_text(Engine& engine, std::span<const int32_t> prompt, int64_t count,
                   const SamplingOptions& sampling) {
  Request request{.prompt = {prompt.begin(), prompt.end()},
                  .max_tokens = count,
                  .sampling = sampling,
                  .eos_token_ids = {-1}};
  request.rolls = true;
  const int64_t before = engine.stats().rolled;
  engine.submit(request);
  Rolled text;
  while (!engine.is_idle()) {
    for (const TokenEvent& event : engine.step()) {
      text.tokens.push_back(event.token);
      text.dropped += event.dropped;
    }
  }
  text.rolled = engine.stats().rolled - before;
  EXPECT_EQ(engine.free_pages(), engine.num_pages());
  return text;
}

std::vector<int32_t> text_of(Communicator& tp, const ModelConfig& config, int64_t count,
                             const SamplingOptions& sampling, Strategy prefill,
                             const CodecPolicy& codec = {}) {
  set_kernel_threads(1);
  const bool has_two_chunks = tp.size() > 1 && config.experts == 0;
  Engine engine(tp, config,
                {.sequences = 1,
                 .rows = 8,
                 .overlap = kSerial,
                 .prefill = has_two_chunks ? prefill : Strategy::serial,
                 .codec = codec});
  fill_engine(engine, config, tp);
  return rolled_text(engine, make_batch(config, 11).tokens, count, sampling).tokens;
}

// Twice the context, so that the cache is filled and refilled.
TEST_P(OneTextOf, SameTextForAnyTp) {
  const ModelConfig config = variant_model(GetParam(), kContext);
  const SamplingOptions sampling{.temperature = 0.8, .top_p = 0.95, .seed = 5};
  std::vector<int32_t> alone;
  run_threads({}, [&](Communicator& tp) {
    alone = text_of(tp, config, 2 * kContext, sampling, Strategy::serial);
  });
  EXPECT_EQ(alone.size(), size_t(2 * kContext));
  EXPECT_GT(std::set<int32_t>(alone.begin(), alone.end()).size(), 5u);
  if (launched_by_mpi()) {
    run_mpi({}, [&](Communicator& tp) {
      if (config.kv_heads % tp.size() != 0) return;
      EXPECT_EQ(text_of(tp, config, 2 * kContext, sampling, Strategy::overlapped), alone);
    });
    return;
  }
  for (const int ranks : {2, 4}) {
    if (config.kv_heads % ranks != 0) continue;
    WorldOptions world;
    world.ranks = ranks;
    std::mutex mutex;
    run_threads(world, [&](Communicator& tp) {
      const auto text = text_of(tp, config, 2 * kContext, sampling, Strategy::overlapped);
      const std::lock_guard lock(mutex);
      EXPECT_EQ(text, alone) << "tp " << ranks;
    });
  }
}

/// Logits after 11 tokens, which fill one block and begin another, and after two more.
std::vector<float> logits_of(Communicator& tp, const ModelConfig& config, const char* codec) {
  set_kernel_threads(1);
  FedText text(tp, config, {.block = 8, .codec = CodecPolicy::parse(codec)});
  fill_engine(text, config, tp);
  const std::vector<int32_t> tokens = make_batch(config, 13).tokens;
  std::vector<float> all;
  for (const auto& tokens_fed : {std::span(tokens).first(11), std::span(tokens).last(2)}) {
    const auto logits = text.feed(tokens_fed);
    all.insert(all.end(), logits.begin(), logits.end());
  }
  return all;
}

float farthest(const std::vector<float>& a, const std::vector<float>& b) {
  float maximum = 0;
  for (size_t i = 0; i < a.size(); ++i) maximum = std::max(maximum, std::fabs(a[i] - b[i]));
  return maximum;
}

/// Fails on all ranks of `tp` if any two have different bytes.
template <typename T>
void expect_same(Communicator& tp, const std::vector<T>& values, const std::string& what) {
  const auto blobs = tp.exchange(std::as_bytes(std::span(values)), "values");
  for (const auto& blob : blobs) EXPECT_EQ(blob, blobs[0]) << what;
}

// Coarser formats are farther from the uncompressed sums, each site has an effect, and all ranks
// agree.
TEST_P(OneTextOf, CodecsGiveTheSameTextOnAllRanks) {
  const ModelConfig config = variant_model(GetParam(), kContext);
  const SamplingOptions sampling{.temperature = 0.8, .top_p = 0.95, .seed = 5};
  const auto check = [&](Communicator& tp) {
    if (tp.size() < 2 || config.kv_heads % tp.size() != 0) return;
    const auto text = [&](const char* codec) {
      const auto one = text_of(tp, config, 2 * kContext, sampling, Strategy::overlapped,
                               CodecPolicy::parse(codec));
      expect_same(tp, one, codec);
      return one;
    };
    EXPECT_EQ(text("lossless"), text("none"));
    EXPECT_EQ(text("int8").size(), size_t(2 * kContext));
    EXPECT_EQ(text("attention=int4:g32,mlp=int4:g32"), text("int4:g32"));
    const std::vector<float> uncompressed = logits_of(tp, config, "none");
    EXPECT_EQ(logits_of(tp, config, "lossless"), uncompressed);
    float before = 0;
    for (const char* codec : {"int8", "int4:g32", "int2:g32"}) {
      const std::vector<float> logits = logits_of(tp, config, codec);
      expect_same(tp, logits, codec);
      EXPECT_GT(farthest(logits, uncompressed), before) << codec;
      before = farthest(logits, uncompressed);
    }
    // Embeddings and LM head, and experts if there are any: lossless gives the uncompressed bits.
    for (const char* site : {"embeddings", "experts"}) {
      if (std::string(site) == "experts" && config.experts == 0) continue;
      const auto with = [&](const char* codec) {
        return logits_of(tp, config, fmt::format("{}={}", site, codec).c_str());
      };
      EXPECT_EQ(with("lossless"), uncompressed) << site;
      const std::vector<float> coarse = with("int2:g32");
      expect_same(tp, coarse, site);
      EXPECT_GT(farthest(coarse, uncompressed), farthest(with("int8"), uncompressed)) << site;
      EXPECT_GT(farthest(with("int8"), uncompressed), 0) << site;
    }
    if (config.parallel_block) return;
    const std::vector<float> attention = logits_of(tp, config, "attention=int2:g32"),
                             mlp = logits_of(tp, config, "mlp=int2:g32");
    EXPECT_GT(farthest(attention, uncompressed), 0);
    EXPECT_GT(farthest(mlp, uncompressed), 0);
    EXPECT_GT(farthest(mlp, attention), 0);
  };
  if (launched_by_mpi()) return run_mpi({}, check);
  for (const int ranks : {2, 4}) {
    WorldOptions world;
    world.ranks = ranks;
    run_threads(world, check);
  }
}

TEST(OneText, LongPromptsKeepTheirEndAndFullContextsRoll) {
  if (launched_by_mpi()) GTEST_SKIP() << "one rank is enough";
  const ModelConfig config = variant_model(kVariants[0], kContext);
  run_threads({}, [&](Communicator& tp) {
    Engine engine(tp, config, {.sequences = 1, .rows = 8});
    fill_engine(engine, config, tp);
    const std::vector<int32_t> text = make_batch(config, 3 * kContext).tokens;
    const SamplingOptions likeliest{.temperature = 0};
    const Rolled cut = rolled_text(engine, text, 9, likeliest);
    const int64_t remaining = std::max<int64_t>(kContext / 2, kContext - 9);
    EXPECT_EQ(cut.dropped, 3 * kContext - remaining);
    const Rolled end = rolled_text(engine, std::span(text).last(size_t(remaining)), 9, likeliest);
    EXPECT_EQ(end.tokens, cut.tokens);
    EXPECT_EQ(end.dropped, 0);
    EXPECT_EQ(rolled_text(engine, std::span(text).first(kContext), 1, likeliest).dropped, 0)
        << "fits";
    for (const auto& [count, rolled] :
         {std::pair<int64_t, int64_t>{1, 0}, {kContext / 2, 0}, {2 * kContext, 3}}) {
      EXPECT_EQ(rolled_text(engine, text, count, likeliest).rolled, rolled) << count;
    }
  });
}

// A rolling text's tokens are those of the tokens that its context holds, whatever else runs.
TEST(OneText, RollsAmongOthersAsAlone) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  ModelConfig config = variant_model(kVariants[0], 100);
  config.vocab = 257;
  std::vector<Request> requests = random_requests(10, 3, 60, 240);
  for (Request& request : requests) request.rolls = true, request.stops.clear();
  for (const int ranks : {1, 2}) {
    on_ranks(ranks, [&](Communicator& tp) {
      const auto expected = run_separately(tp, config, DType::f32, {}, requests);
      Engine engine(tp, config, {.sequences = 3, .rows = 11, .pages = 3});
      fill_engine(engine, config, tp);
      const auto found = run_all(engine, requests, {5});
      for (size_t i = 0; i < requests.size(); ++i) EXPECT_EQ(found[i], expected[i]) << i;
      EXPECT_GT(engine.stats().rolled, 2);
      EXPECT_GT(engine.stats().preempted, 0);
    });
  }
}

TEST(OneText, RefusesBadInput) {
  if (launched_by_mpi()) GTEST_SKIP() << "one rank is enough";
  const ModelConfig config = variant_model(kVariants[0], kContext);
  run_threads({}, [&](Communicator& tp) {
    EXPECT_THROW(Engine(tp, config, {.capacity = kContext + 1}), InvalidArgument);
    EXPECT_THROW(Engine(tp, config, {.prefill = Strategy::overlapped}), InvalidArgument);
    ModelConfig endless = config;
    endless.max_seq = int64_t{1} << 31;
    endless.head_dim = 4096;
    EXPECT_THROW(Engine(tp, endless, {.overlap = kSerial}), InvalidArgument);
    Engine engine(tp, config, {.overlap = kSerial});
    Request scored{.prompt = {1, 2}, .prompt_alternatives = 0};
    scored.rolls = true;
    EXPECT_THROW(engine.submit(scored), InvalidArgument);
  });
}

}  // namespace
}  // namespace tandem
