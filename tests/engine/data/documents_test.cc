// Documents of every kind of source, and their packing into sequences.
#include "engine/data/text/documents.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <utility>

#include "engine/data/sampler.h"
#include "engine/data/scored_windows.h"
#include "engine/data/text/packing.h"
#include "engine/data/tokens/token_layout.h"
#include "engine/model/config.h"
#include "tandem/error.h"
#include "tests/engine/data/open_configured.h"
#include "token_fixtures.h"

namespace tandem {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Tokens = std::vector<int32_t>;

/// Stream of documents of given lengths, whose token i is i.
class CountedTokens : public TokenSource {
 public:
  CountedTokens(const std::vector<int64_t>& lengths, int32_t start_token)
      : start_token_(start_token) {
    for (const int64_t length : lengths) begins_.push_back(begins_.back() + length);
  }
  int64_t tokens() const override { return begins_.back(); }
  void read(int64_t begin, std::span<int32_t> out) const override {
    for (size_t i = 0; i < out.size(); ++i) {
      const int64_t position = begin + int64_t(i);
      const bool starts = std::ranges::binary_search(begins_, position);
      out[i] = position >= tokens()          ? -1
               : starts && start_token_ >= 0 ? start_token_
                                             : int32_t(position);
    }
  }
  void verify(Communicator*) const override {}
  std::string format() const override { return "tokens"; }
  std::string describe() const override { return "counted tokens"; }
  std::string identity() const override { return "counted"; }
  std::span<const int64_t> document_begins() const override { return begins_; }
  int32_t start_token() const override { return start_token_; }

 private:
  std::vector<int64_t> begins_{0};
  int32_t start_token_;
};

std::vector<int64_t> random_lengths(uint64_t trial, size_t count, int64_t max) {
  std::vector<int64_t> lengths(count);
  for (size_t i = 0; i < count; ++i) {
    const auto words = philox(21, trial, i);
    const int64_t limit = words[1] % 8 == 0 ? 5 * max : max;  // some are long
    lengths[i] = int64_t(words[0] % uint64_t(limit + 1));     // some are empty
  }
  lengths[0] = max;
  return lengths;
}

int64_t predictions_of(const std::vector<int64_t>& lengths, bool has_end) {
  int64_t sum = 0;
  for (const int64_t length : lengths) {
    if (length > 0) sum += has_end ? length : length - 1;
  }
  return sum;
}

// Every prediction of a document is made once, in a row of its own document.
void expect_packed(const CountedTokens& source, const std::vector<int64_t>& lengths, int64_t seq) {
  const Packing packing(source, seq);
  std::map<int64_t, int> made;                // predictions by the position of their last token
  std::map<int64_t, std::set<int64_t>> rows;  // by document
  Tokens tokens(static_cast<size_t>(seq)), targets(tokens.size()), starts(tokens.size());
  const auto begins = source.document_begins();
  int64_t predictions = 0;
  for (int64_t row = 0; row < packing.sequences(); ++row) {
    packing.read(row, tokens, targets, starts);
    int64_t in_row = 0;
    for (size_t i = 0; i < tokens.size(); ++i) {
      const auto start = size_t(starts[i]);
      ASSERT_LE(start, i);
      ASSERT_EQ(starts[start], starts[i]);
      if (targets[i] < 0) {
        ASSERT_EQ(tokens[i], -1);
        continue;
      }
      ++in_row;
      const bool is_begin = tokens[i] == source.start_token();
      const bool is_end = targets[i] == source.start_token();
      const int64_t position = !is_begin ? tokens[i] : is_end ? -1 : targets[i] - 1;
      ++made[position];
      if (position < 0) continue;
      const auto document = std::ranges::upper_bound(begins, position) - begins.begin() - 1;
      rows[document].insert(row);
      ASSERT_EQ(is_end ? begins[size_t(document) + 1] : targets[i], position + 1);
      ASSERT_TRUE(i == start || tokens[i] == position);
      if (i > start && tokens[start] != source.start_token()) {
        ASSERT_GE(tokens[start], begins[size_t(document)]);
      }
    }
    ASSERT_EQ(in_row, packing.targets(row));
    predictions += in_row;
  }
  EXPECT_EQ(predictions, predictions_of(lengths, source.start_token() >= 0));
  EXPECT_EQ(predictions, packing.predictions());
  for (const auto& [position, count] : made) {
    ASSERT_TRUE(position < 0 || count == 1) << position;
  }
  for (const auto& [document, in_rows] : rows) {
    const int64_t length = begins[size_t(document) + 1] - begins[size_t(document)];
    ASSERT_LE(int64_t(in_rows.size()), (length + seq - 1) / seq) << document;
  }
}

TEST(Packing, MakesEveryPredictionOnceAndCutsOnlyLongDocuments) {
  for (uint64_t trial = 0; trial < 60; ++trial) {
    const int64_t seq = 1 + int64_t(philox(22, 0, trial)[0] % 40);
    const std::vector<int64_t> lengths = random_lengths(trial, 1 + trial * 3, seq);
    SCOPED_TRACE(fmt::format("trial {}, seq {}", trial, seq));
    expect_packed(CountedTokens(lengths, -1), lengths, seq);
    expect_packed(CountedTokens(lengths, 1 << 20), lengths, seq);
  }
}

TEST(Packing, PlacesEachDocumentWhereTheLeastRoomIsLeft) {
  // Predictions 6, 5, 4, 3, 2 in sequences of 10: 6 + 4 and 5 + 3 + 2 leave no room.
  const CountedTokens source({4, 7, 3, 6, 5}, -1);
  const Packing packing(source, 10);
  ASSERT_EQ(packing.sequences(), 2);
  const auto lengths = [&](int64_t row) {
    std::vector<int32_t> counts;
    for (const DocumentSlice& slice : packing.slices(row)) counts.push_back(slice.count);
    return counts;
  };
  EXPECT_THAT(lengths(0), ElementsAre(6, 4));
  EXPECT_THAT(lengths(1), ElementsAre(5, 3, 2));
}

TEST(Packing, IsSharedByTheRanksOfAProcess) {
  const CountedTokens source({4, 7}, -1), other({4, 7}, -1);
  const auto packing = share_packing(source, 10);
  EXPECT_EQ(share_packing(source, 10), packing);
  EXPECT_NE(share_packing(source, 5), packing);
  EXPECT_NE(share_packing(other, 10), packing);
}

TEST(Packing, LeavesLittlePadding) {
  const std::vector<int64_t> lengths = random_lengths(1, 3000, 512);
  const CountedTokens source(lengths, -1);
  const Sampler sampler(source, 512, 1, {.is_packed = true});
  ASSERT_TRUE(sampler.padding());
  EXPECT_LT(*sampler.padding(), .01);
  EXPECT_EQ(Sampler(source, 512, 1).padding(), std::nullopt);
}

TEST(Packing, SamplesOfAnEpochAreAllSequencesAndTheirTargetsAreCounted) {
  const std::vector<int64_t> lengths = random_lengths(2, 200, 30);
  for (const int32_t start_token : {-1, 1 << 20}) {
    const CountedTokens source(lengths, start_token);
    for (const bool is_packed : {false, true}) {
      const Sampler sampler(source, 30, 7, {.document_mask = true, .is_packed = is_packed});
      Tokens tokens(30), targets(30), starts(30);
      int64_t sum = 0;
      for (int64_t sample = 0; sample < sampler.windows(); ++sample) {
        sampler.read(sample, tokens, targets, starts);
        const auto count = std::ranges::count_if(targets, [](int32_t t) { return t >= 0; });
        ASSERT_EQ(count, sampler.targets(sample)) << sample;
        sum += count;
      }
      // Unlike packing, the stream predicts nothing after its last token.
      const int64_t last = !is_packed && start_token >= 0 ? 1 : 0;
      EXPECT_EQ(sum, predictions_of(lengths, start_token >= 0) - last);
    }
  }
}

TEST(Documents, WindowsKnowTheirDocumentsAndPredictNoOtherOnes) {
  const CountedTokens source({3, 4, 0, 2, 6}, -1);
  const Sampler sampler(source, 5, 1, {.document_mask = true});
  Tokens tokens(5), targets(5), starts(5);
  for (int64_t sample = 0; sample < sampler.windows(); ++sample) {
    sampler.read(sample, tokens, targets, starts);
    if (tokens[0] == 0) {
      EXPECT_THAT(starts, ElementsAre(0, 0, 0, 3, 3));
      EXPECT_THAT(targets, ElementsAre(1, 2, -1, 4, 5));
    } else if (tokens[0] == 5) {
      EXPECT_THAT(starts, ElementsAre(0, 0, 2, 2, 4));
      EXPECT_THAT(targets, ElementsAre(6, -1, 8, -1, 10));
    } else {
      EXPECT_THAT(targets, ElementsAre(11, 12, 13, 14, -1));
    }
  }
}

TrainConfig config_for(const std::string& path, bool mask, const std::string& packing = "none") {
  TrainConfig config;
  config.data.paths = {path};
  config.data.document_mask = mask;
  config.data.packing = packing;
  config.train.seq = 16;
  return config;
}

TEST(Documents, AreThoseOfFilesLinesAndIndices) {
  const TempDir dir;
  const std::vector<std::string> texts{"first", "a second one", "3"};
  std::string lines;
  std::filesystem::create_directories(dir / "text");
  for (size_t i = 0; i < texts.size(); ++i) {
    write_bytes(dir / fmt::format("text/{}", i), texts[i]);
    lines += nlohmann::json{{"text", texts[i]}}.dump() + "\n";
  }
  write_bytes(dir / "lines.jsonl", lines);
  for (const std::string& path : {dir / "text", dir / "lines.jsonl"}) {
    const auto source = open_configured(config_for(path, true));
    EXPECT_THAT(source->document_begins(), ElementsAre(0, 6, 19, 21)) << path;
    EXPECT_EQ(source->start_token(), kBos);
  }
  // Two files; the second sequence of the first document, and an empty document.
  IndexFixture index{.lengths = {3, 2, 4, 1}, .documents = {0, 2, 2, 3}};
  write_bytes(dir / "a.bin", tokens_as(random_tokens(10, 257), 2));
  write_bytes(dir / "a.idx", index.text());
  write_megatron(dir / "b", random_tokens(7, 257), {4, 3});
  TrainConfig config = config_for(dir / "a", true);
  config.data.paths.push_back(dir / "b");
  const auto source = open_configured(config);
  EXPECT_THAT(source->document_begins(), ElementsAre(0, 5, 5, 9, 10, 14, 17));
  EXPECT_EQ(source->start_token(), -1);
}

TEST(Documents, OfALargeIndexAreAllRead) {
  const TempDir dir;
  std::vector<int64_t> lengths(150'000);  // more than one read
  for (size_t i = 0; i < lengths.size(); ++i) lengths[i] = int64_t(i % 3);
  const int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t(0));
  write_megatron(dir / "x", Tokens(size_t(tokens), 1), lengths);
  std::vector<int64_t> expected;
  for (size_t i = 0; i < lengths.size(); ++i) {
    expected.push_back(int64_t(i / 3) * 3 + (i % 3 == 2 ? 1 : 0));
  }
  EXPECT_EQ(read_index_begins(dir / "x.idx"), expected);
}

std::string refusal(const TrainConfig& config) {
  try {
    open_configured(config);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Documents, OfFilesWithoutThemAreRefusedByName) {
  const TempDir dir;
  write_bytes(dir / "x.npy", npy_text("<u2", random_tokens(100, 257), 2));
  EXPECT_THAT(refusal(config_for(dir / "x.npy", true)),
              HasSubstr("data.document_mask = true: 1 token file, 100 tokens have no documents"));
  EXPECT_THAT(refusal(config_for(dir / "x.npy", false, "best_fit")),
              HasSubstr("data.packing = best_fit: 1 token file"));
  write_megatron(dir / "ones", random_tokens(5, 257), {1, 1, 1, 1, 1});
  EXPECT_THAT(refusal(config_for(dir / "ones", false, "best_fit")),
              HasSubstr("no document has two tokens"));
}

TEST(Documents, OfAPackedRunAreInItsFingerprint) {
  const TempDir dir;
  write_megatron(dir / "x", random_tokens(100, 257), {40, 60});
  const std::string windows = open_configured(config_for(dir / "x", true))->fingerprint();
  const std::string packed =
      open_configured(config_for(dir / "x", true, "best_fit"))->fingerprint();
  EXPECT_NE(windows, packed);
  write_megatron(dir / "x", random_tokens(100, 257), {50, 50});
  EXPECT_EQ(open_configured(config_for(dir / "x", true))->fingerprint(), windows);
  EXPECT_NE(open_configured(config_for(dir / "x", true, "best_fit"))->fingerprint(), packed);
}

TEST(Documents, AreKnownToTheWindowsOfValidation) {
  const auto source = std::make_shared<CountedTokens>(std::vector<int64_t>{3, 4, 5}, -1);
  const StreamWindows windows(source, 6, 3, 0, true);
  const ScoredWindow first = windows.read(0), second = windows.read(1);
  EXPECT_THAT(first.document_starts, ElementsAre(0, 0, 0, 3, 3, 3));
  EXPECT_THAT(first.targets, ElementsAre(1, 2, -1, 4, 5, 6));
  EXPECT_THAT(second.document_starts, ElementsAre(0, 0, 0, 0, 4, 4));
  EXPECT_THAT(second.targets, ElementsAre(-1, -1, -1, -1, 8, 9));
  EXPECT_TRUE(StreamWindows(source, 6, 3, 0).read(0).document_starts.empty());
}

}  // namespace
}  // namespace tandem
