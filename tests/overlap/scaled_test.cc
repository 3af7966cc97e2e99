// e4m3 operands with scales on CPU ranks: every plan against products of the decoded values in
// double, and bit by bit against the serial plan.
#include <fmt/format.h>

#include <memory>
#include <vector>

#include "gemm/gemm.h"
#include "tandem/overlap.h"
#include "tandem/random.h"
#include "tests/comm/ranks.h"
#include "tests/error_of.h"
#include "tests/overlap/problem.h"

namespace tandem::test {
namespace {

struct Size {
  int64_t m, n, k;
};
constexpr Size kSizes[] = {{0, 4, 4}, {3, 1, 7}, {5, 3, 0}, {17, 9, 29}, {67, 20, 33}};
constexpr OverlapOptions kPlans[] = {
    {Strategy::serial, 0}, {Strategy::overlapped, 1}, {Strategy::overlapped, 3}, {}};

constexpr int64_t kMeasuredRows = 17;  // the automatic plan runs with the size of so many

struct Variant {
  Scaling scaling;
  DType out;
  bool bias, padded;
};
constexpr Variant kVariants[] = {{Scaling::tensor, DType::bf16, false, false},
                                 {Scaling::tensor, DType::f32, true, true},
                                 {Scaling::row, DType::bf16, true, true},
                                 {Scaling::row, DType::f32, false, false}};

std::string describe(const Size& s, const Variant& v, const OverlapOptions& o) {
  return fmt::format("m {} n {} k {}, a scale per {}, to {}, bias {} padded {}, {} chunks {}", s.m,
                     s.n, s.k, name_of(v.scaling), name_of(v.out), v.bias, v.padded,
                     name_of(o.strategy), o.chunks);
}

/// A rank's operands: codes of all rows with the scales of each, or one.
struct Codes {
  Matrix codes;
  std::vector<float> scales;
  Scaling scaling;
  Codes(const Variant& v, int64_t rows, int64_t columns, uint64_t seed)
      : codes(DType::e4m3, rows, columns, seed, false, v.padded ? 3 : 0), scaling(v.scaling) {
    const int64_t count = scaling == Scaling::row ? rows : 1;
    for (int64_t i = 0; i < count; ++i) scales.push_back(0.25f + uniform(seed, 9, uint64_t(i)));
  }
  double at(int64_t row, int64_t column) const {
    return codes.at(row, column) * double(scales[scaling == Scaling::row ? size_t(row) : 0]);
  }
  Tensor of_rows(int64_t begin, int64_t count) {
    if (scaling == Scaling::tensor) return Tensor(scales.data(), DType::f32, {1});
    return Tensor(scales.data() + begin, DType::f32, {count});
  }
};

struct Problem {
  std::vector<std::unique_ptr<Codes>> x, weight;  ///< by rank
  Matrix bias;
  Problem(const Communicator& comm, const Size& s, const Variant& v) : bias(v.out, 1, s.n, 7) {
    for (int r = 0; r < comm.size(); ++r) {
      x.push_back(std::make_unique<Codes>(v, s.m, s.k, 10 + uint64_t(r)));
      weight.push_back(std::make_unique<Codes>(v, s.n, s.k, 100 + uint64_t(r)));
    }
  }
  /// Product of `ranks`' operands, each rounded to `partial`, and the bias.
  Expected at(const Variant& v, const std::vector<std::pair<size_t, size_t>>& ranks, DType partial,
              int64_t i, int64_t j) const {
    Expected e;
    if (v.bias) e.add(bias.at(0, j));
    for (const auto& [of_x, of_weight] : ranks) {
      const int64_t k = x[of_x]->codes.tensor().dim(1);
      Expected one;
      for (int64_t l = 0; l < k; ++l) one.add(x[of_x]->at(i, l) * weight[of_weight]->at(j, l));
      e.add_partial(one, k + 2, partial);  // and two scales
    }
    return e;
  }
};

class ScaledOperands : public OnRanks {
 protected:
  /// Runs an operator by `run_one`. Its result is the sum over `ranks` (of x, of the weight) of
  /// their products, of all rows, or `scattered`.
  template <typename Ranks, typename Run>
  void compare(bool scattered, const Ranks& ranks, bool rounds_partials, const Run& run_one) {
    run([&](Communicator& comm) {
      set_kernel_threads(1);
      for (const Variant& v : kVariants) {
        for (const Size& s : kSizes) {
          Problem p(comm, s, v);
          const Shard local = shard_of(s.m, comm.size(), comm.rank());
          const int64_t begin = scattered ? local.begin : 0, rows = scattered ? local.count : s.m;
          std::vector<Expected> expected;
          for (int64_t i = 0; i < rows; ++i) {
            for (int64_t j = 0; j < s.n; ++j) {
              expected.push_back(
                  p.at(v, ranks(comm), rounds_partials ? v.out : DType::f32, begin + i, j));
            }
          }
          std::vector<std::byte> serial;
          for (const OverlapOptions& o : kPlans) {
            if (o.strategy == Strategy::automatic && s.m != kMeasuredRows) continue;
            SCOPED_TRACE(describe(s, v, o));
            const Matrix out(v.out, rows, s.n, 8, false, v.padded ? 5 : 0);
            const Tensor bias = p.bias.vector();
            run_one(comm, s, v, o, p, out.tensor(), v.bias ? &bias : nullptr);
            for (int64_t i = 0; i < rows; ++i) {
              for (int64_t j = 0; j < s.n; ++j) {
                const Expected& e = expected[size_t(i * s.n + j)];
                ASSERT_NEAR(out.at(i, j), e.value, e.bound(s.k + 2, v.out, 0, v.out))
                    << "at " << i << ", " << j;
              }
            }
            const auto bits = bytes_of(out.tensor());
            if (o.strategy == Strategy::serial) serial = bits;
            EXPECT_TRUE(bits == serial || !rows_keep_bits());
          }
        }
      }
    });
  }
};

TEST_P(ScaledOperands, AgGemmMatchesDecodedProduct) {
  const auto ranks = [](const Communicator& comm) {
    return std::vector<std::pair<size_t, size_t>>{{0, size_t(comm.rank())}};
  };
  compare(false, ranks, false,
          [](Communicator& comm, const Size& s, const Variant& v, const OverlapOptions& o,
             Problem& p, const Tensor& out, const Tensor* bias) {
            const Shard local = shard_of(s.m, comm.size(), comm.rank());
            Codes &x = *p.x[0], &weight = *p.weight[size_t(comm.rank())];
            AgGemm op(comm,
                      {.m = s.m,
                       .n = s.n,
                       .k = s.k,
                       .dtype = DType::e4m3,
                       .keep_gathered = v.padded,
                       .bias = v.bias,
                       .out_dtype = v.out,
                       .scaling = v.scaling},
                      o);
            const Scales scales{x.of_rows(local.begin, local.count), weight.of_rows(0, s.n)};
            op.run(x.codes.tensor().rows(local.begin, local.count), weight.codes.tensor(), out,
                   bias, &scales);
            if (v.padded) {
              EXPECT_EQ(bytes_of(op.gathered()), bytes_of(x.codes.tensor()));
            }
          });
}

std::vector<std::pair<size_t, size_t>> all_ranks(const Communicator& comm) {
  std::vector<std::pair<size_t, size_t>> all;
  for (size_t r = 0; r < size_t(comm.size()); ++r) all.emplace_back(r, r);
  return all;
}

template <typename Op>
void run_sum(Communicator& comm, const Size& s, const Variant& v, const OverlapOptions& o,
             Problem& p, const Tensor& out, const Tensor* bias) {
  Codes &x = *p.x[size_t(comm.rank())], &weight = *p.weight[size_t(comm.rank())];
  Op op(comm,
        {.m = s.m,
         .n = s.n,
         .k = s.k,
         .dtype = DType::e4m3,
         .bias = v.bias,
         .out_dtype = v.out,
         .scaling = v.scaling},
        o);
  const Scales scales{x.of_rows(0, s.m), weight.of_rows(0, s.n)};
  op.run(x.codes.tensor(), weight.codes.tensor(), out, bias, &scales);
}

TEST_P(ScaledOperands, GemmRsMatchesDecodedProduct) {
  compare(true, all_ranks, true, run_sum<GemmRs>);
}
TEST_P(ScaledOperands, GemmArMatchesDecodedProduct) {
  compare(false, all_ranks, true, run_sum<GemmAr>);
}

TEST_P(ScaledOperands, ErrorsNameWhatIsWrong) {
  run([](Communicator& comm) {
    using I = InvalidArgument;
    const auto shape = [](DType out, bool kn) {
      return GemmRs::Shape{.m = 4,
                           .n = 6,
                           .k = 8,
                           .dtype = DType::e4m3,
                           .weight_kn = kn,
                           .out_dtype = out,
                           .scaling = Scaling::row};
    };
    EXPECT_EQ(error_of<I>([&] { GemmRs(comm, shape(DType::f16, false)); }),
              "gemm_rs: e4m3 to f16: expected an out_dtype of f32 or bf16 on CPU ranks");
    EXPECT_EQ(error_of<I>([&] { GemmRs(comm, shape(DType::f32, true)); }),
              "gemm_rs: e4m3 weight [K, N]: expected [N, K]");
    EXPECT_EQ(error_of<I>([&] {
                AgGemm(comm, {.m = 4, .n = 6, .k = 8, .dtype = DType::e4m3},
                       {.wire = Wire::parse("int8")});
              }),
              "codec 'int8': dtype e4m3: expected f32, bf16 or f16");
    GemmRs op(comm, shape(DType::f32, false), {Strategy::serial});
    const Variant v{Scaling::row, DType::f32, false, false};
    Codes x(v, 4, 8, 1), weight(v, 6, 8, 2);
    const Matrix out(DType::f32, shard_of(4, comm.size(), comm.rank()).count, 6, 3);
    const auto run_with = [&](const Scales* scales) {
      return error_of<I>(
          [&] { op.run(x.codes.tensor(), weight.codes.tensor(), out.tensor(), nullptr, scales); });
    };
    EXPECT_EQ(run_with(nullptr), "gemm_rs: scales missing: expected them with dtype e4m3");
    const Scales few{x.of_rows(0, 3), weight.of_rows(0, 6)};
    EXPECT_EQ(run_with(&few), "gemm_rs: scales.x is f32[3]: expected f32[4], contiguous");
    const Scales one{x.of_rows(0, 4), weight.of_rows(0, 1)};
    EXPECT_EQ(run_with(&one), "gemm_rs: scales.weight is f32[1]: expected f32[6], contiguous");
  });
}

TANDEM_INSTANTIATE(ScaledOperands);

}  // namespace
}  // namespace tandem::test
