// Attention over pages on a GPU, with bounds that one wrong key exceeds.
#include <string>
#include <vector>

#include "tests/gpu/kernel_operands.h"
#include "tests/kernels/paged_reference.h"

namespace tandem::test {
namespace {

using namespace tandem::test;

class PagedInference : public OnGpus {};

std::string describe(const PagedCase& c, const PagedRuns& runs) {
  return fmt::format("{} head_dim {} heads {}/{} window {}, {} sequences, chunks {}, {} rows",
                     name_of(c.dtype()), c.shape.head_dim, c.shape.heads, c.shape.kv_heads,
                     c.window, c.lengths.size(), runs.as_chunks, runs.max_rows);
}

constexpr PagedRuns kChunked{1 << 20, true, true};

/// Expects results within their bounds, twice the distance of which no mistake is within.
void expect_right(const Exec& exec, const PagedCase& c, const std::vector<PagedRuns>& all) {
  const PagedReference reference(c);
  EXPECT_GT(reference.nearest_mistake(), 2) << "one wrong key would pass: " << describe(c, all[0]);
  for (const PagedRuns& runs : all) {
    EXPECT_LE(reference.error_of(run_paged(exec, c, runs)), 1) << describe(c, runs);
  }
}

TEST_P(PagedInference, KeysOfEqualWeightAreAllRead) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    for (uint64_t trial = 0; trial < 40; ++trial) {
      SCOPED_TRACE(trial);
      for (const DType dtype : kDTypes) {
        expect_right(exec, draw_case(trial, dtype), {kAtOnce, kChunked});
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

INSTANTIATE_TEST_SUITE_P(Gpus, PagedInference, ::testing::Values(1), gpus_name);

}  // namespace
}  // namespace tandem::test
