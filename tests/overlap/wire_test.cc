// GEMM+RS with encoded partial products: close to the exact result, the same bits from every
// candidate, and unsupported formats refused by name.
#include <gmock/gmock.h>

#include <cmath>
#include <cstring>

#include "tandem/overlap.h"
#include "tandem/random.h"
#include "tests/comm/ranks.h"

namespace tandem::test {
namespace {

using testing::HasSubstr;

struct Matrix {
  Memory memory;
  Tensor tensor;
  Matrix(DType dtype, int64_t rows, int64_t columns, uint64_t seed)
      : memory(size_t(rows * columns) * size_of(dtype)),
        tensor(memory.view(dtype, {rows, columns})) {
    for (int64_t i = 0; i < tensor.elements(); ++i) {
      const float value = uniform(seed, 0, uint64_t(i)) - 0.5f;
      if (dtype == DType::f32) tensor.as<float>()[i] = value;
      if (dtype == DType::bf16) tensor.as<BFloat16>()[i] = BFloat16::from_float(value);
    }
  }
};

double value_at(const Tensor& t, int64_t i) {
  return t.dtype() == DType::f32 ? double(t.as<float>()[i])
                                 : double(t.as<BFloat16>()[i].to_float());
}

class EncodedGemmRs : public OnRanks {};
TANDEM_INSTANTIATE(EncodedGemmRs);

TEST_P(EncodedGemmRs, CandidatesHaveTheSameBitsNearTheExactResult) {
  run([&](Communicator& comm) {
    const auto seed = uint64_t(comm.rank());
    for (const char* text : {"int8", "int4:g32", "mxfp6", "int3:g16:asym", "lossless"}) {
      const Wire wire = Wire::parse(text);
      for (const DType dtype : {DType::f32, DType::bf16}) {
        for (const int64_t m : {1, 5, 130}) {
          for (const int64_t n : {1, 96, 130}) {
            constexpr int64_t kK = 24;
            const Matrix x(dtype, m, kK, seed), weight(dtype, n, kK, 10 + seed);
            const int64_t rows = shard_of(m, comm.size(), comm.rank()).count;
            Matrix exact(DType::f32, rows, n, 0), first(dtype, rows, n, 0);
            GemmRs uncompressed(comm, {m, n, kK, dtype}, {.strategy = Strategy::serial});
            uncompressed.run(x.tensor, weight.tensor, exact.tensor);
            GemmRs serial(comm, {m, n, kK, dtype}, {.strategy = Strategy::serial, .wire = wire});
            serial.run(x.tensor, weight.tensor, first.tensor);
            // A partial product is at most kK / 4.
            const double bound = (comm.size() - 1) * wire.error_bound() * kK / 4 +
                                 (dtype == DType::f32 ? 1e-5 : 0.1);
            double worst = 0;
            for (int64_t i = 0; i < rows * n; ++i) {
              worst =
                  std::max(worst, std::fabs(value_at(exact.tensor, i) - value_at(first.tensor, i)));
            }
            EXPECT_LE(worst, bound) << text << ", " << m << " x " << n;
            for (const int chunks : {1, 3}) {
              Matrix out(dtype, rows, n, 1);
              GemmRs other(comm, {m, n, kK, dtype},
                           {.strategy = Strategy::overlapped, .chunks = chunks, .wire = wire});
              for (int call = 0; call < 3; ++call) other.run(x.tensor, weight.tensor, out.tensor);
              EXPECT_TRUE(rows == 0 ||
                          !std::memcmp(out.tensor.data(), first.tensor.data(), out.tensor.bytes()))
                  << text << ", " << m << " x " << n << ", " << chunks << " chunks";
            }
          }
        }
      }
    }
  });
}

// One message per chunk: large ones are coded, small ones are not.
TEST_P(EncodedGemmRs, LosslessGivesTheUncompressedBits) {
  run([&](Communicator& comm) {
    const auto seed = uint64_t(comm.rank());
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const auto& [m, n] :
           {std::pair<int64_t, int64_t>{1, 1}, {1, 1300}, {3, 130}, {130, 96}}) {
        constexpr int64_t kK = 24;
        const Matrix x(dtype, m, kK, seed), weight(dtype, n, kK, 10 + seed);
        const int64_t rows = shard_of(m, comm.size(), comm.rank()).count;
        Matrix expected(dtype, rows, n, 0);
        GemmRs uncompressed(comm, {m, n, kK, dtype}, {.strategy = Strategy::serial});
        uncompressed.run(x.tensor, weight.tensor, expected.tensor);
        for (const int chunks : {0, 1, 3}) {
          Matrix out(dtype, rows, n, 1);
          GemmRs lossless(comm, {m, n, kK, dtype},
                          {.strategy = chunks ? Strategy::overlapped : Strategy::serial,
                           .chunks = chunks,
                           .wire = Wire::parse("lossless")});
          for (int call = 0; call < 3; ++call) lossless.run(x.tensor, weight.tensor, out.tensor);
          EXPECT_TRUE(rows == 0 ||
                      !std::memcmp(out.tensor.data(), expected.tensor.data(), out.tensor.bytes()))
              << m << " x " << n << ", " << chunks << " chunks, " << name_of(dtype);
        }
      }
    }
  });
}

TEST_P(EncodedGemmRs, UnsupportedFormatsAreRefusedByName) {
  run([&](Communicator& comm) {
    const auto refusal = [&](const auto& make) {
      try {
        make();
      } catch (const InvalidArgument& error) {
        return std::string(error.what());
      }
      return std::string("no error");
    };
    const auto refusals = [&](const Wire& wire) {
      const OverlapOptions options{.strategy = Strategy::serial, .wire = wire};
      return std::vector<std::string>{refusal([&] {
                                        AgGemm(comm, {8, 8, 8}, options);
                                      }),
                                      refusal([&] {
                                        AgWgrad(comm, {8, 8, 8}, options);
                                      }),
                                      refusal([&] {
                                        GemmRs(comm, {8, 8, 8}, options);
                                      }),
                                      refusal([&] {
                                        GemmAr(comm, {8, 8, 8}, options);
                                      })};
    };
    Wire odd = Wire::parse("int8");
    odd.group = 48;
    for (const auto& message : refusals(odd)) EXPECT_THAT(message, HasSubstr("group 48"));
    if (comm.size() == 1) return;
    for (const auto& message : refusals(Wire::parse(comm.rank() ? "int8" : "int4"))) {
      EXPECT_THAT(message, HasSubstr("as int4"));
    }
  });
}

}  // namespace
}  // namespace tandem::test
