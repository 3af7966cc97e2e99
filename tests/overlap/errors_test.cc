#include <fmt/format.h>
#include <gmock/gmock.h>

#include <array>
#include <string>
#include <vector>

#include "gemm/gemm.h"
#include "tandem/overlap.h"
#include "tests/comm/ranks.h"
#include "tests/error_of.h"
#include "tests/overlap/problem.h"

namespace tandem::test {
namespace {

class OverlapErrors : public OnRanks {};

TEST_P(OverlapErrors, WrongOperandsAreNamedBeforeAnythingIsSent) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    const Shard local = shard_of(8, comm.size(), comm.rank());
    const Matrix x(DType::f32, local.count, 4, 1), w(DType::f32, 6, 4, 2), out(DType::f32, 8, 6, 3);
    const Matrix half(DType::bf16, local.count, 4, 1), row(DType::f32, 1, 5, 4);
    AgGemm ag(comm, {8, 6, 4}, {Strategy::overlapped, 2});
    using I = InvalidArgument;
    EXPECT_EQ(error_of<I>([&] { ag.run(x.tensor(), out.tensor(), out.tensor()); }),
              "ag_gemm: weight is f32[8, 6]: expected f32[6, 4]");
    EXPECT_EQ(error_of<I>([&] { ag.run(half.tensor(), w.tensor(), out.tensor()); }),
              fmt::format("ag_gemm: x is bf16[{0}, 4]: expected f32[{0}, 4]", local.count));
    const Tensor bias = row.vector();
    AgGemm biased(comm, {.m = 8, .n = 6, .k = 4, .bias = true}, {Strategy::overlapped, 2});
    EXPECT_EQ(error_of<I>([&] { biased.run(x.tensor(), w.tensor(), out.tensor(), &bias); }),
              "ag_gemm: bias is f32[5]: expected f32[6], contiguous");
    EXPECT_NE(error_of<I>([&] { ag.gathered(); }).find("keep_gathered"), std::string::npos);
    GemmRs rs(comm, {8, 6, 4}, {Strategy::serial, 0});
    EXPECT_EQ(error_of<I>([&] { rs.run(out.tensor(), w.tensor(), out.tensor()); }),
              "gemm_rs: x is f32[8, 6]: expected f32[8, 4]");
    GemmAr ar(comm, {8, 6, 4}, {Strategy::serial, 0});
    EXPECT_EQ(error_of<I>([&] { ar.run(out.tensor(), w.tensor(), out.tensor()); }),
              "gemm_ar: x is f32[8, 6]: expected f32[8, 4]");
    AgWgrad wgrad(comm, {8, 6, 4}, {Strategy::serial, 0});
    EXPECT_EQ(error_of<I>([&] { wgrad.run(x.tensor(), x.tensor(), w.tensor()); }),
              fmt::format("ag_wgrad: dy is f32[{}, 4]: expected f32[8, 6]", local.count));
    const Scales scales{row.vector(), row.vector()};
    EXPECT_EQ(error_of<I>([&] {
                ar.run(Matrix(DType::f32, 8, 4, 1).tensor(), w.tensor(), out.tensor(), nullptr,
                       &scales);
              }),
              "gemm_ar: scales given: expected none with dtype f32");
    // The operators still work: the failed calls have left no data in flight.
    ag.run(x.tensor(), w.tensor(), out.tensor());
    rs.run(Matrix(DType::f32, 8, 4, 1).tensor(), w.tensor(),
           Matrix(DType::f32, local.count, 6, 1).tensor());
  });
}

TEST_P(OverlapErrors, OutputsSharedByRanksOfAProcessAreNamed) {
  TANDEM_SKIP_UNDER_MPI("processes share no array");
  const Matrix shared(DType::f32, 8, 24, 1);
  const auto values = [&] {
    const float* first = shared.tensor().as<float>();
    return std::vector<float>(first, first + shared.tensor().elements());
  };
  run([&](Communicator& comm) {
    if (comm.size() == 1) return;
    set_kernel_threads(1);
    const Shard local = shard_of(8, comm.size(), comm.rank());
    const Matrix x(DType::f32, local.count, 4, 1), w(DType::f32, 6, 4, 2);
    for (const Strategy strategy : {Strategy::serial, Strategy::overlapped}) {
      AgGemm op(comm, {8, 6, 4}, {strategy, strategy == Strategy::serial ? 0 : 2});
      const auto columns = [&](int64_t first) {
        return Tensor(shared.tensor().as<float>() + first, DType::f32, {8, 6}, {24, 1});
      };
      const std::vector<float> before = values();
      EXPECT_THAT(error_of<InvalidArgument>(
                      [&] { op.run(x.tensor(), w.tensor(), columns(comm.rank() % 2)); }),
                  testing::StartsWith("ag_gemm: out of rank 0 at"));
      EXPECT_EQ(values(), before);
      comm.barrier();
      // Separate columns of one matrix per rank are allowed, and the next call is correct.
      op.run(x.tensor(), w.tensor(), columns(6 * comm.rank()));
    }
  });
}

TEST_P(OverlapErrors, OperatorsInDifferentOrderAreNamed) {
  TANDEM_SKIP_UNDER_MPI("ends the world");
  if (ranks() != 2) GTEST_SKIP() << "2 ranks are enough";
  std::array<std::string, 2> said;
  const auto in_another_order = [&](Communicator& comm) {
    set_kernel_threads(1);
    const Matrix x(DType::f32, 4, 4, 1), whole(DType::f32, 8, 4, 1), w(DType::f32, 6, 4, 2),
        out(DType::f32, 8, 6, 3), shard(DType::f32, 4, 6, 3);
    AgGemm ag(comm, {8, 6, 4}, {Strategy::overlapped, 2});
    GemmRs rs(comm, {8, 6, 4}, {Strategy::overlapped, 2});
    comm.set_deadline(0.3);
    said[size_t(comm.rank())] = error_of<Error>([&] {
      if (comm.rank() == 0) ag.run(x.tensor(), w.tensor(), out.tensor());
      if (comm.rank() == 1) rs.run(whole.tensor(), w.tensor(), shard.tensor());
    });
  };
  run(in_another_order);
  EXPECT_THAT(said[0] + said[1], testing::HasSubstr(", tile "));
  EXPECT_THAT(said[0] + said[1],
              testing::AnyOf(
                  testing::HasSubstr("rank 1 is in gemm_rs m 8, n 6, k 4, operator 2, rank 0 in "
                                     "ag_gemm m 8, n 6, k 4, operator 1: expected the same call"),
                  testing::HasSubstr("rank 0 is in ag_gemm m 8, n 6, k 4, operator 1, rank 1 in "
                                     "gemm_rs m 8, n 6, k 4, operator 2: expected the same call")));
}

TEST_P(OverlapErrors, WrongShapesAndOptionsAreNamed) {
  run([](Communicator& comm) {
    using I = InvalidArgument;
    EXPECT_EQ(error_of<I>([&] {
                GemmRs(comm, {int64_t(1) << 33, 1, int64_t(1) << 31});
              }),
              "gemm_rs: shape m 8589934592, n 1, k 2147483648: expected at most 281474976710656 "
              "elements");
    EXPECT_EQ(error_of<I>([&] {
                AgGemm(comm, {-1, 6, 4});
              }),
              "ag_gemm: shape m -1, n 6, k 4: expected none below 0");
    EXPECT_EQ(error_of<I>([&] {
                GemmRs(comm, {1, 6, 4, DType::f16});
              }),
              "gemm_rs: dtype f16: expected f32, bf16 or e4m3");
    EXPECT_EQ(error_of<I>([&] { AgWgrad(comm, {.m = 1, .n = 16, .k = 16, .dtype = DType::e4m3}); }),
              "ag_wgrad: dtype e4m3: expected f32 or bf16");
    EXPECT_EQ(error_of<I>([&] {
                GemmAr(comm, {1, 6, 4}, {Strategy::overlapped, 17});
              }),
              "gemm_ar: chunks 17: expected 0 (chosen) to 16");
  });
}

TEST_P(OverlapErrors, DifferentShapesOnRanksAreAMismatchOnEveryRank) {
  if (ranks() == 1) GTEST_SKIP() << "one rank always agrees";
  run([](Communicator& comm) {
    const int64_t m = comm.rank() == 1 ? 9 : 8;
    const auto message = error_of<Mismatch>([&] { AgGemm(comm, {m, 6, 4}); });
    EXPECT_NE(message.find("ag_gemm: rank 0 has m 8 k 4 f32"), std::string::npos) << message;
    EXPECT_NE(message.find("rank 1 has m 9"), std::string::npos) << message;
    EXPECT_THROW(GemmRs(comm, {8, m, 4}), Mismatch);
    EXPECT_THROW(GemmAr(comm, {8, 8, 4, comm.rank() == 1 ? DType::bf16 : DType::f32}), Mismatch);
    EXPECT_THROW(AgWgrad(comm, {8, 8, m}), Mismatch);
    EXPECT_THROW(GemmRs(comm, {8, 8, 4}, {Strategy::overlapped, 1 + comm.rank()}), Mismatch);
  });
}

TEST_P(OverlapErrors, MissingRankIsNamed) {
  TANDEM_SKIP_UNDER_MPI("the world ends here");
  if (ranks() == 1) GTEST_SKIP() << "nobody to wait for";
  std::string message;
  try {
    run([](Communicator& comm) {
      set_kernel_threads(1);
      const Shard local = shard_of(8, comm.size(), comm.rank());
      const Matrix x(DType::f32, local.count, 4, 1), w(DType::f32, 6, 4, 2);
      const Matrix out(DType::f32, 8, 6, 3);
      AgGemm ag(comm, {8, 6, 4}, {Strategy::overlapped, 2});
      ag.run(x.tensor(), w.tensor(), out.tensor());
      comm.set_deadline(comm.rank() == 0 ? 0.2 : 20);
      if (comm.rank() != 1) ag.run(x.tensor(), w.tensor(), out.tensor());
    });
    FAIL() << "no Timeout";
  } catch (const Timeout& error) {
    message = error.what();
    EXPECT_EQ(error.op, "ag_gemm");
    EXPECT_EQ(error.peer, 1);
    EXPECT_EQ(error.tile, -1);  // it has not begun the call
    EXPECT_EQ(error.epoch, 2u);
  }
  EXPECT_NE(message.find("ag_gemm"), std::string::npos) << message;
}

TANDEM_INSTANTIATE(OverlapErrors);

}  // namespace
}  // namespace tandem::test
