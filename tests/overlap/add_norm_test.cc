// GEMM+AR followed by residual and RMSNorm: hidden compared with a sum in double, out with the norm
// of that hidden, every plan with the serial one bit by bit, in place and out of place.
#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gemm/gemm.h"
#include "overlap/gemm_ar/reference.h"
#include "tandem/overlap.h"
#include "tests/comm/ranks.h"
#include "tests/error_of.h"
#include "tests/overlap/problem.h"

namespace tandem::test {
namespace {

class AddNorms : public OnRanks {};

struct Size {
  int64_t m, n, k;
};
constexpr Size kSizes[] = {{0, 4, 4},    {1, 1, 1},    {2, 5, 3},    {3, 1, 7},  {4, 6, 0},
                           {17, 33, 29}, {64, 48, 32}, {131, 20, 9}, {5, 700, 3}};
constexpr OverlapOptions kPlans[] = {{Strategy::serial, 0},
                                     {Strategy::overlapped, 1},
                                     {Strategy::overlapped, 3},
                                     {Strategy::overlapped, 0}};
constexpr float kEps = 1e-3f;

double unit(DType dtype) {
  return dtype == DType::f32 ? 0x1p-24 : 0x1p-8;
}

// Every rank's inputs, and one rank's outputs.
struct Problem {
  std::vector<std::unique_ptr<Matrix>> x, weight;
  Matrix bias, residual, gain;
  Problem(const Communicator& comm, const Size& s, DType dtype, bool padded)
      : bias(dtype, 1, s.n, 7),
        residual(dtype, s.m, s.n, 8, false, padded ? 3 : 0),
        gain(dtype, 1, s.n, 9) {
    for (int r = 0; r < comm.size(); ++r) {
      const int64_t k = s.k == 0 ? 0 : s.k + r % 2;
      x.push_back(std::make_unique<Matrix>(dtype, s.m, k, 10 + uint64_t(r)));
      weight.push_back(std::make_unique<Matrix>(dtype, s.n, k, 100 + uint64_t(r)));
    }
  }
  /// Expected hidden, row by row.
  std::vector<Expected> hidden(bool with_bias) const {
    std::vector<Expected> all;
    for (int64_t i = 0; i < residual.tensor().dim(0); ++i) {
      for (int64_t j = 0; j < residual.tensor().dim(1); ++j) all.push_back(at(with_bias, i, j));
    }
    return all;
  }

 private:
  Expected at(bool with_bias, int64_t i, int64_t j) const {
    Expected e;
    e.add(residual.at(i, j));
    if (with_bias) {
      e.add(bias.at(0, j));
      e.rounding.add_partial(bias.at(0, j), 0, {}, bias.tensor().dtype(), false);
    }
    for (size_t r = 0; r < x.size(); ++r) {
      const int64_t k = x[r]->tensor().dim(1);
      Expected partial;
      for (int64_t l = 0; l < k; ++l) partial.add(x[r]->at(i, l) * weight[r]->at(j, l));
      e.add_partial(partial, k, residual.tensor().dtype());
    }
    return e;
  }
};

// Partial products are rounded once each; so is the sum of the reference and of a single rank.
void expect_hidden(const std::vector<Expected>& expected, const Tensor& hidden, int64_t terms,
                   int running_roundings) {
  for (int64_t i = 0; i < hidden.dim(0); ++i) {
    for (int64_t j = 0; j < hidden.dim(1); ++j) {
      const Expected& e = expected[size_t(i * hidden.dim(1) + j)];
      ASSERT_NEAR(at(hidden, i, j), e.value,
                  e.bound(terms, hidden.dtype(), running_roundings, hidden.dtype()))
          << "hidden at " << i << ", " << j;
    }
  }
}

void expect_norm(const Tensor& hidden, const Matrix& gain, const Tensor& out) {
  const int64_t n = hidden.dim(1);
  for (int64_t i = 0; i < hidden.dim(0); ++i) {
    double squares = 0;
    for (int64_t j = 0; j < n; ++j) squares += at(hidden, i, j) * at(hidden, i, j);
    const double scale = 1 / std::sqrt(squares / double(n) + double(kEps));
    for (int64_t j = 0; j < n; ++j) {
      const double exact = at(hidden, i, j) * scale * gain.at(0, j);
      // n additions of squares, halved by the root, and some single operations.
      const double bound =
          std::abs(exact) * (1.01 * unit(out.dtype()) + (double(n) / 2 + 8) * 0x1p-24) + 1e-30;
      ASSERT_NEAR(at(out, i, j), exact, bound) << "out at " << i << ", " << j;
    }
  }
}

TEST_P(AddNorms, EveryPlanMatchesTheNormOfTheSum) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const bool with_bias : {false, true}) {
        const bool padded = with_bias;
        for (const Size& s : kSizes) {
          const Problem p(comm, s, dtype, padded);
          const Tensor bias = p.bias.vector(), gain = p.gain.vector();
          const Tensor &x = p.x[size_t(comm.rank())]->tensor(),
                       &weight = p.weight[size_t(comm.rank())]->tensor();
          const int64_t terms = s.k * comm.size();
          const std::vector<Expected> expected = p.hidden(with_bias);
          std::vector<std::byte> serial;
          for (const OverlapOptions& o : kPlans) {
            SCOPED_TRACE(fmt::format("m {} n {} k {} {} bias {}, {} chunks {}", s.m, s.n, s.k,
                                     name_of(dtype), with_bias, name_of(o.strategy), o.chunks));
            GemmAr op(comm,
                      {.m = s.m,
                       .n = s.n,
                       .k = x.dim(1),
                       .dtype = dtype,
                       .bias = with_bias,
                       .add_norm = true},
                      o);
            // In place, and twice: the residual of the second call is the first one's result.
            const Matrix out(dtype, s.m, s.n, 1, false, padded ? 5 : 0),
                apart(dtype, s.m, s.n, 2, false, padded ? 1 : 0),
                stream(dtype, s.m, s.n, 8, false, padded ? 2 : 0);
            const AddNorm tail{p.residual.tensor(), gain, apart.tensor(), kEps},
                in_place{stream.tensor(), gain, stream.tensor(), kEps};
            op.run(x, weight, out.tensor(), with_bias ? &bias : nullptr, nullptr, &tail);
            expect_hidden(expected, apart.tensor(), terms, comm.size() > 1 ? 0 : 1);
            expect_norm(apart.tensor(), p.gain, out.tensor());
            const auto hidden = bytes_of(apart.tensor());
            auto bits = bytes_of(out.tensor());
            op.run(x, weight, out.tensor(), with_bias ? &bias : nullptr, nullptr, &in_place);
            EXPECT_EQ(bytes_of(stream.tensor()), hidden);
            EXPECT_EQ(bytes_of(out.tensor()), bits);
            bits.insert(bits.end(), hidden.begin(), hidden.end());
            if (o.strategy == Strategy::serial) serial = bits;
            EXPECT_TRUE(bits == serial || !rows_keep_bits());
            for (const auto& other : comm.exchange(bits, "bits")) EXPECT_EQ(other, bits);
          }
          const Matrix out(dtype, s.m, s.n, 1), hidden(dtype, s.m, s.n, 2);
          const AddNorm tail{p.residual.tensor(), gain, hidden.tensor(), kEps};
          gemm_ar_reference(comm, x, weight, out.tensor(), with_bias ? &bias : nullptr, &tail);
          expect_hidden(expected, hidden.tensor(), terms, 2);
          expect_norm(hidden.tensor(), p.gain, out.tensor());
        }
      }
    }
  });
}

TEST_P(AddNorms, TunerMeasuresAddNorm) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    const Problem p(comm, {40, 24, 16}, DType::f32, false);
    const Matrix out(DType::f32, 40, 24, 1), hidden(DType::f32, 40, 24, 2);
    const int64_t k = p.x[size_t(comm.rank())]->tensor().dim(1);
    GemmAr op(comm, {.m = 40, .n = 24, .k = k, .add_norm = true});
    const AddNorm tail{p.residual.tensor(), p.gain.vector(), hidden.tensor(), kEps};
    op.run(p.x[size_t(comm.rank())]->tensor(), p.weight[size_t(comm.rank())]->tensor(),
           out.tensor(), nullptr, nullptr, &tail);
    expect_hidden(p.hidden(false), hidden.tensor(), k * comm.size(), 1);
    expect_norm(hidden.tensor(), p.gain, out.tensor());
  });
}

TEST_P(AddNorms, WrongOperandsAreNamedBeforeAnythingIsSent) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    const Matrix x(DType::f32, 8, 4, 1), w(DType::f32, 6, 4, 2), out(DType::f32, 8, 6, 3),
        residual(DType::f32, 8, 6, 4), hidden(DType::f32, 8, 6, 5), row(DType::f32, 1, 6, 6),
        half(DType::bf16, 8, 6, 7);
    GemmAr without_norm(comm, {8, 6, 4}, {Strategy::serial, 0});
    GemmAr op(comm, {.m = 8, .n = 6, .k = 4, .add_norm = true}, {Strategy::overlapped, 2});
    const AddNorm right{residual.tensor(), row.vector(), hidden.tensor(), kEps};
    const auto with = [&](GemmAr& ar, const AddNorm* tail) {
      return error_of<InvalidArgument>(
          [&] { ar.run(x.tensor(), w.tensor(), out.tensor(), nullptr, nullptr, tail); });
    };
    const auto changed = [&](auto change) {
      AddNorm tail = right;
      change(tail);
      return with(op, &tail);
    };
    EXPECT_EQ(with(without_norm, &right), "gemm_ar: add_norm given: the shape says none");
    EXPECT_EQ(with(op, nullptr), "gemm_ar: add_norm missing: the shape says one");
    EXPECT_EQ(changed([&](AddNorm& a) { a.residual = half.tensor(); }),
              "gemm_ar: residual is bf16[8, 6]: expected f32[8, 6]");
    EXPECT_EQ(changed([&](AddNorm& a) { a.hidden = hidden.tensor().rows(0, 7); }),
              "gemm_ar: hidden is f32[7, 6]: expected f32[8, 6]");
    EXPECT_EQ(changed([&](AddNorm& a) { a.gain = row.tensor(); }),
              "gemm_ar: gain is f32[1, 6]: expected f32[6], contiguous");
    EXPECT_EQ(changed([&](AddNorm& a) { a.gain = Tensor(); }).find("gemm_ar: gain is "), 0u);
    EXPECT_EQ(changed([&](AddNorm& a) { a.eps = -1; }),
              "gemm_ar: eps -1: expected a finite number of at least 0");
    EXPECT_NE(changed([&](AddNorm& a) { a.eps = std::nanf(""); }).find("eps nan"),
              std::string::npos);
    // The operator still works: the failed calls have left no data in flight.
    EXPECT_EQ(with(op, &right), "");
    if (comm.size() == 1) return;
    EXPECT_THROW(GemmAr(comm, {.m = 8, .n = 6, .k = 4, .add_norm = comm.rank() == 1}), Mismatch);
  });
}

TANDEM_INSTANTIATE(AddNorms);

}  // namespace
}  // namespace tandem::test
