// Attention of few single rows over pages on a GPU, in clusters of any size.
#include <cmath>
#include <initializer_list>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "core/cuda/share.h"
#include "kernels/cuda/hopper_chunks.h"
#include "tests/gpu/paged_checks.h"

namespace tandem::test {
namespace {

class FewPagedRows : public OnGpus {};

/// Case in bf16 whose keys have about the same weight.
PagedCase equal_case(const PagedShape& shape, int64_t window, const std::vector<Lengths>& lengths) {
  Draw draw{1};
  return PagedCase(DType::bf16, shape, window, lengths, draw);
}

/// Rows of sequences of their own: right with every size of clusters; for each with the same bits
/// and pages whether the kernel that attends appends or not, in repeated runs, and row by row.
void expect_few(const Exec& exec, const PagedCase& c) {
  for (const Lengths& each : c.lengths) ASSERT_LE(each.all, c.shape.max_tokens);
  const PagedReference reference(c);
  EXPECT_GT(reference.nearest_mistake(), 2) << "one wrong key would pass: " << describe(c, kAtOnce);
  const PagedRuns any = in_any_order(kAtOnce);
  PagedRunner splits(exec, c, in_clusters(any, kNoCluster));
  EXPECT_LE(reference.error_of(splits.run()), 1) << describe(c, any);
  const auto expected_pages = splits.cached();
  for (const int blocks : {0, 1, 2, 4, 8, 16}) {
    const PagedRuns runs = in_clusters(any, blocks);
    SCOPED_TRACE(describe(c, runs));
    PagedRunner separately(exec, c, runs), together(exec, c, appending(runs));
    const auto expected = separately.run();
    EXPECT_LE(reference.error_of(expected), 1);
    EXPECT_EQ(together.run(), expected);
    EXPECT_EQ(separately.cached(), expected_pages);
    EXPECT_EQ(together.cached(), expected_pages);
    EXPECT_EQ(run_paged(exec, c, appending(runs)), expected);
    if (blocks == 0) continue;
    PagedRuns alone = appending(runs);
    alone.together = false;
    EXPECT_EQ(run_paged(exec, c, alone), expected);
  }
  const int invariant = c.shape.max_tokens <= 8192 ? 4 : 8;
  EXPECT_EQ(run_paged(exec, c, appending(kAtOnce)), run_paged(exec, c, in_clusters(any, invariant)))
      << "batch-invariant rows are in clusters of another size: " << describe(c, kAtOnce);
}

TEST_P(FewPagedRows, FewRowsMatchTheReferenceInClustersOfAnySize) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    for (uint64_t trial = 0; trial < 24; ++trial) {
      SCOPED_TRACE(trial);
      expect_few(exec, draw_few(trial));
    }
  });
}

TEST_P(FewPagedRows, FewRowsOfLongSequencesMatchTheReference) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    for (const int64_t head_dim : {64, 128}) {
      for (const int64_t window : {0, 1500}) {
        const std::vector<Lengths> decode = {{2080, 1}, {2081, 1}, {2047, 1}, {2048, 1}};
        expect_few(exec, decisive_case(1, DType::bf16, {32, 8, head_dim, 0, 2112}, window, decode));
        const std::vector<Lengths> far = {{8192, 1}, {17, 1}, {8129, 1}};
        for (const int64_t max_tokens : {8192, 8256}) {  // other clusters for batch-invariant bits
          expect_few(exec,
                     decisive_case(2, DType::bf16, {10, 2, head_dim, 0, max_tokens}, window, far));
        }
      }
    }
  });
}

TEST_P(FewPagedRows, FewRowsRunInClustersWhereTheGpuHasThem) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    for (const int64_t head_dim : {64, 128}) {
      if (!gpu::has_hopper_pages(head_dim) || !gpu::this_share()->alone()) {
        GTEST_SKIP() << "needs a Hopper GPU of its own";
      }
      const PagedCase c =
          equal_case({16, 2, head_dim, 0, 1200}, 0, {{1000, 1}, {1024, 1}, {1100, 1}, {1199, 1}});
      const PagedRuns any = in_any_order(kAtOnce);
      const auto splits = run_paged(exec, c, in_clusters(any, kNoCluster));
      for (const int blocks : {1, 16}) {
        const PagedRuns runs = in_clusters(any, blocks);
        EXPECT_NE(run_paged(exec, c, runs), splits) << "bits of splits: " << describe(c, runs);
      }
    }
  });
}

// The largest score of several pages of a block rises from page to page.
TEST_P(FewPagedRows, FewRowsReadAllKeysOfEqualWeight) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    for (const int64_t head_dim : {64, 128}) {
      for (const int64_t group : {1, 4, 8}) {
        for (const int64_t window : {0, 150}) {
          std::vector<PagedRuns> all;
          for (const int blocks : {1, 2}) {
            all.push_back(in_clusters(kAtOnce, blocks));
            all.push_back(appending(all.back()));
          }
          expect_right(exec,
                       equal_case({2 * group, 2, head_dim, 0, 320}, window,
                                  {{260, 1}, {257, 1}, {200, 1}, {193, 1}}),
                       all);
        }
      }
    }
  });
}

TEST_P(FewPagedRows, FewRowsReadNoKeyOutsideTheirMasks) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    int64_t num_before = 0;  // tokens of a page that is read, before a window
    for (uint64_t trial = 50; trial < 58; ++trial) {
      const PagedCase c = draw_few(trial);
      const PagedCase poisoned = draw_few(trial);
      for (size_t s = 0; s < c.lengths.size(); ++s) {
        const int64_t newest = c.lengths[s].all - 1, first = c.first_key(newest);
        num_before += first % kPageTokens;
        for (int64_t t = 0; t < c.line() * kPageTokens; ++t) {
          if (t >= first && t < newest) continue;
          for (int64_t i = 0; i < c.kv_width(); ++i) {
            poisoned.keys.set(c.slot(s, t) * c.kv_width() + i, NAN);
            poisoned.values.set(c.slot(s, t) * c.kv_width() + i, NAN);
          }
        }
      }
      for (const int blocks : {1, 8, 16}) {
        const PagedRuns runs = in_clusters(in_any_order(kAtOnce), blocks);
        const auto expected = run_paged(exec, c, runs);
        EXPECT_EQ(run_paged(exec, poisoned, runs), expected) << trial;
        EXPECT_EQ(run_paged(exec, poisoned, appending(runs)), expected) << trial;
      }
    }
    EXPECT_GT(num_before, 0) << "no window begins inside a page";
  });
}

/// Runs of a token of each sequence, enqueued one after the other behind copies of what they read
/// on the device, without a wait.
class EnqueuedRuns {
 public:
  EnqueuedRuns(const Exec& exec, const PagedCase& c, const PagedRuns& runs)
      : exec_(exec),
        c_(c),
        tokens_(c.lengths[0].new_ones),
        sequences_(int64_t(c.lengths.size())),
        appends_(runs.appends),
        rope_(exec, c.shape.max_tokens, c.shape.head_dim, PagedRunner::kRopeTheta),
        attention_(exec, shape_of(c, runs), rope_, c.window),
        lines_(upload(lines(), sequences_)),
        pages_(upload(c.pages, int64_t(c.pages.size()))),
        positions_(upload(positions(), c.count_rows())),
        keys_(on_device(exec, c.keys, {c.slots(), c.kv_width()})),
        values_(on_device(exec, c.values, {c.slots(), c.kv_width()})),
        qkv_(on_device(exec, c.qkv, {sequences_, tokens_ * c.width()})),
        out_(exec, DType::bf16, {sequences_, tokens_ * out_width()}) {
    for (const Values* each : {&positions_, &keys_, &values_, &qkv_}) {
      read_.emplace_back(each->memory.bytes(), exec.device);
    }
  }

  /// Outputs and pages as of PagedRunner.
  std::pair<std::vector<std::byte>, std::vector<std::byte>> run() {
    const Values* const sources[] = {&positions_, &keys_, &values_, &qkv_};
    for (size_t i = 0; i < read_.size(); ++i) {
      clear(exec_, all_bytes_of(read_[i]));  // else what the call before left would be right, too
      copy(exec_, all_bytes_of(sources[i]->memory), all_bytes_of(read_[i]));
    }
    clear(exec_, all_bytes_of(out_.memory));
    for (int64_t i = 0; i < tokens_; ++i) attend(i);
    return {bytes_of({&out_.memory}), bytes_of({&read_[1], &read_[2]})};
  }

 private:
  static PagedShape shape_of(const PagedCase& c, const PagedRuns& runs) {
    PagedShape shape = c.shape;
    shape.batch_invariant = runs.batch_invariant;
    shape.cluster = runs.cluster;
    return shape;
  }
  int64_t out_width() const { return c_.shape.heads * c_.shape.head_dim; }
  std::vector<int32_t> lines() const {
    std::vector<int32_t> all(c_.lengths.size());
    std::iota(all.begin(), all.end(), 0);
    return all;
  }
  std::vector<int32_t> positions() const {
    std::vector<int32_t> all;
    for (int32_t i = 0; i < int32_t(tokens_); ++i) {
      for (const Lengths& each : c_.lengths) all.push_back(each.all - int32_t(tokens_) + i);
    }
    return all;
  }
  Values upload(const std::vector<int32_t>& numbers, int64_t count) const {
    Values result(exec_, DType::i32, {count});
    copy(exec_, Tensor::of(std::span(numbers), {count}), result.view);
    return result;
  }

  void attend(int64_t token) {
    const int64_t width = c_.width(), kv_width = c_.kv_width();
    const Tensor row =
        read_[3].view(DType::bf16, {sequences_, tokens_ * width}).narrow(1, token * width, width);
    const auto cached = [&](const Memory& memory) {
      return memory.view(DType::bf16, {int64_t(c_.pages.size()), kPageTokens, c_.shape.kv_heads,
                                       c_.shape.head_dim});
    };
    const PagedRows rows{
        .sequences = lines_.view,
        .positions =
            read_[0].view(DType::i32, {c_.count_rows()}).narrow(0, token * sequences_, sequences_),
        .pages = pages_.memory.view(DType::i32, {sequences_, c_.line()}),
        .distinct_sequences = appends_};
    attention_.run(exec_, rows, row.narrow(1, 0, out_width()), row.narrow(1, out_width(), kv_width),
                   row.narrow(1, out_width() + kv_width, kv_width), cached(read_[1]),
                   cached(read_[2]), out_.view.narrow(1, token * out_width(), out_width()));
  }
  std::vector<std::byte> bytes_of(std::initializer_list<const Memory*> memories) const {
    std::vector<std::byte> all;
    for (const Memory* memory : memories) {
      const Memory found = to_host(exec_, *memory);
      all.insert(all.end(), found.data(), found.data() + found.bytes());
    }
    return all;
  }

  Exec exec_;
  const PagedCase& c_;
  int64_t tokens_, sequences_;
  bool appends_;
  RopeTable rope_;
  PagedAttention attention_;
  Values lines_, pages_, positions_, keys_, values_, qkv_, out_;
  std::vector<Memory> read_;  // copies of positions_, keys_, values_ and qkv_
};

TEST_P(FewPagedRows, RunsWaitForWhatWasEnqueuedBefore) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    const std::vector<Lengths> lengths = {{4, 4}, {66, 4}, {130, 4}, {600, 4}};
    for (const int64_t head_dim : {64, 128}) {
      const PagedCase c = equal_case({16, 2, head_dim, 0, 640}, 0, lengths);
      for (const int blocks : {kNoCluster, 0, 1, 8, 16}) {
        const PagedRuns by_token = in_clusters({1, true, false, false}, blocks);
        for (const PagedRuns& runs : {by_token, appending(by_token)}) {
          PagedRunner waits(exec, c, runs);  // for the host before and after each run
          const auto expected = waits.run(), expected_pages = waits.cached();
          EnqueuedRuns enqueued(exec, c, runs);
          for (int call = 0; call < 5; ++call) {
            const auto [found, pages] = enqueued.run();
            EXPECT_EQ(found, expected) << describe(c, runs) << ", call " << call;
            EXPECT_EQ(pages, expected_pages) << describe(c, runs) << ", call " << call;
          }
        }
      }
    }
  });
}

TEST_P(FewPagedRows, FewRowsMayBePadding) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    for (uint64_t trial = 60; trial < 66; ++trial) {
      const PagedCase c = draw_few(trial);
      for (PagedRuns runs : {in_clusters(in_any_order(kAtOnce), 4), kAtOnce}) {
        std::vector<std::byte> expected = run_paged(exec, c, runs);
        const size_t bytes = expected.size() / size_t(c.count_rows());
        expected.insert(expected.end(), bytes, std::byte{0});
        runs.padding = 1;
        EXPECT_EQ(run_paged(exec, c, runs), expected) << describe(c, runs);
        EXPECT_EQ(run_paged(exec, c, appending(runs)), expected) << describe(c, runs);
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Gpus, FewPagedRows, ::testing::Values(1), gpus_name);

}  // namespace
}  // namespace tandem::test
