// Pages of requests that end in any way are free, or hold what later requests may share.
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <set>
#include <vector>

#include "engine/infer/cache/kv_cache.h"
#include "tests/engine/infer/engine_cases.h"

namespace tandem {
namespace {
using namespace test;

/// A token after which no logit is finite; no request of random_requests has it.
constexpr int32_t kPoison = 256;

/// Weights of fill_engine, with a NaN in the embedding of kPoison.
void fill_poisoned(Engine& engine, const ModelConfig& config, Communicator& tp) {
  const ModelLayout layout(config, tp.size(), tp.rank());
  std::vector<float> weights(size_t(layout.size));
  initialize_parameters({}, layout, config, 17, flat(weights));
  for (float& w : weights) w = w == 1 ? w : w * 6;
  const int64_t row = kPoison - layout.vocab_begin;
  if (row >= 0 && row < layout.vocab) {
    weights[size_t(layout.embedding.offset + row * config.hidden)] =
        std::numeric_limits<float>::quiet_NaN();
  }
  set_weights(engine, make_exec(tp), weights);
}

/// Requests of all kinds: with first tokens in common, rules, stop strings, log-probabilities,
/// contexts that roll, and some that fail.
std::vector<Request> mixed_requests(int64_t count, uint64_t seed) {
  std::vector<Request> all = random_requests(count, seed, 30, 90);
  Choice choice{seed + 1};
  for (Request& request : all) {
    std::vector<int32_t> prompt(size_t(kPageTokens * choice.below(3)), int32_t(choice.below(3)));
    prompt.insert(prompt.end(), request.prompt.begin(), request.prompt.end());
    request.prompt = prompt;
    if (choice.below(20) == 0) request.prompt[size_t(choice.below(20)) % prompt.size()] = kPoison;
    const int64_t first_stop = choice.below(6) == 0 ? choice.below(8) : 256;
    for (int64_t i = first_stop; i < 256; i += 8) request.stops.emplace_back(1, char(i));
    if (choice.below(10) == 0) request.rules.frequency_penalty = 1;
    if (choice.below(10) == 0) request.alternatives = 3;
    if (choice.below(30) == 0) request.prompt_alternatives = 1;
    request.rolls = request.prompt_alternatives < 0 && choice.below(10) == 0;
    if (request.rolls && choice.below(3) == 0) request.max_tokens = 150;
  }
  return all;
}

/// Counts of how requests ended.
struct Ends {
  std::map<Finish, int64_t> finishes;
  int64_t cancelled = 0;
  std::vector<std::vector<int32_t>> tokens;  ///< by request; none of cancelled ones
};

/// Submits the requests between steps, and cancels some: before they run, or at any token.
Ends run_with_cancels(Engine& engine, const std::vector<Request>& requests, Choice choice) {
  Ends ends;
  ends.tokens.resize(requests.size());
  std::set<int64_t> unfinished;
  size_t submitted = 0;
  while (submitted < requests.size() || !engine.is_idle()) {
    for (int64_t n = choice.below(5); n > 0 && submitted < requests.size(); --n) {
      unfinished.insert(engine.submit(requests[submitted++]));
    }
    for (const TokenEvent& event : engine.step()) {
      EXPECT_TRUE(unfinished.contains(event.request)) << "an event after the last";
      ends.tokens[size_t(event.request)].push_back(event.token);
      if (!event.finish) continue;
      ++ends.finishes[*event.finish];
      unfinished.erase(event.request);
    }
    if (unfinished.empty() || choice.below(8) > 0) continue;
    auto chosen = unfinished.begin();
    std::advance(chosen, choice.below(int64_t(unfinished.size())));
    EXPECT_TRUE(engine.cancel(*chosen));
    ends.tokens[size_t(*chosen)].clear();
    unfinished.erase(chosen);
    ++ends.cancelled;
  }
  EXPECT_TRUE(unfinished.empty());
  return ends;
}

void expect_no_page_is_lost(int64_t count, bool runs_ahead) {
  const ModelConfig config = engine_model(kVariants[1]);
  const std::vector<Request> requests = mixed_requests(count, 21);
  for (const int ranks : {1, 2}) {
    on_ranks(ranks, [&](Communicator& tp) {
      // Steps are launched ahead while requests wait only if all sequences are taken.
      const int64_t sequences = runs_ahead ? 6 : 32, pages = runs_ahead ? 9 : 12;
      Engine engine(
          tp, config,
          {.sequences = sequences, .rows = 100, .pages = pages, .runs_ahead = runs_ahead});
      fill_poisoned(engine, config, tp);
      Ends ends = run_with_cancels(engine, requests, {5});
      int64_t ended = ends.cancelled;
      for (const auto& [finish, number] : ends.finishes) ended += number;
      EXPECT_EQ(ended, count);
      EXPECT_GT(ends.cancelled, count / 200);
      EXPECT_GT(ends.finishes[Finish::failed], count / 200);
      EXPECT_GT(ends.finishes[Finish::stop_string], count / 200);
      EXPECT_EQ(engine.stats().ahead > 0, runs_ahead);
      EXPECT_GT(engine.stats().preempted, count / 200);
      EXPECT_GT(engine.stats().shared_tokens, count);
      EXPECT_EQ(engine.free_pages(), engine.num_pages());
      fill_poisoned(engine, config, tp);  // drops what may be shared
      EXPECT_EQ(engine.free_pages(), engine.num_pages());
      for (size_t i = 0; rows_keep_bits() && i < requests.size(); i += 40) {
        if (ends.tokens[i].empty()) continue;
        Engine other(tp, config, {.sequences = 1, .rows = 1, .share_prefixes = false});
        fill_poisoned(other, config, tp);
        EXPECT_EQ(run_all(other, {requests[i]}, {1})[0].tokens, ends.tokens[i]) << "request " << i;
      }
    });
  }
}

TEST(EnginePages, RequestsThatEndInAnyWayLoseNoPage) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  expect_no_page_is_lost(200, false);
}

TEST(EnginePages, RequestsThatEndWhileAStepIsLaunchedLoseNoPage) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  expect_no_page_is_lost(200, true);
}

TEST(EnginePagesLong, TenThousandRequestsLoseNoPage) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  for (const bool runs_ahead : {false, true}) expect_no_page_is_lost(10000, runs_ahead);
}

TEST(EnginePages, ACancelledRequestReturnsItsPagesAtOnce) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = engine_model(kVariants[0]);
  on_ranks(2, [&](Communicator& tp) {
    Engine engine(tp, config, {.sequences = 2, .rows = 64});
    fill_engine(engine, config, tp);
    const auto submit = [&](size_t tokens, int32_t token) {
      return engine.submit(
          {.prompt = std::vector<int32_t>(tokens, token), .max_tokens = 50, .eos_token_ids = {-1}});
    };
    const int64_t first = submit(130, 1);
    engine.step();
    EXPECT_EQ(engine.num_pages() - engine.free_pages(), 3) << "in the middle of its prompt";
    EXPECT_TRUE(engine.cancel(first));
    EXPECT_EQ(engine.free_pages(), engine.num_pages());
    const int64_t written = submit(60, 2), other = submit(60, 3);
    while (engine.step().size() < 2) {
    }
    const int64_t waiting = submit(60, 4);
    EXPECT_EQ(engine.num_pages() - engine.free_pages(), 2);
    EXPECT_TRUE(engine.cancel(waiting)) << "has no page yet";
    EXPECT_EQ(engine.num_pages() - engine.free_pages(), 2);
    EXPECT_TRUE(engine.cancel(written));
    EXPECT_EQ(engine.num_pages() - engine.free_pages(), 1);
    EXPECT_FALSE(engine.cancel(written));
    for (const TokenEvent& event : engine.step()) EXPECT_EQ(event.request, other);
    EXPECT_TRUE(engine.cancel(other));
    EXPECT_TRUE(engine.is_idle());
    EXPECT_EQ(engine.free_pages(), engine.num_pages());
  });
}

}  // namespace
}  // namespace tandem
