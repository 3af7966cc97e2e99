// Sparse messages: bytes of the reference, which sorts; size, error bounds, error feedback, means
// over ranks and senders, values that are not finite, messages of any bytes.
#include "codec/topk.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include "tests/codec/topk_reference.h"
#include "tests/codec/values.h"

namespace tandem::test {
namespace {

using codec::TopK;
using codec::TopKMean;
using testing::HasSubstr;

const Exec kHost;

Tensor tensor_of(std::vector<float>& values) {
  return Tensor::of(std::span(values), {int64_t(values.size())});
}

std::vector<TopK> settings() {
  std::vector<TopK> all;
  for (const int chunk : {4096, 3000, 64, 7, 1}) {
    for (const int k : {1, 64, 3000}) {
      for (const int bits : {2, 3, 8}) {
        if (k <= chunk) all.push_back({chunk, k, bits});
      }
    }
  }
  return all;
}

std::string name_of(const TopK& topk) {
  return fmt::format("chunk {}, k {}, {} bits", topk.chunk, topk.k, topk.bits);
}

std::vector<Input> inputs(int64_t count) {
  std::vector<Input> all = any_inputs(count);
  Input ties{"ties", std::vector<float>(size_t(count))};
  for (int64_t i = 0; i < count; ++i) ties.values[size_t(i)] = float(philox(1, 2, i)[0] % 5) - 2;
  all.push_back(ties);
  Input sparse{"few", std::vector<float>(size_t(count))};
  for (int64_t i = 5; i < count; i += 200) sparse.values[size_t(i)] = uniform(70, i);
  all.push_back(sparse);
  return all;
}

std::vector<std::byte> encoded(const TopK& topk, float beta, std::vector<float> delta,
                               std::vector<float>& error) {
  std::vector<std::byte> message(size_t(topk.bytes(int64_t(delta.size()))), std::byte(0xa5));
  encode_topk(kHost, topk, beta, tensor_of(delta), tensor_of(error), message.data());
  return message;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    if (std::bit_cast<uint32_t>(a[i]) != std::bit_cast<uint32_t>(b[i])) return false;
  }
  return true;
}

TEST(TopK, BytesAndErrorMatchTheReference) {
  for (const TopK& topk : settings()) {
    for (const int64_t count : {int64_t(9), int64_t(5001)}) {
      if (count / topk.chunk > 200) continue;
      for (const Input& input : inputs(count)) {
        std::vector<float> error(input.values.size());
        for (size_t i = 0; i < error.size(); ++i) error[i] = input.values[i] * 0.25f;
        std::vector<float> expected_error(error.size());
        for (size_t i = 0; i < error.size(); ++i) {
          expected_error[i] = error[i] * 0.95f + input.values[i];
        }
        const auto expected = SparseReference{topk}.encode(expected_error);
        const auto message = encoded(topk, 0.95f, input.values, error);
        ASSERT_EQ(message, expected) << name_of(topk) << ", " << count << ", " << input.name;
        ASSERT_TRUE(same_bits(error, expected_error))
            << name_of(topk) << ", " << count << ", " << input.name;
      }
    }
  }
}

TEST(TopK, MessagesHaveTheSizeOfTheFormula) {
  EXPECT_EQ((TopK{4096, 64, 2}.bytes(4096)), 4 + 64 * 14 / 8);
  EXPECT_EQ((TopK{4096, 64, 2}.bytes(10 * 4096)), 10 * (4 + 64 * 14 / 8));
  EXPECT_EQ((TopK{4096, 64, 2}.bytes(4096 + 1)), 116 + 8);  // one value of the last chunk
  EXPECT_EQ((TopK{4096, 32, 4}.bytes(4096)), 4 + 64);
  EXPECT_EQ((TopK{4096, 64, 2}.bytes(0)), 0);
}

/// Range of the magnitudes that a chunk sends.
struct Range {
  double smallest = INFINITY, largest = 0;

  Range(const TopK& topk, const float* values, int count) {
    for (const int i : SparseReference{topk}.chosen(values, count)) {
      smallest = std::min(smallest, std::fabs(double(values[i])));
      largest = std::max(largest, std::fabs(double(values[i])));
    }
  }
};

TEST(TopK, SentValuesAreWithinHalfAnIntervalOfTheirRange) {
  constexpr int64_t kCount = 5001;
  for (const TopK& topk : settings()) {
    for (const Input& input : finite_inputs(kCount)) {
      std::vector<Range> ranges;
      for (int64_t c = 0; c < topk.chunks(kCount); ++c) {
        ranges.emplace_back(topk, &input.values[size_t(c * topk.chunk)], topk.count_of(c, kCount));
      }
      std::vector<float> error(input.values.size());
      const auto message = encoded(topk, 0, input.values, error);
      for (const auto& [index, value] : SparseReference{topk}.decode(message, kCount)) {
        const auto& [smallest, largest] = ranges[size_t(index / topk.chunk)];
        const double width = (largest - smallest) / (1 << (topk.bits - 1));
        const double bound = width / 2 + largest * 0x1p-8 + (1 << topk.bits) * 0x1p-127;
        ASSERT_LE(std::fabs(double(value) - double(input.values[size_t(index)])), bound)
            << name_of(topk) << ", " << input.name << " " << index;
      }
    }
  }
}

TEST(TopK, SentAndUnsentValuesAddUpToAllDeltas) {
  const TopK topk{256, 16, 2};
  constexpr int64_t kCount = 1000;
  std::vector<float> error(kCount);
  std::vector<double> sent(kCount), given(kCount);
  for (uint64_t round = 0; round < 200; ++round) {
    const std::vector<float> delta = uniform_values(80 + round, kCount);
    for (size_t i = 0; i < kCount; ++i) given[i] += double(delta[i]);
    const auto message = encoded(topk, 1, delta, error);
    for (const auto& [index, value] : SparseReference{topk}.decode(message, kCount)) {
      sent[size_t(index)] += double(value);
    }
  }
  double missing = 0, largest = 0, unsent = 0;
  for (size_t i = 0; i < kCount; ++i) {
    missing = std::max(missing, std::fabs(given[i] - sent[i] - double(error[i])));
    largest = std::max(largest, std::fabs(given[i]));
    unsent = std::max(unsent, std::fabs(double(error[i])));
  }
  EXPECT_LE(missing, 1e-4);
  EXPECT_GT(unsent, 1) << "control: without the error, the sums differ";
  EXPECT_GT(largest, 1);
}

TEST(TopK, MeansAreOverRanksOrSenders) {
  const TopK topk{512, 40, 3};
  constexpr int64_t kCount = 1300;
  constexpr int kRanks = 5;
  std::vector<std::vector<std::byte>> messages;
  std::vector<const std::byte*> pointers;
  std::vector<float> sums(kCount), by_ranks(kCount, NAN), by_senders(kCount, NAN);
  std::vector<int> senders(kCount);
  for (uint64_t rank = 0; rank < kRanks; ++rank) {
    std::vector<float> delta = uniform_values(90 + rank, kCount), error(kCount);
    for (size_t i = 0; i < kCount; ++i) delta[i] += i % 512 < 20 ? 4 : 0;  // are sent by all
    messages.push_back(encoded(topk, 1, delta, error));
    pointers.push_back(messages.back().data());
    for (const auto& [index, value] : SparseReference{topk}.decode(messages.back(), kCount)) {
      sums[size_t(index)] += value;
      ++senders[size_t(index)];
    }
  }
  mean_topk(kHost, topk, pointers, TopKMean::ranks, tensor_of(by_ranks));
  mean_topk(kHost, topk, pointers, TopKMean::senders, tensor_of(by_senders));
  for (size_t i = 0; i < kCount; ++i) {
    ASSERT_EQ(by_ranks[i], sums[i] / kRanks) << i;
    ASSERT_EQ(by_senders[i], senders[i] ? sums[i] / float(senders[i]) : 0) << i;
  }
  EXPECT_EQ(*std::max_element(senders.begin(), senders.end()), kRanks);
  EXPECT_EQ(*std::min_element(senders.begin(), senders.end()), 0);
}

TEST(TopK, NaNAndInfinityReachTheReceiverAndNoOtherChunk) {
  const TopK topk{128, 4, 2};
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    std::vector<float> delta(384, 1.0f), error(384), values(384);
    delta[200] = bad;
    const auto message = encoded(topk, 1, delta, error);
    mean_topk(kHost, topk, {{message.data()}}, TopKMean::ranks, tensor_of(values));
    EXPECT_TRUE(std::isnan(values[200]));
    for (size_t i = 0; i < 384; ++i) EXPECT_EQ(std::isnan(values[i]) && i / 128 != 1, false) << i;
    EXPECT_EQ(error[200], 0) << "the next message is finite again";
  }
}

TEST(TopK, AnyBytesStayInsideTheValues) {
  const TopK topk{1000, 77, 5};
  constexpr int64_t kCount = 2300;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    std::vector<std::byte> message(static_cast<size_t>(topk.bytes(kCount)));
    for (size_t i = 0; i < message.size(); ++i) {
      message[i] = std::byte(philox(seed, 7, i)[0]);
    }
    std::vector<float> values(kCount + 2, 42.0f);
    mean_topk(kHost, topk, {{message.data()}}, TopKMean::senders,
              Tensor::of(std::span(values).subspan(1, kCount), {kCount}));
    EXPECT_EQ(values.front(), 42.0f);
    EXPECT_EQ(values.back(), 42.0f);
  }
}

TEST(TopK, SettingsAndTensorsOutOfRangeAreRefused) {
  const auto refusal = [](const TopK& topk) { return refusal_of([&] { topk.check(); }); };
  EXPECT_EQ(refusal({4096, 0, 2}), "topk: k 0: expected 1 to 4096");
  EXPECT_EQ(refusal({64, 65, 2}), "topk: k 65: expected 1 to 64");
  EXPECT_EQ(refusal({4097, 1, 2}), "topk: chunk 4097: expected 1 to 4096");
  EXPECT_EQ(refusal({64, 1, 9}), "topk: bits 9: expected 2 to 8");
  EXPECT_EQ(refusal({64, 1, 1}), "topk: bits 1: expected 2 to 8");
  std::vector<float> a(10), b(11);
  std::vector<std::byte> message(1000);
  EXPECT_THAT(refusal_of([&] {
                encode_topk(kHost, TopK(), 1, tensor_of(a), tensor_of(b), message.data());
              }),
              HasSubstr("encode_topk: error f32[11]"));
}

}  // namespace
}  // namespace tandem::test
