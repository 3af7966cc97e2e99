// Attention over pages on a GPU, with bounds that one wrong key exceeds.
#include <cmath>
#include <string>
#include <vector>

#include "tests/gpu/paged_checks.h"

namespace tandem::test {
namespace {

using namespace tandem::test;

class PagedInference : public OnGpus {};

TEST_P(PagedInference, KeysOfEqualWeightAreAllRead) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    for (uint64_t trial = 0; trial < 40; ++trial) {
      SCOPED_TRACE(trial);
      for (const DType dtype : kDTypes) {
        expect_right(exec, draw_case(trial, dtype),
                     {kAtOnce, kChunked, in_clusters(kAtOnce, 1), in_clusters(kAtOnce, 2)});
      }
    }
  });
}

TEST_P(PagedInference, NoDecidingKeyIsMissingExtraShiftedOrOfAnotherPage) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    for (const DType dtype : kDTypes) {
      for (const int64_t head_dim : {64, 96, 128, 256}) {
        if (dtype == DType::f32 && head_dim > 128) continue;  // refused below
        for (const PagedCase& c : decisive_cases(dtype, head_dim, 32768)) {
          expect_right(exec, c, {kAtOnce, kChunked, {37, true, true}, {50, false, true}});
        }
      }
    }
  });
}

TEST_P(PagedInference, OtherHeadSizesAreRefusedByName) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    const auto refuses = [&](DType dtype, int64_t head_dim, const std::string& words) {
      Draw draw{1};
      const PagedCase c(dtype, {2, 1, head_dim, 0, 70}, 0, {{65, 3}}, draw);
      try {
        run_paged(exec, c, kAtOnce);
        ADD_FAILURE() << words << ": accepted";
      } catch (const Unsupported& error) {
        EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
      }
    };
    refuses(DType::f32, 256, "head_dim 256 in f32: expected at most 128, or bf16");
    refuses(DType::bf16, 272, "head_dim 272: expected a multiple of 16 up to 256");
    refuses(DType::bf16, 24, "head_dim 24: expected a multiple of 16 up to 256");
  });
}

TEST_P(PagedInference, BitsDependNeitherOnTheBatchNorOnTheChunks) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    for (uint64_t trial = 100; trial < 115; ++trial) {
      for (const DType dtype : kDTypes) {
        const PagedCase c = draw_case(trial, dtype);
        for (const bool as_chunks : {false, true}) {
          const auto expected = run_paged(exec, c, {1 << 20, true, as_chunks});
          EXPECT_EQ(run_paged(exec, c, {1 << 20, false, as_chunks}), expected) << trial;
          EXPECT_EQ(run_paged(exec, c, {1 + int64_t(trial % 37), true, as_chunks}), expected)
              << trial;
        }
      }
    }
  });
}

/// Rows outside chunks: right; with the same bits at once, by sequence and by token, and in any
/// order in two runs.
void expect_singles(const Exec& exec, const PagedCase& c) {
  for (const Lengths& each : c.lengths) ASSERT_LE(each.all, c.shape.max_tokens);
  expect_right(exec, c, {kAtOnce});
  const auto expected = run_paged(exec, c, kAtOnce);
  for (const PagedRuns& runs : {PagedRuns{1 << 20, false, false}, PagedRuns{1, true, false}}) {
    EXPECT_EQ(run_paged(exec, c, runs), expected) << describe(c, runs);
  }
  const PagedRuns any = in_any_order(kAtOnce);
  EXPECT_EQ(run_paged(exec, c, any), run_paged(exec, c, any)) << describe(c, any);
}

TEST_P(PagedInference, SinglesMatchTheReferenceInAnyBatchBitForBit) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    const std::vector<Lengths> edges = {{1, 1},   {64, 2},  {127, 1}, {129, 3},  {256, 1},
                                        {258, 2}, {700, 1}, {385, 2}, {1026, 4}, {1200, 20}};
    for (const int64_t head_dim : {64, 128}) {
      for (const int64_t group : {1, 4, 8, 16}) {
        for (const int64_t window : {0, 130, 1030}) {
          const PagedShape shape{2 * group, 2, head_dim, 0, 1200};
          expect_singles(exec, decisive_case(uint64_t(group), DType::bf16, shape, window, edges));
        }
      }
      const std::vector<Lengths> far = {{4096, 2}, {4098, 3}, {300, 1}, {8193, 26}};
      expect_singles(exec, decisive_case(3, DType::bf16, {4, 1, head_dim, 0, 8256}, 0, far));
      expect_singles(exec,
                     decisive_case(4, DType::bf16, {4, 1, head_dim, 0, 33792}, 0, {{33000, 34}}));
    }
  });
}

TEST_P(PagedInference, InvariantSinglesHaveTheSameBitsInBatchesOfAnySize) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    for (const int64_t head_dim : {64, 128}) {
      for (const int64_t rows : {kManySingles - 1, kManySingles, kManySingles + 1}) {
        std::vector<Lengths> lengths;
        for (int32_t s = 0; s < int32_t(rows); ++s) lengths.push_back({1 + 46 * s, 1});
        const PagedCase c =
            decisive_case(uint64_t(rows), DType::bf16, {8, 2, head_dim, 0, 1500}, 0, lengths);
        expect_singles(exec, c);
        const auto expected = run_paged(exec, c, kAtOnce);
        const PagedRuns separate{1 << 20, false, false};
        EXPECT_EQ(run_paged(exec, c, separate), expected) << describe(c, separate);
        EXPECT_EQ(run_paged(exec, c, appending(separate)), expected) << describe(c, separate);
        EXPECT_EQ(run_paged(exec, c, appending(kAtOnce)), expected) << rows;
      }
    }
  });
}

TEST_P(PagedInference, SinglesBeforeChunksMatchTheReference) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    for (const int64_t head_dim : {64, 128}) {
      for (const int64_t singles : {kManySingles - 1, 3 * kManySingles}) {
        std::vector<Lengths> lengths;
        for (int32_t s = 0; s < int32_t(singles); ++s) lengths.push_back({1 + 15 * s, 1});
        lengths.push_back({1450, 300});
        lengths.push_back({70, 70});
        const PagedShape shape{8, 2, head_dim, 0, 1500};
        const PagedRuns runs{1 << 20, true, true, true, singles};
        expect_right(exec, decisive_case(uint64_t(singles), DType::bf16, shape, 0, lengths),
                     {runs, appending(runs)});
      }
    }
  });
}

TEST_P(PagedInference, PaddingIsZeroAndChangesNoOtherRow) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    const std::vector<Lengths> lengths = {{64, 1}, {1100, 40}, {300, 2}};
    for (const int64_t head_dim : {64, 96, 128}) {
      const PagedCase c = decisive_case(5, DType::bf16, {16, 1, head_dim, 0, 1200}, 0, lengths);
      for (PagedRuns runs : {kAtOnce, in_any_order(kAtOnce)}) {
        std::vector<std::byte> expected = run_paged(exec, c, runs);
        const size_t bytes = expected.size() / size_t(c.count_rows());
        expected.insert(expected.end(), bytes, std::byte{0});
        runs.padding = 1;
        EXPECT_EQ(run_paged(exec, c, runs), expected) << describe(c, runs);
      }
    }
  });
}

TEST_P(PagedInference, ManySinglesMatchTheReference) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    const PagedShape shape{2, 1, 64, 0, 300};
    const std::vector<Lengths> lengths = {{300, 300}, {290, 280}, {40, 40}};
    expect_right(exec, decisive_case(4, DType::bf16, shape, 0, lengths), {kAtOnce});
  });
}

/// Prompts of sequences that may have cached tokens, of up to `max_tokens`, in bf16.
PagedCase draw_prompts(uint64_t trial, int64_t sequences, int64_t max_tokens) {
  Draw draw{trial};
  const int64_t dims[] = {64, 128, 96}, groups[] = {1, 2, 3, 4, 7, 8, 48};
  const int64_t windows[] = {0, 0, 1, 65, 128, 700};
  PagedShape shape{};
  shape.head_dim = dims[trial % 3];
  shape.kv_heads = 1 + draw.up_to(2);
  shape.heads = shape.kv_heads * groups[draw.up_to(7)];
  shape.max_tokens = max_tokens;
  const int64_t window = windows[draw.up_to(6)];
  std::vector<Lengths> lengths;
  for (int64_t s = 0; s < sequences; ++s) {
    const auto all = int32_t(1 + draw.up_to(max_tokens));
    lengths.push_back({all, draw.up_to(2) == 0 ? all : int32_t(1 + draw.up_to(all))});
  }
  return PagedCase(DType::bf16, shape, window, lengths, draw);
}

TEST_P(PagedInference, BitsDependNotOnTheDivisionOfPrompts) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    for (uint64_t trial = 0; trial < 12; ++trial) {
      const PagedCase c = draw_prompts(trial, 1 + int64_t(trial) % 4, 1200);
      const auto expected = run_paged(exec, c, kChunked);
      for (const int64_t max_rows : {31 + int64_t(trial), 64L, 129L, 500L}) {
        for (const bool together : {true, false}) {
          const PagedRuns runs{max_rows, together, true};
          EXPECT_EQ(run_paged(exec, c, runs), expected) << trial << ": " << describe(c, runs);
        }
      }
    }
  });
}

TEST_P(PagedInference, ChunksMatchTheReferenceWhateverTheirNumber) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    for (const int64_t head_dim : {64, 128}) {
      for (const int64_t window : {0, 300}) {
        std::vector<Lengths> lengths = {{1000, 900}, {700, 130}};
        const PagedShape shape{8, 2, head_dim, 0, 1000};
        expect_right(exec, decisive_case(uint64_t(window), DType::bf16, shape, window, lengths),
                     {kChunked, {301, true, true}, {5, true, true}});
        lengths.clear();
        for (int32_t s = 0; s < 150; ++s) lengths.push_back({1 + s % 140, 1 + s % 140 / 3});
        expect_right(exec, decisive_case(1, DType::bf16, {4, 1, head_dim, 0, 140}, 0, lengths),
                     {kChunked});
      }
    }
  });
}

TEST_P(PagedInference, WhatNoTokenWroteIsNotRead) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    for (uint64_t trial = 20; trial < 29; ++trial) {
      PagedCase c = draw_prompts(trial, 3, 500);
      const auto expected = run_paged(exec, c, kChunked);
      for (size_t s = 0; s < c.lengths.size(); ++s) {
        const int64_t tokens = c.lengths[s].all, end = (tokens - 1) / kPageTokens + 1;
        for (int64_t t = tokens; t < end * kPageTokens; ++t) {
          for (int64_t i = 0; i < c.kv_width(); ++i) {
            c.keys.set(c.slot(s, t) * c.kv_width() + i, NAN);
            c.values.set(c.slot(s, t) * c.kv_width() + i, NAN);
          }
        }
        for (int64_t page = end; page < c.line(); ++page) {
          c.pages[s * size_t(c.line()) + size_t(page)] = 1 << 30;
        }
      }
      EXPECT_EQ(run_paged(exec, c, kChunked), expected) << trial;
      EXPECT_EQ(run_paged(exec, c, {77, true, true}), expected) << trial;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Gpus, PagedInference, ::testing::Values(1), gpus_name);

}  // namespace
}  // namespace tandem::test
