// Kernels of inference on a GPU against those on the CPU: sampling, operations on rows of some
// families, and GEMMs of few rows.
#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gemm/cuda/rows_gemm.h"
#include "gemm/gemm.h"
#include "kernels/sample.h"
#include "kernels/swiglu.h"
#include "tandem/random.h"
#include "tests/gpu/kernel_operands.h"
#include "tests/kernels/paged_cases.h"

namespace tandem::test {
namespace {

using namespace tandem::test;

class Inference : public OnGpus {};

/// Repeats after a few thousand elements: cheap to fill.
Values periodic_values(DType dtype, int64_t rows, int64_t columns, uint64_t seed) {
  Values result(Exec{}, dtype, {rows, columns});
  const Memory random = random_buffer(dtype, rows * columns, seed);
  copy(Exec{}, all_bytes(random), all_bytes(result.memory));
  return result;
}

/// Tokens fed from sampled rows, on exec's device.
std::vector<int32_t> fed(const Exec& exec, const Tensor& sampled, std::vector<int32_t> tokens) {
  const Values values(exec, DType::i32, {1, int64_t(tokens.size())});
  const Tensor host = Tensor::of(std::span(tokens), {1, int64_t(tokens.size())});
  copy(exec, host, values.view);
  feed_tokens(exec, sampled, values.view);
  copy(exec, values.view, host);
  return tokens;
}

TEST_P(Inference, SamplingChoosesTheCpusTokens) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    for (uint64_t trial = 0; trial < 60; ++trial) {
      Draw draw{1000 + trial};
      const int64_t sizes[] = {1, 7, 300, 5000, 32000, 151936};
      const int64_t vocab = sizes[draw.up_to(6)], rows = 1 + draw.up_to(5);
      Values logits = periodic_values(DType::f32, rows, vocab, trial);
      auto* const values = reinterpret_cast<float*>(logits.memory.data());
      const double scale = trial % 3 == 0 ? 1 : trial % 3 == 1 ? 20 : 200;
      for (int64_t i = 0; i < rows * vocab; ++i) {
        values[i] *= float(scale);
        if (trial % 4 == 1) values[i] = std::round(values[i]);  // equal logits
      }
      if (trial % 10 == 9) values[(rows - 1) * vocab + vocab / 2] = NAN;
      Values options(Exec{}, DType::u8, {rows, int64_t(sizeof(SampleOptions))});
      auto* const of_rows = reinterpret_cast<SampleOptions*>(options.memory.data());
      for (int64_t row = 0; row < rows; ++row) {
        of_rows[row] = {.temperature = draw.up_to(4) == 0 ? 0 : 0.3 + 2 * draw.unit(),
                        .top_p = draw.up_to(2) == 0 ? 1 : 0.05 + 0.95 * draw.unit(),
                        .top_k = draw.up_to(2) == 0 ? 0 : 1 + draw.up_to(60),
                        .uniform = draw.unit()};
      }
      const Values on_logits = on_device(exec, logits, {rows, vocab});
      const Values on_options = on_device(exec, options, {rows, int64_t(sizeof(SampleOptions))});
      const Values scratch(exec, DType::u8, {rows, sample_scratch(exec, vocab)});
      const Values sampled(exec, DType::u8, {rows, int64_t(sizeof(Sampled))});
      sample_rows(exec, on_logits.view, on_options.view, scratch.view, sampled.view);
      const Memory found = to_host(exec, sampled.memory);
      std::vector<int32_t> tokens;
      for (int64_t i = 0, n = draw.up_to(300); i < n; ++i) {
        tokens.push_back(draw.up_to(2) == 0 ? int32_t(i) : int32_t(-1 - draw.up_to(rows)));
      }
      const Tensor on_host(found.data(), DType::u8, {rows, int64_t(sizeof(Sampled))});
      EXPECT_EQ(fed(exec, sampled.view, tokens), fed({}, on_host, tokens)) << "trial " << trial;
      for (int64_t row = 0; row < rows; ++row) {
        Sampled result;
        std::memcpy(&result, found.data() + size_t(row) * sizeof(Sampled), sizeof(Sampled));
        const Sampled expected = sample_row({values + row * vocab, size_t(vocab)}, of_rows[row]);
        EXPECT_EQ(result.token, expected.token) << "trial " << trial << " row " << row;
        EXPECT_NEAR(result.log_prob, expected.log_prob, 1e-3) << "trial " << trial;
      }
    }
  });
}

/// Generated products: numbers of rows and of columns in all instances of the kernels, and k with
/// all numbers of splits.
struct RowsCase {
  int64_t m, n, k;

  explicit RowsCase(Draw& draw, uint64_t trial)
      : m(1 + draw.up_to(trial % 3 == 0 ? 8 : gpu::max_gemm_rows())),
        n(1 + draw.up_to(700) + (trial % 8 == 7 ? 16384 : 0)),
        k(64 * (1 + draw.up_to(trial % 8 == 7   ? 4
                               : trial % 4 == 0 ? 80
                                                : 20))) {}
};

TEST_P(Inference, GemmsOfFewRowsMatchTheCpuAndDoNotDependOnEachOther) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    for (uint64_t trial = 0; trial < 40; ++trial) {
      Draw draw{2000 + trial};
      const auto [m, n, k] = RowsCase(draw, trial);
      const bool same_bits = trial % 4 < 2;
      const Values a = periodic_values(DType::bf16, m, k, trial);
      const Values weight = periodic_values(DType::bf16, n, k, trial + 1);
      const Values expected(Exec{}, DType::f32, {m, n});
      gemm(a.view, weight.view.transposed(), expected.view);
      const Values on_a = on_device(exec, a, {m, k}), on_weight = on_device(exec, weight, {n, k});
      const Values out(exec, DType::f32, {m, n}), few(exec, DType::f32, {m, n});
      ASSERT_TRUE(gpu::is_rows_gemm(on_a.view, on_weight.view, out.view));
      gpu::rows_gemm(exec.stream, on_a.view, on_weight.view, out.view, {.same_bits = same_bits});
      const Memory found = to_host(exec, out.memory);
      const auto* const values = reinterpret_cast<const float*>(found.data());
      for (int64_t i = 0; i < m * n; ++i) {
        ASSERT_NEAR(values[i], expected.view.as<float>()[i], 1e-6 * double(k)) << trial << " " << i;
      }
      const Values twice = on_device(exec, out, {m, n});
      gpu::rows_gemm(exec.stream, on_a.view, on_weight.view, twice.view,
                     {.accumulate = true, .same_bits = same_bits});
      const Memory doubled = to_host(exec, twice.memory);
      for (int64_t i = 0; i < m * n; ++i) {
        ASSERT_EQ(reinterpret_cast<const float*>(doubled.data())[i], 2 * values[i]) << trial;
      }
      if (n % 2 == 0) {
        const Values hidden(exec, DType::bf16, {m, n}), inner(exec, DType::bf16, {m, n / 2}),
            fused(exec, DType::bf16, {m, n / 2});
        gpu::rows_gemm(exec.stream, on_a.view, on_weight.view, hidden.view,
                       {.same_bits = same_bits});
        swiglu_forward(exec, hidden.view.narrow(1, 0, n / 2), hidden.view.narrow(1, n / 2, n / 2),
                       inner.view);
        gpu::rows_gemm_swiglu(exec.stream, on_a.view, on_weight.view, fused.view, same_bits);
        const Memory expected_bits = to_host(exec, inner.memory);
        const Memory fused_bits = to_host(exec, fused.memory);
        EXPECT_EQ(std::memcmp(expected_bits.data(), fused_bits.data(), fused_bits.bytes()), 0)
            << trial;
      }
      for (const int64_t count : {int64_t{1}, 1 + draw.up_to(m)}) {
        // Without the option, one or two rows may have a kernel of their own.
        if (!same_bits && (count <= 2) != (m <= 2)) continue;
        const int64_t row = draw.up_to(m - count + 1);
        gpu::rows_gemm(exec.stream, on_a.view.rows(row, count), on_weight.view,
                       few.view.rows(0, count), {.same_bits = same_bits});
        const Memory alone = to_host(exec, few.memory);
        EXPECT_EQ(std::memcmp(alone.data(), values + row * n, size_t(count * n) * sizeof(float)), 0)
            << "rows from " << row << " of " << m << " have other bits if only " << count
            << " are computed, n " << n << ", k " << k;
      }
    }
  });
}

TEST_P(Inference, GemmsOfFewRowsReadAndWriteStridedRows) {
  run([](Communicator& comm) {
    for (uint64_t trial = 0; trial < 24; ++trial) {
      Draw draw{2100 + trial};
      const auto [m, n, k] = RowsCase(draw, trial);
      const Alignment of_a{.gap = 8 * draw.up_to(3), .start = 8 * draw.up_to(2)};
      const Alignment of_out{.gap = draw.up_to(6), .start = draw.up_to(5)};
      const DType dtype = kDTypes[trial % 2];
      const gpu::RowsGemmOptions options{.accumulate = draw.up_to(2) == 1,
                                         .same_bits = draw.up_to(2) == 1};
      expect_equal(comm, "rows_gemm",
                   {matrix("a", DType::bf16, m, k, of_a), matrix("weight", DType::bf16, n, k),
                    close(matrix("out", dtype, m, n, of_out), double(k) / 4)},
                   [&](const Exec& exec, const TensorList& of) {
                     if (exec.on_gpu()) {
                       gpu::rows_gemm(exec.stream, of[0], of[1], of[2], options);
                     } else {
                       gemm(of[0], of[1].transposed(), of[2], {.accumulate = options.accumulate});
                     }
                   });
    }
  });
}

// A chain of products, each of which reads what the one before wrote, and overwrites what that
// read.
TEST_P(Inference, GemmsThatStartEarlyWaitForEachOthersRows) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    using Size = std::pair<int64_t, int64_t>;
    for (const auto& [m, width] : {Size{1, 512}, Size{2, 1024}, Size{16, 2048}, Size{64, 4096}}) {
      const int64_t rows = std::min(m, gpu::max_gemm_rows());
      const Values x = periodic_values(DType::bf16, rows, width, 5);
      const Values w = periodic_values(DType::bf16, width, width, 6);
      const Values weight = on_device(exec, w, {width, width});
      Memory first;
      for (int call = 0; call < 6; ++call) {
        const Values a = on_device(exec, x, {rows, width});
        const Values b(exec, DType::bf16, {rows, width});
        const gpu::RowsGemmOptions options{.early = call > 0, .same_bits = m != 2};
        for (int i = 0; i < 4; ++i) {
          gpu::rows_gemm(exec.stream, a.view, weight.view, b.view, options);
          gpu::rows_gemm(exec.stream, b.view, weight.view, a.view, options);
        }
        Memory found = to_host(exec, a.memory);
        if (call == 0) {
          first = std::move(found);
        } else {
          EXPECT_EQ(std::memcmp(found.data(), first.data(), found.bytes()), 0)
              << rows << " rows of " << width << ", call " << call;
        }
      }
    }
  });
}

/// GEMMs of any of the rows of x, added to or in place of the same rows of `start`.
class RowsProducts {
 public:
  RowsProducts(const Exec& exec, uint64_t trial) : RowsProducts(exec, trial, Draw{2200 + trial}) {}

  static constexpr int64_t kRows = 2048;
  size_t row_bytes() const { return size_t(n_) * size_of(dtype_); }
  std::string describe() const {
    return fmt::format("n {} k {}{}", n_, k_, accumulate_ ? " added" : "");
  }

  std::vector<std::byte> run(int64_t row, int64_t m, SameBits same_bits) const {
    const Values out(exec_, dtype_, {m, n_});
    copy(exec_, start_.view.rows(row, m), out.view);
    gemm(exec_, on_x_.view.rows(row, m), on_weight_.view.transposed(), out.view,
         {.accumulate = accumulate_, .same_bits = same_bits});
    const Memory found = to_host(exec_, out.memory);
    return {found.data(), found.data() + found.bytes()};
  }

  /// Compares the first rows with a CPU's.
  void expect_right(const std::vector<std::byte>& found) const {
    constexpr int64_t m = 8;
    const Values expected(Exec{}, DType::f32, {m, n_}), result(Exec{}, dtype_, {m, n_});
    gemm(x_.view.rows(0, m), weight_.view.transposed(), expected.view);
    std::memcpy(result.memory.data(), found.data(), result.memory.bytes());
    for (int64_t i = 0; i < m * n_; ++i) {
      const double product = expected.get(i), start = accumulate_ ? start_.get(i) : 0;
      // cuBLASLt may round a product before it is added.
      const double rounded = std::abs(product) + std::abs(start), value = product + start;
      const double bound = 1e-6 * double(k_) + (dtype_ == DType::bf16 ? rounded / 128 : 0);
      ASSERT_NEAR(result.get(i), value, bound) << describe() << " " << i;
    }
  }

  /// SwiGLU's form. Empty if there is none.
  std::vector<std::byte> run_swiglu(int64_t row, int64_t m, SameBits same_bits) const {
    const Values out(exec_, DType::bf16, {m, n_ / 2});
    if (!gemm_swiglu(exec_, on_x_.view.rows(row, m), on_weight_.view, out.view, same_bits)) {
      return {};
    }
    const Memory found = to_host(exec_, out.memory);
    return {found.data(), found.data() + found.bytes()};
  }

 private:
  RowsProducts(const Exec& exec, uint64_t trial, Draw draw)
      : exec_(exec),
        dtype_(kDTypes[trial % 2]),
        accumulate_(trial % 3 == 0),
        n_(16 * (1 + draw.up_to(160)) + (trial % 8 == 7 ? 16384 : 0)),
        k_(64 * (1 + draw.up_to(trial % 8 == 7   ? 4
                                : trial % 4 == 0 ? 80
                                                 : 20))),
        x_(periodic_values(DType::bf16, kRows, k_, trial)),
        weight_(periodic_values(DType::bf16, n_, k_, trial + 1)),
        start_(periodic_values(dtype_, kRows, n_, trial + 2)),
        on_x_(on_device(exec, x_, {kRows, k_})),
        on_weight_(on_device(exec, weight_, {n_, k_})) {}

  Exec exec_;
  DType dtype_;
  bool accumulate_;
  int64_t n_, k_;
  Values x_, weight_, start_, on_x_, on_weight_;
};

TEST_P(Inference, RowsOfGemmsHaveTheSameBitsWhereAskedFor) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    if (gpu::max_gemm_rows() < kMaxFewRows) GTEST_SKIP() << "needs a Hopper GPU";
    constexpr int64_t kFew[] = {1, 2, 5, 8, 9, 17, 33, 64};
    constexpr int64_t kMany[] = {1, 7, 64, 65, 100, 128, 200, 513, 1024, 2048};
    for (uint64_t trial = 0; trial < 16; ++trial) {
      Draw draw{2300 + trial};
      const RowsProducts products(exec, trial);
      const auto expect_same = [&](SameBits same_bits, int64_t all,
                                   std::span<const int64_t> sizes) {
        const std::vector<std::byte> expected = products.run(0, all, same_bits);
        products.expect_right(expected);
        for (const int64_t m : sizes) {
          const int64_t row = draw.up_to(all - m + 1);
          const std::vector<std::byte> found = products.run(row, m, same_bits);
          EXPECT_EQ(std::memcmp(found.data(), expected.data() + size_t(row) * products.row_bytes(),
                                found.size()),
                    0)
              << products.describe() << ": " << m << " rows from " << row << " of " << all;
        }
      };
      expect_same(SameBits::few_rows, kMaxFewRows, kFew);
      expect_same(SameBits::many_rows, RowsProducts::kRows, kMany);
      const auto fused = products.run_swiglu(0, kMaxFewRows, SameBits::few_rows);
      ASSERT_FALSE(fused.empty());
      for (const int64_t m : kFew) {
        const auto found = products.run_swiglu(0, m, SameBits::few_rows);
        EXPECT_EQ(std::memcmp(found.data(), fused.data(), found.size()), 0)
            << products.describe() << ": SwiGLU of " << m << " rows";
      }
      EXPECT_TRUE(products.run_swiglu(0, 5, SameBits::many_rows).empty());
    }
  });
}

// Control: without the option some numbers of rows have bits of their own, which the test above
// would find.
TEST_P(Inference, RowsOfGemmsHaveOtherBitsWhereNotAskedFor) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    int others = 0;
    for (uint64_t trial = 0; trial < 4; ++trial) {
      const RowsProducts products(exec, trial);
      const auto expected = products.run(0, RowsProducts::kRows, SameBits::no);
      products.expect_right(expected);
      for (const int64_t m : {1, 2, 5, 17, 64, 65, 100, 200, 513, 1024}) {
        const auto found = products.run(0, m, SameBits::no);
        others += std::memcmp(found.data(), expected.data(), found.size()) != 0;
      }
    }
    EXPECT_GT(others, 0);
  });
}

// One or two rows have another kernel than more on Hopper, but for long k.
TEST_P(Inference, OneRowOfLongInputsHasTheBitsOfMany) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    if (gpu::max_gemm_rows() < kMaxFewRows) GTEST_SKIP() << "needs a Hopper GPU";
    for (const auto& [n, k, is_long] :
         {std::tuple<int64_t, int64_t, bool>{512, 4096, true}, {2048, 4096, false}}) {
      const Values x = on_device(exec, random_values(DType::bf16, 2, k, 1), {2, k});
      const Values weight = on_device(exec, random_values(DType::bf16, n, k, 2), {n, k});
      for (const int64_t m : {1, 2}) {
        const auto bits = [&](SameBits same_bits) {
          const Values out(exec, DType::f32, {m, n});
          gemm(exec, x.view.rows(0, m), weight.view.transposed(), out.view,
               {.same_bits = same_bits});
          const Memory found = to_host(exec, out.memory);
          return std::vector<std::byte>(found.data(), found.data() + found.bytes());
        };
        EXPECT_EQ(bits(SameBits::no) == bits(SameBits::few_rows), is_long) << n << " " << m;
      }
    }
  });
}

TEST_P(Inference, SameBitsAreRefusedWhereTheyDoNotHold) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    const auto refusal = [&](DType dtype, int64_t m, int64_t k, SameBits same_bits) -> std::string {
      const Values a(exec, dtype, {m, k}), weight(exec, dtype, {16, k}), out(exec, dtype, {m, 16});
      try {
        gemm(exec, a.view, weight.view.transposed(), out.view, {.same_bits = same_bits});
      } catch (const InvalidArgument& error) {
        return error.what();
      } catch (const Unsupported& error) {
        return error.what();
      }
      return "";
    };
    EXPECT_EQ(refusal(DType::bf16, 65, 64, SameBits::few_rows),
              "gemm: a bf16[65, 64] with same_bits of few rows: expected at most 64");
    if (gpu::max_gemm_rows() < kMaxFewRows) {
      EXPECT_NE(refusal(DType::bf16, 3, 64, SameBits::few_rows).find("needs a Hopper GPU"),
                std::string::npos);
      EXPECT_NE(refusal(DType::f32, 99, 64, SameBits::many_rows).find("needs a Hopper GPU"),
                std::string::npos);
      return;
    }
    for (const auto& [dtype, k] : {std::pair(DType::f32, 64), {DType::bf16, 96}}) {
      EXPECT_NE(refusal(dtype, 3, k, SameBits::few_rows).find("K in multiples of 64"),
                std::string::npos);
      EXPECT_EQ(refusal(dtype, 3, k, SameBits::many_rows), "");
    }
  });
}

TEST_P(Inference, GemmsRefuseMemoryWithoutWholeVectors) {
  run([](Communicator& comm) {
    const Exec exec{device_of(comm), stream_of(comm)};
    const int64_t k = 128, n = 72;
    const Memory memory(size_t((n + 1) * k) * 2, exec.device);
    const Values good(exec, DType::bf16, {n, k}), out(exec, DType::f32, {n, n});
    const auto refuses = [&](const Tensor& a, const Tensor& weight, const std::string& words) {
      EXPECT_FALSE(gpu::is_rows_gemm(a, weight, out.view.rows(0, a.dim(0))));
      try {
        gemm(exec, a, weight.transposed(), out.view.rows(0, a.dim(0)));
        ADD_FAILURE() << words << ": accepted";
      } catch (const InvalidArgument& error) {
        EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
      }
    };
    for (const int64_t m : {int64_t{3}, n}) {  // our kernel's rows, and cuBLASLt's
      const Tensor odd(memory.data() + 2, DType::bf16, {m, k}, exec.device);
      const Tensor odd_weight(memory.data() + 2, DType::bf16, {n, k}, exec.device);
      refuses(odd, good.view, "gemm: a bf16[" + std::to_string(m) + ", 128] at ");
      refuses(good.view.rows(0, m), odd_weight, "expected a multiple of 16 bytes");
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Gpus, Inference, ::testing::Values(1), gpus_name);

}  // namespace
}  // namespace tandem::test
