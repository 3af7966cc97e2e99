// GEMM+AR with encoded partial products and sums, compared with the reference: every rank's product
// encoded and decoded row by row, summed in rank order, and the sum encoded and decoded.
#include <gtest/gtest.h>

#include <vector>

#include "collectives/partial_sums.h"
#include "gemm/gemm.h"
#include "kernels/norm.h"
#include "tandem/overlap.h"
#include "tests/comm/ranks.h"
#include "tests/overlap/problem.h"

namespace tandem::test {
namespace {

struct Size {
  int64_t m, n, k;
};
constexpr Size kSizes[] = {{0, 4, 4}, {1, 1, 3},    {3, 130, 5},  {5, 0, 3},
                           {4, 6, 0}, {7, 128, 16}, {64, 48, 24}, {131, 65, 5}};
constexpr const char* kFormats[] = {"int8", "int4:g32", "int6", "mxfp4", "e4m3", "lossless"};
constexpr OverlapOptions kPlans[] = {{Strategy::serial, 0},
                                     {Strategy::overlapped, 1},
                                     {Strategy::overlapped, 3},
                                     {Strategy::overlapped, 16}};

struct Problem {
  std::vector<Matrix> x, weight;
  Matrix bias, residual, gain;
  Problem(const Communicator& comm, const Size& s, DType dtype)
      : bias(dtype, 1, s.n, 7), residual(dtype, s.m, s.n, 8), gain(dtype, 1, s.n, 9) {
    for (int r = 0; r < comm.size(); ++r) {
      x.emplace_back(dtype, s.m, s.k, 10 + uint64_t(r));
      weight.emplace_back(dtype, s.n, s.k, 100 + uint64_t(r));
    }
  }
};

/// out, and the hidden rows if there is a norm.
struct Result {
  Matrix out, hidden;
  AddNorm add_norm;
  Result(const Problem& p, const Size& s, DType dtype)
      : out(dtype, s.m, s.n, 1, false, s.n % 2 ? 3 : 0), hidden(dtype, s.m, s.n, 2) {
    add_norm = {p.residual.tensor(), p.gain.vector(), hidden.tensor(), 1e-5f};
  }
  std::vector<std::byte> bits() const {
    std::vector<std::byte> all = bytes_of(out.tensor());
    const auto more = bytes_of(hidden.tensor());
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
};

void reference(const Communicator& comm, const Wire& wire, const Problem& p, bool bias,
               bool add_norm, Result& result) {
  const DType dtype = p.bias.tensor().dtype();
  const Tensor& out = result.out.tensor();
  std::vector<Matrix> partials;
  std::vector<const std::byte*> sources;
  for (size_t r = 0; r < p.x.size(); ++r) {
    const Matrix product(dtype, out.dim(0), out.dim(1), 0);
    gemm(p.x[r].tensor(), p.weight[r].tensor().transposed(), product.tensor());
    partials.push_back(as_sent(comm, wire, product.tensor()));
    sources.push_back(partials.back().tensor().as<std::byte>());
  }
  const Tensor added = p.bias.vector();
  const Matrix sum(dtype, out.dim(0), out.dim(1), 0);
  reduce_partials(sources, dtype, bias ? &added : nullptr, sum.tensor());
  const Matrix sent = as_sent(comm, wire, sum.tensor());
  const std::byte* const one[] = {sent.tensor().as<std::byte>()};
  if (!add_norm) return reduce_partials(one, dtype, nullptr, out);
  const AddNorm& tail = result.add_norm;
  reduce_partials(one, dtype, nullptr, tail.hidden, &tail.residual);
  rms_norm(Exec{}, tail.hidden, tail.gain, tail.eps, out);
}

class EncodedGemmAr : public OnRanks {};
TANDEM_INSTANTIATE(EncodedGemmAr);

TEST_P(EncodedGemmAr, MatchesTheSumOfDecodedProducts) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    const auto rank = size_t(comm.rank());
    for (const char* format : kFormats) {
      const Wire wire = Wire::parse(format);
      for (const DType dtype : {DType::f32, DType::bf16}) {
        for (const Size& s : kSizes) {
          const bool bias = s.m % 2, add_norm = s.m % 4 == 3;
          const Problem p(comm, s, dtype);
          const Tensor added = p.bias.vector();
          const GemmAr::Shape shape{
              .m = s.m, .n = s.n, .k = s.k, .dtype = dtype, .bias = bias, .add_norm = add_norm};
          const auto run_once = [&](GemmAr& op, Result& result) {
            op.run(p.x[rank].tensor(), p.weight[rank].tensor(), result.out.tensor(),
                   bias ? &added : nullptr, nullptr, add_norm ? &result.add_norm : nullptr);
          };
          Result expected(p, s, dtype);
          if (comm.size() == 1) {  // nothing is sent
            GemmAr uncompressed(comm, shape, {.strategy = Strategy::serial});
            run_once(uncompressed, expected);
          } else {
            reference(comm, wire, p, bias, add_norm, expected);
          }
          for (OverlapOptions plan : kPlans) {
            SCOPED_TRACE(testing::Message()
                         << format << " " << name_of(dtype) << " m " << s.m << " n " << s.n << " k "
                         << s.k << " chunks " << plan.chunks);
            plan.wire = wire;
            GemmAr op(comm, shape, plan);
            Result result(p, s, dtype);
            for (int call = 0; call < 3; ++call) run_once(op, result);
            if (!rows_keep_bits()) continue;
            EXPECT_TRUE(result.bits() == expected.bits());
          }
        }
      }
    }
  });
}

// Small results have an uncompressed one-shot candidate in addition to the encoded ones.
TEST_P(EncodedGemmAr, UncompressedCandidatesMayBeChosen) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    const auto rank = size_t(comm.rank());
    const Wire wire = Wire::parse("int4:g32");
    for (const Size& s : {Size{9, 40, 8}, Size{70, 1030, 3}}) {
      const Problem p(comm, s, DType::f32);
      Result uncompressed(p, s, DType::f32), encoded(p, s, DType::f32), result(p, s, DType::f32);
      reference(comm, {}, p, false, false, uncompressed);
      reference(comm, wire, p, false, false, encoded);
      GemmAr op(comm, {s.m, s.n, s.k}, {.wire = wire, .allow_uncompressed = true});
      for (int call = 0; call < 3; ++call) {
        op.run(p.x[rank].tensor(), p.weight[rank].tensor(), result.out.tensor());
      }
      if (!rows_keep_bits()) continue;
      EXPECT_TRUE(result.bits() == uncompressed.bits() || result.bits() == encoded.bits());
    }
  });
}

}  // namespace
}  // namespace tandem::test
