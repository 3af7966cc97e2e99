// Texts that share pages of their first tokens.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <vector>

#include "engine/infer/cache/kv_cache.h"
#include "engine/infer/cache/prefix_tree.h"
#include "tests/engine/infer/engine_cases.h"

namespace tandem {
namespace {

using namespace test;

/// Tokens of `count` pages, drawn from few: texts have beginnings in common.
std::vector<int32_t> draw_tokens(Choice& choice, int64_t count) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i) {
    tokens.insert(tokens.end(), size_t(kPageTokens), int32_t(choice.below(2)));
  }
  return tokens;
}

// Each page is written once with the tokens that lead to it; every path must find those.
TEST(PrefixTree, PathsHaveThePagesOfTheirTokens) {
  struct Text {
    std::vector<int32_t> tokens, pages;
    PrefixTree::Node* at;
    size_t shared;
  };
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Choice choice{seed};
    PagePool pool(12);
    PrefixTree tree(pool);
    std::map<int32_t, std::vector<int32_t>> written;  // tokens up to the page's last, by page
    std::vector<Text> texts;
    int64_t found = 0, dropped = 0;
    for (int round = 0; round < 300; ++round) {
      if (texts.size() < 4 && choice.below(2) == 0) {
        Text text{draw_tokens(choice, 1 + choice.below(5)), {}, nullptr, 0};
        text.at = tree.enter(text.tokens);
        text.pages = tree.pages(text.at);
        text.shared = text.pages.size();
        found += int64_t(text.shared);
        texts.push_back(text);
      } else if (!texts.empty()) {
        const auto i = size_t(choice.below(int64_t(texts.size())));
        Text& text = texts[i];
        const size_t end = (text.shared + 1) * size_t(kPageTokens);
        if (end > text.tokens.size() || choice.below(5) == 0 ||
            (pool.free() == 0 && tree.unused() == 0)) {
          tree.leave(text.at);
          texts.erase(texts.begin() + int64_t(i));
        } else {
          if (pool.free() == 0) tree.drop_oldest(), ++dropped;
          const int32_t page = pool.take();
          const std::span tokens(text.tokens);
          written[page] = {tokens.begin(), tokens.begin() + int64_t(end)};
          text.at = tree.extend(text.at, tokens.first(end).last(size_t(kPageTokens)), page);
          text.pages.push_back(tree.page(text.at));
          ++text.shared;
        }
      }
      std::set<int32_t> used;
      for (const Text& text : texts) {
        EXPECT_EQ(tree.pages(text.at), text.pages);
        for (size_t i = 0; i < text.pages.size(); ++i) {
          const auto end = text.tokens.begin() + int64_t(i + 1) * kPageTokens;
          EXPECT_EQ(written[text.pages[i]], std::vector(text.tokens.begin(), end));
          used.insert(text.pages[i]);
        }
      }
      ASSERT_EQ(int64_t(used.size()) + tree.unused() + pool.free(), pool.size()) << round;
    }
    EXPECT_GT(found, 20);
    EXPECT_GT(dropped, 5);
    for (const Text& text : texts) tree.leave(text.at);
    while (tree.unused() > 0) tree.drop_oldest();
    EXPECT_EQ(pool.free(), pool.size());
  }
}

/// Requests whose prompts begin like those of others.
std::vector<Request> similar_requests(int64_t count, uint64_t seed) {
  std::vector<Request> all = random_requests(count, seed, 60, 100);
  Choice choice{seed + 100};
  for (Request& request : all) {
    std::vector<int32_t> first = draw_tokens(choice, choice.below(3));
    first.insert(first.end(), request.prompt.begin(), request.prompt.end());
    first.resize(std::min(first.size(), size_t(kCapacity - 40)));
    request.prompt = first;
    if (choice.below(8) == 0) request.prompt_alternatives = 1;
  }
  return all;
}

TEST(Prefixes, TextsThatShareThemAreThoseOfTextsAlone) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  if (!rows_keep_bits()) GTEST_SKIP() << "a GEMM's rows depend on their number";
  for (const size_t variant : {0u, 1u}) {
    const ModelConfig config = engine_model(kVariants[variant]);
    const std::vector<Request> requests = similar_requests(24, 3 + variant);
    for (const int ranks : {1, 2}) {
      on_ranks(ranks, [&](Communicator& tp) {
        const auto expected = run_separately(tp, config, DType::f32, {}, requests);
        int64_t preempted = 0;
        for (const int64_t pages : {5, 8, 0}) {
          Engine engine(tp, config, {.sequences = 5, .rows = 70, .pages = pages});
          fill_engine(engine, config, tp);
          const auto all = run_all(engine, requests, {uint64_t(pages)});
          for (size_t i = 0; i < all.size(); ++i) {
            EXPECT_TRUE(all[i] == expected[i]) << "request " << i << ", tp " << ranks;
          }
          EXPECT_GE(engine.stats().shared_tokens, 5 * kPageTokens) << pages;
          preempted += engine.stats().preempted;
        }
        EXPECT_GT(preempted, 0) << "no case runs out of pages";
      });
    }
  }
}

TEST(Prefixes, OnlyOtherTokensAreComputedAgain) {
  if (launched_by_mpi()) GTEST_SKIP() << "threads";
  const ModelConfig config = engine_model(kVariants[0]);
  on_ranks(1, [&](Communicator& tp) {
    Engine engine(tp, config, {.sequences = 2, .rows = 150});
    fill_engine(engine, config, tp);
    Choice choice{1};
    Request request{.prompt = draw_tokens(choice, 2), .max_tokens = 1, .eos_token_ids = {-1}};
    const auto rows_of = [&](const Request& asked, int64_t shared) {
      const int64_t before = engine.stats().rows;
      engine.submit(asked);
      const std::vector<TokenEvent> events = engine.step();
      EXPECT_EQ(events.at(0).shared, shared);
      return engine.stats().rows - before;
    };
    EXPECT_EQ(rows_of(request, 0), 128);
    EXPECT_EQ(rows_of(request, 64), 64) << "the last token's row is computed";
    request.prompt.push_back(5);
    EXPECT_EQ(rows_of(request, 128), 1);
    Request scored = request;
    scored.prompt_alternatives = 0;
    EXPECT_EQ(rows_of(scored, 0), 129) << "of scored tokens there are no logits";
    request.prompt[3] ^= 1;
    EXPECT_EQ(rows_of(request, 0), 129);
    const int64_t shared = engine.stats().shared_tokens;
    fill_engine(engine, config, tp);
    EXPECT_EQ(rows_of(request, 0), 129) << "the cached values are of other weights";
    EXPECT_EQ(engine.stats().shared_tokens, shared);
    Engine without(tp, config, {.sequences = 2, .rows = 150, .share_prefixes = false});
    fill_engine(without, config, tp);
    for (int i = 0; i < 2; ++i) {
      without.submit(request);
      EXPECT_EQ(without.step().at(0).shared, 0);
    }
  });
}

}  // namespace
}  // namespace tandem
