// AG+GEMM and its weight gradient with encoded shards, compared with the reference: every rank's
// rows encoded and decoded one by one, then the uncompressed operator on the result.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "gemm/gemm.h"
#include "overlap/ag_gemm/reference.h"
#include "overlap/ag_wgrad/reference.h"
#include "tandem/overlap.h"
#include "tests/comm/ranks.h"
#include "tests/overlap/problem.h"

namespace tandem::test {
namespace {

struct Size {
  int64_t m, n, k;
};
constexpr Size kSizes[] = {{0, 4, 4}, {1, 3, 1},   {3, 5, 130}, {5, 0, 33},
                           {4, 6, 0}, {7, 9, 128}, {64, 7, 48}, {131, 5, 65}};
constexpr const char* kFormats[] = {"int8", "int4:g32", "int6", "mxfp4", "e4m3", "lossless"};
constexpr OverlapOptions kPlans[] = {{Strategy::serial, 0},
                                     {Strategy::overlapped, 1},
                                     {Strategy::overlapped, 3},
                                     {Strategy::overlapped, 16}};

OverlapOptions with_wire(OverlapOptions options, const Wire& wire) {
  options.wire = wire;
  return options;
}

class EncodedGather : public OnRanks {};
TANDEM_INSTANTIATE(EncodedGather);

TEST_P(EncodedGather, AgGemmMatchesTheGemmOfDecodedRows) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    for (const char* format : kFormats) {
      const Wire wire = Wire::parse(format);
      for (const DType dtype : {DType::f32, DType::bf16}) {
        for (const Size& s : kSizes) {
          const bool odd = s.k % 2;
          const Shard local = shard_of(s.m, comm.size(), comm.rank());
          const Matrix x(dtype, s.m, s.k, 1, false, odd ? 3 : 0);
          const Matrix weight(dtype, s.n, s.k, 100 + uint64_t(comm.rank()), odd);
          const Tensor local_x = x.tensor().rows(local.begin, local.count);
          const Matrix decoded = as_sent(comm, wire, x.tensor());
          const Matrix expected(dtype, s.m, s.n, 8);
          ag_gemm_reference(comm, decoded.tensor().rows(local.begin, local.count), weight.tensor(),
                            expected.tensor(), nullptr);
          for (const OverlapOptions& plan : kPlans) {
            SCOPED_TRACE(testing::Message()
                         << format << " " << name_of(dtype) << " m " << s.m << " n " << s.n << " k "
                         << s.k << " chunks " << plan.chunks);
            AgGemm op(comm,
                      {.m = s.m,
                       .n = s.n,
                       .k = s.k,
                       .dtype = dtype,
                       .keep_gathered = true,
                       .weight_kn = odd},
                      with_wire(plan, wire));
            const Matrix out(dtype, s.m, s.n, 9);
            for (int call = 0; call < 3; ++call) op.run(local_x, weight.tensor(), out.tensor());
            EXPECT_EQ(bytes_of(op.gathered()), bytes_of(decoded.tensor()));
            if (!rows_keep_bits()) continue;
            EXPECT_EQ(bytes_of(out.tensor()), bytes_of(expected.tensor()));
          }
        }
      }
    }
  });
}

TEST_P(EncodedGather, AgWgradUsesTheSameDecodedRows) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    for (const char* format : {"int4:g32", "lossless"}) {
      const Wire wire = Wire::parse(format);
      for (const DType dtype : {DType::f32, DType::bf16}) {
        for (const Size& s : {Size{3, 5, 130}, Size{131, 5, 65}}) {
          const Shard local = shard_of(s.m, comm.size(), comm.rank());
          const Matrix x(dtype, s.m, s.k, 1), dy(dtype, s.m, s.n, 2 + uint64_t(comm.rank()));
          const Matrix decoded = as_sent(comm, wire, x.tensor());
          const Matrix expected(DType::f32, s.n, s.k, 3);
          AgWgrad uncompressed(comm, {s.m, s.n, s.k, dtype}, {.strategy = Strategy::serial});
          uncompressed.run(decoded.tensor().rows(local.begin, local.count), dy.tensor(),
                           expected.tensor());
          for (const OverlapOptions& plan : kPlans) {
            const Matrix dw(DType::f32, s.n, s.k, 3);
            AgWgrad op(comm, {s.m, s.n, s.k, dtype}, with_wire(plan, wire));
            op.run(x.tensor().rows(local.begin, local.count), dy.tensor(), dw.tensor());
            EXPECT_EQ(bytes_of(dw.tensor()), bytes_of(expected.tensor()))
                << format << " " << name_of(dtype) << " m " << s.m << " chunks " << plan.chunks;
          }
        }
      }
    }
  });
}

// Any of them may be measured as the fastest; each must be correct when chosen.
TEST_P(EncodedGather, UncompressedCandidatesMayBeChosen) {
  run([](Communicator& comm) {
    constexpr int64_t kM = 9, kN = 4, kK = 40;
    const Shard local = shard_of(kM, comm.size(), comm.rank());
    const Matrix x(DType::f32, kM, kK, 1), weight(DType::f32, kN, kK, 2);
    const Wire wire = Wire::parse("int4:g32");
    const Matrix sent = as_sent(comm, wire, x.tensor());
    AgGemm op(comm, {.m = kM, .n = kN, .k = kK, .keep_gathered = true},
              {.wire = wire, .allow_uncompressed = true});
    const Matrix out(DType::f32, kM, kN, 3);
    for (int call = 0; call < 3; ++call) {
      op.run(x.tensor().rows(local.begin, local.count), weight.tensor(), out.tensor());
    }
    const auto gathered = bytes_of(op.gathered());
    EXPECT_TRUE(gathered == bytes_of(x.tensor()) || gathered == bytes_of(sent.tensor()));
  });
}

TEST_P(EncodedGather, NaNDoesNotLeaveItsGroup) {
  run([](Communicator& comm) {
    if (comm.size() == 1) return;
    constexpr int64_t kK = 64;
    const int64_t m = 2 * comm.size();
    const Shard local = shard_of(m, comm.size(), comm.rank());
    const Matrix x(DType::f32, m, kK, 1), weight(DType::f32, 2, kK, 2), out(DType::f32, m, 2, 3);
    x.tensor().as<float>()[40] = std::numeric_limits<float>::quiet_NaN();
    AgGemm op(comm, {.m = m, .n = 2, .k = kK, .keep_gathered = true},
              {.strategy = Strategy::overlapped, .chunks = 2, .wire = Wire::parse("int8:g32")});
    op.run(x.tensor().rows(local.begin, local.count), weight.tensor(), out.tensor());
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < kK; ++j) {
        EXPECT_EQ(std::isnan(at(op.gathered(), i, j)), i == 0 && j >= 32) << i << ", " << j;
      }
    }
  });
}

}  // namespace
}  // namespace tandem::test
