// Attention over pages: batches of sequences whose rows come in chunks, in pages scattered over the
// cache, against attention in double, and bit for bit against one sequence, a token at a time.
#include "kernels/attention/paged_attention.h"

#include <gtest/gtest.h>

#include <numeric>

#include "gemm/gemm.h"
#include "tandem/error.h"
#include "tests/kernels/attention_reference.h"
#include "tests/kernels/paged_reference.h"

namespace tandem {
namespace {
using namespace tandem::test;

/// Generator of a case's choices.
struct Choices {
  uint64_t trial;
  uint64_t count = 0;
  int64_t up_to(int64_t bound) { return int64_t(philox(5, trial, count++)[0] % uint64_t(bound)); }
  template <typename T, size_t n>
  T of(const T (&values)[n]) {
    return values[up_to(int64_t(n))];
  }
};

struct Sequence {
  Sequence(DType dtype, const PagedShape& s, int64_t length_, int index)
      : length(length_),
        q(dtype, length, s.heads * s.head_dim),
        k(dtype, length, s.kv_heads * s.head_dim),
        v(dtype, length, s.kv_heads * s.head_dim),
        out(dtype, length, s.heads * s.head_dim) {
    const std::string name = std::to_string(index);
    q.fill(("q" + name).c_str()), k.fill(("k" + name).c_str()), v.fill(("v" + name).c_str());
  }
  int64_t length, done = 0;
  Matrix q, k, v, out;
};

/// Keys and values in pages, which `pages` lists in a random order for each sequence.
struct PagedCache {
  PagedCache(DType dtype, const PagedShape& s, int64_t sequences, Choices& choices)
      : line((s.max_tokens + kPageTokens - 1) / kPageTokens),
        count(sequences * line),
        pages(size_t(count)),
        keys(dtype, count * kPageTokens, s.kv_heads * s.head_dim),
        values(dtype, count * kPageTokens, s.kv_heads * s.head_dim),
        shape(s) {
    std::iota(pages.begin(), pages.end(), 0);
    for (int64_t i = count - 1; i > 0; --i) {
      std::swap(pages[size_t(i)], pages[size_t(choices.up_to(i + 1))]);
    }
    keys.fill("stale"), values.fill("stale");
  }
  Tensor view(const Matrix& matrix) const {
    return Tensor(matrix.tensor.data(), matrix.tensor.dtype(),
                  {count, kPageTokens, shape.kv_heads, shape.head_dim});
  }
  int64_t line, count;
  std::vector<int32_t> pages;
  Matrix keys, values;
  const PagedShape& shape;
};

void copy_rows(const Matrix& from, int64_t first, Matrix& to, int64_t to_first, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t j = 0; j < from.tensor.dim(1); ++j) {
      to.set(to_first + i, j, from.get(first + i, j));
    }
  }
}

/// Rows of one run: up to `max_rows` of the sequences, in chunks of random sizes, and padding.
struct Batch {
  Batch(DType dtype, const PagedShape& s, std::vector<Sequence>& all, Choices& choices)
      : q(dtype, s.rows, s.heads * s.head_dim, s.heads * s.head_dim + 3),
        k(dtype, s.rows, s.kv_heads * s.head_dim),
        v(dtype, s.rows, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim + 5),
        out(dtype, s.rows, s.heads * s.head_dim, s.heads * s.head_dim + 1) {
    q.fill("padding"), k.fill("padding"), v.fill("padding"), out.fill("padding");
    const int64_t first = choices.up_to(int64_t(all.size()));
    for (size_t i = 0; i < all.size(); ++i) {
      const size_t index = (size_t(first) + i) % all.size();
      Sequence& sequence = all[index];
      const int64_t padding = choices.up_to(8) == 0 ? 1 : 0;
      const int64_t room = s.rows - int64_t(sequences.size()) - padding;
      const int64_t left = std::min(room, sequence.length - sequence.done);
      if (left <= 0 || choices.up_to(4) == 0) continue;
      for (int64_t row = 0; row < padding; ++row) sequences.push_back(-1), positions.push_back(7);
      const int64_t count = choices.up_to(2) == 0 ? 1 : 1 + choices.up_to(left);
      const auto row = int64_t(sequences.size());
      copy_rows(sequence.q, sequence.done, q, row, count);
      copy_rows(sequence.k, sequence.done, k, row, count);
      copy_rows(sequence.v, sequence.done, v, row, count);
      chunks.push_back({index, row, sequence.done, count});
      for (int64_t each = 0; each < count; ++each) {
        sequences.push_back(int32_t(index)), positions.push_back(int32_t(sequence.done + each));
      }
      sequence.done += count;
    }
  }
  void run(PagedAttention& attention, PagedCache& cache, std::vector<Sequence>& all,
           const Tensor& sinks) {
    const auto rows = int64_t(sequences.size());
    const auto lines = int64_t(cache.pages.size()) / cache.line;
    const auto first = [&](const Matrix& m) { return m.tensor.rows(0, rows); };
    attention.run(
        Exec{},
        {Tensor::of(std::span(sequences), {rows}), Tensor::of(std::span(positions), {rows}),
         Tensor::of(std::span(cache.pages), {lines, cache.line})},
        first(q), first(k), first(v), cache.view(cache.keys), cache.view(cache.values), first(out),
        sinks);
    for (const Chunk& c : chunks) copy_rows(out, c.row, all[c.sequence].out, c.done, c.count);
    for (int64_t row = 0; row < rows; ++row) {
      if (sequences[size_t(row)] >= 0) continue;
      for (int64_t j = 0; j < out.tensor.dim(1); ++j) EXPECT_EQ(out.get(row, j), 0) << "padding";
    }
  }
  struct Chunk {
    size_t sequence;
    int64_t row, done, count;
  };
  std::vector<Chunk> chunks;
  std::vector<int32_t> sequences, positions;
  Matrix q, k, v, out;
};

bool all_done(const std::vector<Sequence>& all) {
  return std::ranges::all_of(all, [](const Sequence& s) { return s.done == s.length; });
}

/// The sequences of a case, through batches.
void run_in_batches(DType pages, const PagedShape& shape, const RopeTable& rope, int64_t window,
                    std::vector<Sequence>& all, Choices& choices, const Tensor& sinks = {}) {
  PagedAttention attention(Exec{}, shape, rope, window);
  PagedCache cache(pages, shape, int64_t(all.size()), choices);
  while (!all_done(all)) {
    Batch batch(all[0].q.tensor.dtype(), shape, all, choices);
    batch.run(attention, cache, all, sinks);
  }
}

/// Outputs of a sequence, a token at a time in pages 0, 1, ...
Doubles one_at_a_time(PagedShape shape, const RopeTable& rope, int64_t window, const Sequence& s,
                      const Tensor& sinks) {
  shape.rows = 1;
  PagedAttention attention(Exec{}, shape, rope, window);
  Choices choices{0};
  PagedCache cache(DType::f32, shape, 1, choices);
  std::iota(cache.pages.begin(), cache.pages.end(), 0);
  Matrix out(s.q.tensor.dtype(), s.length, shape.heads * shape.head_dim);
  for (int64_t p = 0; p < s.length; ++p) {
    const auto row = [&](const Matrix& m) { return m.tensor.rows(p, 1); };
    std::vector<int32_t> sequence{0}, position{int32_t(p)};
    attention.run(Exec{},
                  {Tensor::of(std::span(sequence), {1}), Tensor::of(std::span(position), {1}),
                   Tensor::of(std::span(cache.pages), {1, cache.line})},
                  row(s.q), row(s.k), row(s.v), cache.view(cache.keys), cache.view(cache.values),
                  row(out), sinks);
  }
  return out.values();
}

class PagedAttentionTest : public ::testing::TestWithParam<std::tuple<DType, int>> {};
INSTANTIATE_TEST_SUITE_P(DTypesThreads, PagedAttentionTest,
                         ::testing::Combine(::testing::Values(DType::f32, DType::bf16),
                                            ::testing::Values(1, 3)),
                         [](const auto& test) {
                           return std::string(name_of(std::get<0>(test.param))) + "_threads" +
                                  std::to_string(std::get<1>(test.param));
                         });

TEST_P(PagedAttentionTest, MatchesReferenceAndOneTokenAtATimeBitForBit) {
  const auto [dtype, threads] = GetParam();
  constexpr int64_t kHeads[][2] = {{1, 1}, {4, 2}, {6, 1}, {3, 3}};
  constexpr int64_t kDims[] = {2, 6, 16, 80};
  constexpr int64_t kWindows[] = {0, 0, 1, 33, 64, 1000};
  for (uint64_t trial = 0; trial < 25; ++trial) {
    SCOPED_TRACE("trial " + std::to_string(trial));
    Choices choices{trial};
    const auto& heads = kHeads[choices.up_to(4)];
    const int64_t window = choices.of(kWindows), max_tokens = 1 + choices.up_to(200);
    PagedShape shape{heads[0], heads[1], choices.of(kDims), 1 + choices.up_to(100), max_tokens};
    shape.softcap = trial % 4 == 1 ? 0.8 : 0;
    const RopeTable rope(Exec{}, max_tokens, shape.head_dim, kTheta);
    std::vector<Sequence> all;
    for (int i = 0, count = int(1 + choices.up_to(6)); i < count; ++i) {
      all.emplace_back(dtype, shape, 1 + choices.up_to(max_tokens), i);
    }
    Matrix sinks(DType::f32, 1, shape.heads);
    sinks.fill("sinks");
    const bool has_sinks = trial % 3 == 0;
    const Tensor of_heads =
        has_sinks ? Tensor(sinks.tensor.data(), DType::f32, {shape.heads}) : Tensor();
    set_kernel_threads(threads);
    run_in_batches(DType::f32, shape, rope, window, all, choices, of_heads);
    set_kernel_threads(1);
    for (Sequence& s : all) {
      const AttentionShape whole{
          1, s.length, shape.heads, shape.kv_heads, shape.head_dim, shape.softcap};
      EXPECT_LE(
          relative_error(s.out.values(), reference(whole, s.q.values(), s.k.values(), s.v.values(),
                                                   window, has_sinks ? sinks.values() : Doubles())),
          tolerance(dtype));
      ASSERT_EQ(s.out.values(), one_at_a_time(shape, rope, window, s, of_heads));
    }
  }
}

TEST(PagedAttention, PagesInBf16AreWithinTheirRoundingAndKeepTheBits) {
  const PagedShape shape{4, 2, 16, 90, 150};
  const RopeTable rope(Exec{}, shape.max_tokens, shape.head_dim, kTheta);
  std::vector<Doubles> first;
  for (uint64_t trial = 0; trial < 4; ++trial) {
    Choices choices{trial};
    std::vector<Sequence> all;
    for (int i = 0; i < 3; ++i) all.emplace_back(DType::bf16, shape, 150 - 40 * i, i);
    set_kernel_threads(trial % 2 == 0 ? 1 : 2);
    run_in_batches(DType::bf16, shape, rope, 0, all, choices);
    for (size_t i = 0; i < all.size(); ++i) {
      const Sequence& s = all[i];
      const AttentionShape whole{1, s.length, shape.heads, shape.kv_heads, shape.head_dim};
      EXPECT_LE(relative_error(s.out.values(),
                               reference(whole, s.q.values(), s.k.values(), s.v.values())),
                3 * tolerance(DType::bf16));
      if (trial == 0) first.push_back(s.out.values());
      EXPECT_EQ(s.out.values(), first[i]);
    }
  }
}

TEST(PagedAttention, NoDecidingKeyIsMissingExtraShiftedOrOfAnotherPage) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const PagedCase& c : decisive_cases(dtype, 64, 5056)) {
      const PagedReference right(c);
      EXPECT_GT(right.nearest_mistake(), 2) << "one wrong key would pass";
      for (const PagedRuns& runs : {kAtOnce, {37, true, false}, {50, false, false}}) {
        EXPECT_LE(right.error_of(run_paged(Exec{}, c, runs)), 1)
            << name_of(dtype) << " window " << c.window << ", " << c.shape.max_tokens << " tokens";
      }
    }
  }
}

TEST(PagedAttention, RowsOfADecodeStepMatchTheReference) {
  for (uint64_t trial = 0; trial < 12; ++trial) {
    const PagedCase c = draw_few(trial);
    const PagedReference right(c);
    EXPECT_GT(right.nearest_mistake(), 2) << "one wrong key would pass: " << trial;
    for (const int cluster : {0, 8, kNoCluster}) {
      PagedRuns runs = kAtOnce;
      runs.appends = cluster == 8, runs.cluster = cluster;
      EXPECT_LE(right.error_of(run_paged(Exec{}, c, runs)), 1) << trial;
    }
  }
}

TEST(PagedAttention, ClustersOfOtherSizesAreRefused) {
  const RopeTable rope(Exec{}, 64, 16, kTheta);
  for (const int cluster : {-2, 3, 17, 32}) {
    PagedShape shape{2, 1, 16, 4, 64};
    shape.cluster = cluster;
    EXPECT_THROW(PagedAttention(Exec{}, shape, rope), InvalidArgument) << cluster;
  }
}

}  // namespace
}  // namespace tandem
