// Mixture-of-Experts rows in a wire format, encoded by GPU code on emulated warps: the messages
// equal the CPU's, whatever the parts that rows are encoded in.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>

#include "overlap/moe/cuda/wire.cuh"
#include "tests/codec/bytes.h"
#include "tests/codec/values.h"

namespace tandem::test {
namespace {

using namespace gpu;

constexpr int64_t kRows = 3;

struct RowCase {
  Wire wire;
  DType dtype;
  int64_t columns;
  std::string describe() const {
    return fmt::format("{} of {} {}", wire.describe(), columns, name_of(dtype));
  }
  WireParams make_params() const { return WireParams::of(wire, columns, dtype); }
};

/// Calls `test` for every format, with rows shorter than a block, rows that end within a block, and
/// rows longer than a warp processes at once.
template <typename Test>
void for_cases(const Test& test) {
  int number = 0;
  for (const std::string& name : all_wires()) {
    for (const int64_t columns : {8, 136, 1096}) {
      test(RowCase{Wire::parse(name), ++number % 2 ? DType::bf16 : DType::f16, columns});
    }
  }
}

Bytes random_rows(const RowCase& c, int64_t rows, uint64_t stream) {
  std::vector<float> values(static_cast<size_t>(rows * c.columns));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = uniform(stream, int64_t(i)) * (i % 61 == 7 ? 30.0f : 1.0f);
  }
  return stored_as(c.dtype, values);
}

float value_at(const Bytes& values, DType dtype, size_t i) {
  uint16_t bits = 0;
  std::memcpy(&bits, &values[2 * i], 2);
  return dtype == DType::bf16 ? BFloat16{bits}.to_float() : Float16{bits}.to_float();
}

/// Messages of the rows as encoded by the CPU, one after another.
Bytes messages_of(const RowCase& c, const Bytes& rows) {
  const size_t message = c.wire.bytes(c.columns, c.dtype), row_bytes = size_t(c.columns) * 2;
  Bytes all(rows.size() / row_bytes * message);
  for (size_t row = 0; row < rows.size() / row_bytes; ++row) {
    Bytes values(rows.begin() + std::ptrdiff_t(row * row_bytes),
                 rows.begin() + std::ptrdiff_t((row + 1) * row_bytes));
    encode(c.wire, host_tensor(values, c.dtype), std::span(all).subspan(row * message, message));
  }
  return all;
}
Bytes decoded(const RowCase& c, const Bytes& messages) {
  const size_t message = c.wire.bytes(c.columns, c.dtype), row_bytes = size_t(c.columns) * 2;
  Bytes rows(messages.size() / message * row_bytes);
  for (size_t row = 0; row < messages.size() / message; ++row) {
    decode(c.wire, std::span(messages).subspan(row * message, message),
           Tensor(&rows[row * row_bytes], c.dtype, {c.columns}));
  }
  return rows;
}

template <typename Body>
void on_a_warp(const RowCase& c, const Body& body) {
  static Warp warp;
  with_block(c.wire, [&]<typename Block>() {
    warp.run([&] { body.template operator()<Block>(c.make_params()); });
  });
}

TEST(MoeWire, RowsMatchTheCpusMessages) {
  for_cases([](const RowCase& c) {
    const Bytes rows = random_rows(c, kRows, 3), expected = messages_of(c, rows);
    const size_t row_bytes = size_t(c.columns) * 2;
    Bytes messages(expected.size()), local_rows(rows.size()), arrived(rows.size());
    on_a_warp(c, [&]<typename Block>(const WireParams& wire) {
      for_row_slices(kRows, 0, wire.layout.blocks, [&](int64_t row, int64_t first) {
        const size_t at = size_t(row);
        encode_row<Block>(wire, c.dtype, &rows[at * row_bytes], first,
                          &messages[at * wire.layout.bytes],
                          row == 1 ? nullptr : &local_rows[at * row_bytes]);
      });
    });
    on_a_warp(c, [&]<typename Block>(const WireParams& wire) {
      for_row_slices(kRows, 0, wire.layout.blocks, [&](int64_t row, int64_t first) {
        const size_t at = size_t(row);
        decode_row<Block>(wire, c.dtype, &messages[at * wire.layout.bytes], first,
                          &arrived[at * row_bytes]);
      });
    });
    EXPECT_EQ(difference(expected, messages), "") << c.describe();
    Bytes values = decoded(c, expected);
    EXPECT_EQ(difference(values, arrived), "") << c.describe();
    std::fill_n(values.begin() + std::ptrdiff_t(row_bytes), row_bytes,
                std::byte{});  // row 1 was not saved
    EXPECT_EQ(difference(values, local_rows), "") << c.describe();
  });
}

TEST(MoeWire, SumsMatchTheCpusMessages) {
  constexpr int kResults = 4, kTopK = 3;
  const std::vector<int32_t> position{2, -1, 0, -1, 3, -1, 1, 2, 3};
  const std::vector<float> weights{0.5f, 9, 0.25f, 9, 0.7f, 9, -0.3f, 0.1f, 0.6f};
  for_cases([&](const RowCase& c) {
    const bool weighted = c.columns != 136;
    const Bytes results = random_rows(c, kResults, 4);
    std::vector<float> sums;
    for (size_t row = 0; row < size_t(kRows); ++row) {
      for (size_t column = 0; column < size_t(c.columns); ++column) {
        float sum = 0;
        for (size_t k = row * kTopK; k < (row + 1) * kTopK; ++k) {
          if (position[k] < 0) continue;
          const size_t at = size_t(position[k]) * size_t(c.columns) + column;
          sum = std::fma(weighted ? weights[k] : 1.0f, value_at(results, c.dtype, at), sum);
        }
        sums.push_back(sum);
      }
    }
    const Bytes expected = messages_of(c, stored_as(c.dtype, sums));
    const auto results_of = [&](int64_t row) {
      const int64_t first = row * kTopK;
      return ExpertResults{results.data(),
                           c.dtype,
                           c.columns,
                           &position[size_t(first)],
                           weighted ? &weights[size_t(first)] : nullptr,
                           kTopK};
    };
    Bytes messages(expected.size());
    const int64_t blocks = c.make_params().layout.blocks, cut = std::min<int64_t>(2, blocks);
    for (const auto& [begin, end] : {std::pair(cut, blocks), std::pair(int64_t(0), cut)}) {
      on_a_warp(c, [&, begin = begin, end = end]<typename Block>(const WireParams& wire) {
        for_row_slices(kRows, begin, end, [&](int64_t row, int64_t first) {
          encode_sum<Block>(wire, results_of(row), first, end,
                            &messages[size_t(row) * wire.layout.bytes]);
        });
      });
    }
    EXPECT_EQ(difference(expected, messages), "") << c.describe();
    // Decoded messages, added to zero sums.
    Bytes added(size_t(kRows * c.columns) * 2);
    on_a_warp(c, [&]<typename Block>(const WireParams& wire) {
      for_row_slices(kRows, 0, wire.layout.blocks, [&](int64_t row, int64_t first) {
        const BlockPosition at(first, wire.layout.blocks);
        float sum[kLaneValues] = {};
        add_message<Block>(wire, &messages[size_t(row) * wire.layout.bytes], at, sum);
        store_elements(&added[size_t(row * c.columns) * 2], c.dtype, c.columns, at.block, at.lane,
                       at.on, sum);
      });
    });
    const Bytes values = decoded(c, expected);
    for (size_t i = 0; i < added.size() / 2; ++i) {  // -0 becomes 0 in a sum
      ASSERT_EQ(value_at(added, c.dtype, i), value_at(values, c.dtype, i)) << c.describe();
    }
  });
}

}  // namespace
}  // namespace tandem::test
