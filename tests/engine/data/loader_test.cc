// The text of coming steps is read in the background, once for all ranks of a process.
#include "engine/data/loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <latch>
#include <optional>
#include <set>
#include <thread>

#include "engine/data/corpus.h"
#include "engine/data/ledger/ledger_lines.h"
#include "tandem/error.h"
#include "tandem/random.h"
#include "tests/engine/train/temp_dir.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;
using Paths = std::vector<std::string>;
using std::chrono::milliseconds;
constexpr int64_t kSeq = 16;

class LoaderTest : public ::testing::Test {
 protected:
  LoaderTest() {
    std::string text(5000, ' ');
    for (size_t i = 0; i < text.size(); ++i) text[i] = char(philox(8, 0, i)[0]);
    write_bytes(dir_ / "text", text);
    corpus_.emplace(Paths{dir_ / "text"}, 0);
  }
  /// `before` is called when a sample is read.
  Sampler make_sampler(std::function<void(int64_t sample)> before) {
    const auto order = [before = std::move(before)](int64_t sample) {
      before(sample);
      return sample;
    };
    return {*corpus_, kSeq, 3, {.order = order}};
  }
  void expect_text(const TextBlock& block, int64_t begin, int64_t count) {
    const Sampler sampler(*corpus_, kSeq, 3);
    block.await();
    ASSERT_EQ(block.tokens().size(), size_t(count * kSeq));
    uint64_t hash = 0;
    for (int64_t i = 0; i < count; ++i) {
      std::vector<int32_t> tokens(kSeq), targets(kSeq);
      sampler.read(begin + i, tokens, targets);
      EXPECT_TRUE(std::ranges::equal(tokens, block.tokens().subspan(size_t(i * kSeq), kSeq)));
      EXPECT_TRUE(std::ranges::equal(targets, block.targets().subspan(size_t(i * kSeq), kSeq)));
      hash += sample_hash(begin + i, tokens, targets);
    }
    EXPECT_EQ(block.hash(), hash);
  }

  const TempDir dir_;
  std::optional<Corpus> corpus_;
};

/// Waits, for at most a minute.
template <typename Condition>
bool eventually(const Condition& condition) {
  for (int i = 0; i < 60'000 && !condition(); ++i) std::this_thread::sleep_for(milliseconds(1));
  return condition();
}

TEST_F(LoaderTest, ThreadsShareBlocksThatAreReadOnce) {
  std::multiset<int64_t> read;
  std::optional<Loader> loader;
  std::latch requested(4);
  loader.emplace(make_sampler([&](int64_t sample) {
                   requested.wait();
                   read.insert(sample);
                 }),
                 kSeq);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([&] {
      std::vector<std::shared_ptr<const TextBlock>> blocks;
      for (int64_t begin = 0; begin < 40; begin += 4) blocks.push_back(loader->request(begin, 4));
      requested.count_down();
      for (int64_t i = 0; i < 10; ++i) expect_text(*blocks[size_t(i)], 4 * i, 4);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  loader.reset();
  EXPECT_EQ(read.size(), 40u);
  EXPECT_EQ(std::set<int64_t>(read.begin(), read.end()).size(), 40u);
}

TEST_F(LoaderTest, NextStepIsReadWithoutACallThatWaitsForIt) {
  std::atomic<int64_t> read = 0;
  Loader loader(make_sampler([&](int64_t) { ++read; }), kSeq);
  const auto first = loader.request(0, 4), next = loader.request(4, 4);
  first->await();
  EXPECT_TRUE(eventually([&] { return read == 8; }));
  expect_text(*next, 4, 4);
  EXPECT_EQ(read, 8);
}

TEST_F(LoaderTest, ErrorIsThrownWhereItsBlockIsUsed) {
  Loader loader(make_sampler([&](int64_t sample) {
                  if (sample == 5) throw IoError("text: gone");
                }),
                kSeq);
  const auto first = loader.request(0, 4), second = loader.request(4, 4),
             third = loader.request(8, 4);
  expect_text(*third, 8, 4);
  for (int i = 0; i < 2; ++i) EXPECT_THROW(second->await(), IoError);
  expect_text(*first, 0, 4);
}

TEST_F(LoaderTest, BlocksThatNoRankNeedsAreNotRead) {
  std::latch dropped(1);
  std::set<int64_t> read;
  const auto sampler = make_sampler([&](int64_t sample) {
    dropped.wait();
    read.insert(sample);
  });
  Loader loader(sampler, kSeq);
  const auto first = loader.request(0, 1);
  auto second = loader.request(1, 1);
  const auto third = loader.request(2, 1);
  second.reset();
  dropped.count_down();
  third->await();
  EXPECT_EQ(read, (std::set<int64_t>{0, 2}));
  expect_text(*loader.request(1, 1), 1, 1);  // a dropped one can be requested anew
}

TEST_F(LoaderTest, RanksOfAProcessAndRunShareALoader) {
  const Corpus other(Paths{dir_ / "text"}, 0);
  std::vector<std::shared_ptr<Loader>> loaders(8);
  for (size_t run = 0; run < 2; ++run) {
    run_threads({.ranks = 4}, [&](Communicator& world) {
      const Corpus& corpus = world.rank() == 3 ? other : *corpus_;
      const Sampler sampler(corpus, kSeq, 3);
      loaders[4 * run + size_t(world.rank())] = share_loader(world, corpus, sampler, {kSeq, 4, 8});
      world.barrier();
    });
  }
  for (const size_t rank : {1, 2, 5, 6}) EXPECT_EQ(loaders[rank], loaders[rank / 4 * 4]);
  EXPECT_EQ(std::set(loaders.begin(), loaders.end()).size(), 4u);
}

/// Share of the time of steps of 40 ms in which they wait for the text of four samples.
double waiting_share(const Sampler& sampler, int64_t steps) {
  Loader loader(sampler, kSeq);
  Clock::duration waited{};
  auto next = loader.request(0, 4);
  next->await();
  const auto begin = Clock::now();
  for (int64_t step = 0; step < steps; ++step) {
    const auto text = std::exchange(next, loader.request(4 * (step + 1), 4));
    const auto before = Clock::now();
    text->await();
    waited += Clock::now() - before;
    std::this_thread::sleep_for(milliseconds(40));
  }
  return std::chrono::duration<double>(waited) / (Clock::now() - begin);
}

// One core tokenizes for three quarters of each step. Other programs make it wait: the best of some
// trials counts.
TEST(LoaderLong, WaitIsBelowHalfAPercentOfTheStep) {
  const TempDir dir;
  write_bytes(dir / "text", std::string(5000, 'x'));
  const Corpus corpus(Paths{dir / "text"}, 0);
  const auto order = [](int64_t sample) {
    const auto end = Clock::now() + std::chrono::microseconds(7500);
    while (Clock::now() < end) {
    }
    return sample;
  };
  const Sampler sampler(corpus, kSeq, 3, {.order = order});
  double share = 1;
  for (int trial = 0; trial < 10 && share > 0.005; ++trial) {
    share = std::min(share, waiting_share(sampler, 25));
  }
  ::testing::Test::RecordProperty("waiting_share", std::to_string(share));
  EXPECT_LE(share, 0.005);
}

}  // namespace
}  // namespace tandem
