// Rows of a run, as a cache hands them to its attention.
#include "engine/infer/cache/kv_cache.h"

#include <gtest/gtest.h>

#include <vector>

#include "engine/model/rotary.h"

namespace tandem {
namespace {

ModelConfig small_model() {
  ModelConfig config;
  config.vocab = 8, config.hidden = 8, config.layers = 1;
  config.heads = config.kv_heads = 2, config.head_dim = 4;
  config.ffn = 8, config.max_seq = 128;
  return config;
}

/// Whether a cache finds each of these rows outside chunks to be the only one of its sequence.
bool are_distinct(const std::vector<int32_t>& sequences, std::vector<PagedChunk> chunks = {}) {
  constexpr int64_t kTokens = 128, kSequences = 4;
  const ModelConfig config = small_model();
  const ModelLayout layout(config, 1, 0);
  const RopeTables rope(Exec{}, config.max_seq, config);
  KvCache cache(Exec{}, config, layout, rope, DType::f32,
                {kSequences * pages_of(kTokens), kSequences, 16, kTokens});
  std::vector<int32_t> positions(sequences.size()), pages(kSequences * size_t(pages_of(kTokens)));
  for (size_t i = 1; i < sequences.size(); ++i) {
    if (sequences[i] == sequences[i - 1]) positions[i] = positions[i - 1] + 1;
  }
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = int32_t(i);
  cache.set_rows(sequences, positions, pages, std::move(chunks));
  return cache.distinct_sequences();
}

TEST(KvCache, TellsWhetherRowsOutsideChunksAreOfSequencesOfTheirOwn) {
  EXPECT_TRUE(are_distinct({0}));
  EXPECT_TRUE(are_distinct({2, 0, 1}));
  EXPECT_FALSE(are_distinct({0, 0}));
  EXPECT_FALSE(are_distinct({2, 0, 1, 1}));
  EXPECT_TRUE(are_distinct({1, -1, -1})) << "padding";
  EXPECT_TRUE(are_distinct({0, 1, 1, 1}, {{1, 3}})) << "a chunk";
  EXPECT_TRUE(are_distinct({3, 0, 1, 1, 2, 2}, {{2, 2}, {4, 2}}));
  EXPECT_FALSE(are_distinct({3, 3, 1, 1}, {{2, 2}}));
  EXPECT_FALSE(are_distinct({0, 1, 1, 1}, {{2, 2}})) << "a row and a chunk of one sequence";
  EXPECT_TRUE(are_distinct({1, 1}, {{0, 2}}));
}

}  // namespace
}  // namespace tandem
