// Buckets of a flat array and the shards of ranks: they cover it, and divide no range that has one
// owner.
#include "engine/parallel/sharded/buckets.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "tandem/random.h"

namespace tandem {
namespace {

TEST(Buckets, ShardsCoverEveryElementOnceFromTheBack) {
  for (int64_t elements : {1, 5, 64, 1000}) {
    for (int64_t size : {1, 3, 64, 5000}) {
      for (int ranks : {1, 2, 3, 4}) {
        const Buckets buckets(elements, size, ranks);
        std::vector<int> seen(static_cast<size_t>(elements));
        int64_t previous = elements;
        for (int b = 0; b < buckets.count(); ++b) {
          const auto whole = buckets.bucket(b);
          EXPECT_EQ(whole.begin + whole.count, previous);
          previous = whole.begin;
          for (int r = 0; r < ranks; ++r) {
            const auto shard = buckets.shard(b, r);
            for (int64_t i = 0; i < shard.count; ++i) ++seen[size_t(shard.begin + i)];
            EXPECT_LE(buckets.slot_begin(b) + shard.count, buckets.slot_elements());
          }
        }
        EXPECT_EQ(previous, 0);
        for (const int count : seen) EXPECT_EQ(count, 1);
      }
    }
  }
}

/// Ranges of up to `max_count` elements with gaps between some of them.
std::vector<FlatRange> some_ranges(int64_t elements, int64_t max_count, uint64_t seed) {
  std::vector<FlatRange> ranges;
  for (int64_t begin = 0, i = 0;; ++i) {
    const auto words = philox(seed, 3, uint64_t(i));
    begin += words[0] % 2 ? 0 : words[1] % 5;
    const int64_t count = 1 + int64_t(words[2]) % max_count;
    if (begin + count > elements) return ranges;
    ranges.push_back({begin, count});
    begin += count;
  }
}

/// Whether two ranks, or two buckets, have elements of one range.
bool divides_any(const Buckets& buckets, const std::vector<FlatRange>& ranges) {
  std::vector<std::pair<int, int>> owners(size_t(buckets.elements()), {-1, -1});
  for (int b = 0; b < buckets.count(); ++b) {
    EXPECT_GT(buckets.bucket(b).count, 0);
    for (int r = 0; r < buckets.ranks(); ++r) {
      const FlatRange shard = buckets.shard(b, r);
      EXPECT_LE(shard.count, buckets.shard_room());
      for (int64_t i = shard.begin; i < shard.end(); ++i) {
        EXPECT_EQ(owners[size_t(i)].first, -1) << "two owners of " << i;
        EXPECT_EQ(buckets.at(i), b) << i;
        owners[size_t(i)] = {b, r};
      }
    }
  }
  EXPECT_EQ(std::ranges::count(owners, std::pair(-1, -1)), 0);
  return std::ranges::any_of(ranges, [&](const FlatRange& range) {
    const auto first = owners.begin() + range.begin;
    return std::count(first, first + range.count, *first) != range.count;
  });
}

TEST(Buckets, UndividedRangesHaveOneOwnerEach) {
  for (int64_t elements : {1, 40, 1000}) {
    for (int64_t size : {7, 64, 5000}) {
      for (int ranks : {1, 2, 3}) {
        for (int64_t max_count : {3, 30, 200}) {  // also longer than a bucket
          SCOPED_TRACE(fmt::format("{} {} {} {}", elements, size, ranks, max_count));
          const auto ranges = some_ranges(elements, max_count, uint64_t(size + ranks));
          EXPECT_FALSE(
              divides_any(Buckets(FlatWindow::all(elements), size, ranks, 0, ranges), ranges));
          if (elements == 1000 && (size < 5000 || ranks > 1) && max_count > 3) {
            EXPECT_TRUE(divides_any(Buckets(elements, size, ranks), ranges)) << "control";
          }
        }
      }
    }
  }
}

/// A stage's elements have the owners that they have in the whole model.
TEST(Buckets, UndividedRangesOfAStageHaveTheOwnersOfTheWholeModel) {
  const int64_t elements = 1000;
  const std::vector<FlatRange> ranges = some_ranges(elements, 40, 1);
  const Buckets whole(FlatWindow::all(elements), 64, 3, 0, ranges);
  const size_t from = ranges.size() / 3, to = ranges.size() / 2, last = ranges.size() - 2;
  FlatWindow window{elements, {}};  // two parts of the model
  std::vector<FlatRange> here;
  for (const auto& [first, end] : {std::pair(from, to), std::pair(last, ranges.size())}) {
    const int64_t begin = ranges[first].begin, local = window.local_elements();
    window.ranges.push_back({local, begin, ranges[end - 1].end() - begin});
    here.insert(here.end(), ranges.begin() + std::ptrdiff_t(first),
                ranges.begin() + std::ptrdiff_t(end));
  }
  const Buckets stage(window, 64, 3, 0, here);
  int64_t seen = 0;
  for (int b = 0; b < stage.count(); ++b) {
    for (int r = 0; r < 3; ++r) {
      const FlatRange shard = stage.shard(b, r);
      seen += shard.count;
      for (int64_t i = shard.begin; i < shard.end(); ++i) {
        const int64_t position = window.whole(i);
        const int of_whole = whole.at(position);
        EXPECT_EQ(whole.number(of_whole), stage.number(b));
        const FlatRange owned = whole.shard(of_whole, r);
        EXPECT_TRUE(position >= owned.begin && position < owned.end()) << position;
      }
    }
  }
  EXPECT_EQ(seen, window.local_elements());
}

}  // namespace
}  // namespace tandem
