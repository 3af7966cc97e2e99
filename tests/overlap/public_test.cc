// Guarantees of the public operators, the same on CPU ranks and GPUs: the shape declares whether
// there is a bias and the weight's layout; operators can be moved; a call refused on one rank keeps
// the ranks in step.
#include <fmt/format.h>

#include <string>
#include <utility>
#include <vector>

#include "core/system/env.h"
#include "gemm/gemm.h"
#include "overlap/contract/check.h"
#include "overlap/contract/receipt.h"
#include "tandem/overlap.h"
#include "tests/comm/ranks.h"
#include "tests/error_of.h"
#include "tests/overlap/problem.h"

namespace tandem::test {
namespace {

class PublicOperators : public OnRanks {};

TEST_P(PublicOperators, ShapeDeclaresTheWeightLayout) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    const Matrix x(DType::f32, 8, 4, 1), nk(DType::f32, 6, 4, 2), kn(DType::f32, 6, 4, 2, true),
        out(DType::f32, 8, 6, 3), padded(DType::f32, 6, 4, 2, true, 3);
    const Shard local = shard_of(8, comm.size(), comm.rank());
    const Tensor x_rows = x.tensor().rows(local.begin, local.count),
                 out_rows = out.tensor().rows(local.begin, local.count);
    for (const Strategy strategy : {Strategy::serial, Strategy::overlapped, Strategy::automatic}) {
      for (const bool declared : {false, true}) {
        AgGemm ag(comm, {.m = 8, .n = 6, .k = 4, .weight_kn = declared}, {strategy, 0});
        GemmRs rs(comm, {.m = 8, .n = 6, .k = 4, .weight_kn = declared}, {strategy, 0});
        GemmAr ar(comm, {.m = 8, .n = 6, .k = 4, .weight_kn = declared}, {strategy, 0});
        AgWgrad wgrad(comm, {.m = 8, .n = 6, .k = 4, .weight_kn = declared}, {strategy, 0});
        for (const Matrix* weight : {&nk, &kn, &padded}) {
          const Tensor& w = weight->tensor();
          const std::string expected =
              declared == (weight != &nk)
                  ? ""
                  : fmt::format(
                        " is f32[6, 4] with strides {}, {}: the shape has weight_kn {}: "
                        "expected dense {}",
                        w.stride(0), w.stride(1), declared,
                        declared ? "columns, as w.transposed() of [K, N]" : "rows");
          const auto message = [&](const char* op, const char* operand) {
            return expected.empty() ? "" : fmt::format("{}: {}{}", op, operand, expected);
          };
          EXPECT_EQ(error_of<InvalidArgument>([&] { ag.run(x_rows, w, out.tensor()); }),
                    message("ag_gemm", "weight"));
          EXPECT_EQ(error_of<InvalidArgument>([&] { rs.run(x.tensor(), w, out_rows); }),
                    message("gemm_rs", "weight"));
          EXPECT_EQ(error_of<InvalidArgument>([&] { ar.run(x.tensor(), w, out.tensor()); }),
                    message("gemm_ar", "weight"));
          EXPECT_EQ(error_of<InvalidArgument>([&] { wgrad.run(x_rows, out.tensor(), w); }),
                    message("ag_wgrad", "dw"));
        }
      }
    }
    // One row or column has both layouts.
    const Matrix row(DType::f32, 1, 4, 2), narrow(DType::f32, 8, 1, 3);
    for (const bool declared : {false, true}) {
      GemmAr ar(comm, {.m = 8, .n = 1, .k = 4, .weight_kn = declared}, {Strategy::serial, 0});
      ar.run(x.tensor(), row.tensor(), narrow.tensor());
    }
  });
}

TEST_P(PublicOperators, ShapeDeclaresTheBias) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    const Matrix x(DType::f32, 8, 4, 1), w(DType::f32, 6, 4, 2), out(DType::f32, 8, 6, 3),
        row(DType::f32, 1, 6, 4);
    const Tensor bias = row.vector();
    const Shard local = shard_of(8, comm.size(), comm.rank());
    const Tensor x_rows = x.tensor().rows(local.begin, local.count),
                 out_rows = out.tensor().rows(local.begin, local.count);
    for (const Strategy strategy : {Strategy::serial, Strategy::overlapped, Strategy::automatic}) {
      for (const bool declared : {false, true}) {
        AgGemm ag(comm, {.m = 8, .n = 6, .k = 4, .bias = declared}, {strategy, 0});
        GemmRs rs(comm, {.m = 8, .n = 6, .k = 4, .bias = declared}, {strategy, 0});
        GemmAr ar(comm, {.m = 8, .n = 6, .k = 4, .bias = declared}, {strategy, 0});
        for (const Tensor* given : {static_cast<const Tensor*>(nullptr), &bias}) {
          const auto message = [&](const char* op) {
            if (declared == (given != nullptr)) return std::string();
            return fmt::format(
                "{}: bias {}", op,
                given ? "given: the shape says none" : "missing: the shape says one");
          };
          EXPECT_EQ(
              error_of<InvalidArgument>([&] { ag.run(x_rows, w.tensor(), out.tensor(), given); }),
              message("ag_gemm"));
          EXPECT_EQ(
              error_of<InvalidArgument>([&] { rs.run(x.tensor(), w.tensor(), out_rows, given); }),
              message("gemm_rs"));
          EXPECT_EQ(error_of<InvalidArgument>(
                        [&] { ar.run(x.tensor(), w.tensor(), out.tensor(), given); }),
                    message("gemm_ar"));
        }
      }
    }
    if (comm.size() == 1) return;
    const bool odd = comm.rank() == 1;
    EXPECT_THROW(GemmRs(comm, {.m = 8, .n = 6, .k = 4, .bias = odd}), Mismatch);
    EXPECT_THROW(GemmRs(comm, {.m = 8, .n = 6, .k = 4, .weight_kn = odd}), Mismatch);
  });
}

template <typename Op, typename Run>
void expect_movable(Communicator& comm, const typename Op::Shape& shape, const char* name,
                    const Run& run) {
  std::vector<Op> made;
  for (int i = 0; i < 3; ++i) made.emplace_back(comm, shape, OverlapOptions{Strategy::serial, 0});
  Op first = std::move(made[0]);
  run(first);
  const std::string expected = fmt::format("{}: called on an operator that was moved from", name);
  EXPECT_EQ(error_of<InvalidArgument>([&] { run(made[0]); }), expected);
  EXPECT_EQ(error_of<InvalidArgument>([&] { (void)made[0].strategy(); }), expected);
  made[0] = std::move(made[2]);
  run(made[0]);
  first = std::move(made[1]);
  EXPECT_EQ(error_of<InvalidArgument>([&] { run(made[1]); }), expected);
  run(first);
}

TEST_P(PublicOperators, OperatorsCanBeMoved) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    const Shard local = shard_of(8, comm.size(), comm.rank());
    const Matrix x(DType::f32, 8, 4, 1), w(DType::f32, 6, 4, 2), out(DType::f32, 8, 6, 3),
        dw(DType::f32, 6, 4, 4);
    const Tensor x_rows = x.tensor().rows(local.begin, local.count),
                 out_rows = out.tensor().rows(local.begin, local.count);
    expect_movable<AgGemm>(comm, {8, 6, 4}, "ag_gemm",
                           [&](AgGemm& op) { op.run(x_rows, w.tensor(), out.tensor()); });
    expect_movable<GemmRs>(comm, {8, 6, 4}, "gemm_rs",
                           [&](GemmRs& op) { op.run(x.tensor(), w.tensor(), out_rows); });
    expect_movable<GemmAr>(comm, {8, 6, 4}, "gemm_ar",
                           [&](GemmAr& op) { op.run(x.tensor(), w.tensor(), out.tensor()); });
    expect_movable<AgWgrad>(comm, {8, 6, 4}, "ag_wgrad",
                            [&](AgWgrad& op) { op.run(x_rows, out.tensor(), dw.tensor()); });
    AgGemm keeps(comm, {.m = 8, .n = 6, .k = 4, .keep_gathered = true});
    const AgGemm moved = std::move(keeps);
    EXPECT_EQ(moved.gathered().describe(), "f32[8, 4]");
    EXPECT_NE(error_of<InvalidArgument>([&] { (void)keeps.gathered(); }), "");
  });
}

// Calls refused on one rank do not count: its next call matches the others' next one.
TEST_P(PublicOperators, RefusedCallOnOneRankKeepsRanksInStep) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    const Matrix x(DType::f32, 8, 4, 1), w(DType::f32, 6, 4, 2), out(DType::f32, 8, 6, 3),
        expected(DType::f32, 8, 6, 4);
    GemmAr op(comm, {8, 6, 4}, {Strategy::overlapped, 2});
    op.run(x.tensor(), w.tensor(), expected.tensor());
    for (int call = 0; call < 6; ++call) {
      if (call % comm.size() == comm.rank()) {
        EXPECT_NE(error_of<InvalidArgument>([&] { op.run(x.tensor(), w.tensor(), x.tensor()); }),
                  "");
        EXPECT_NE(error_of<InvalidArgument>([&] {
                    op.run(x.tensor(), w.tensor().as_read_only(), out.tensor().as_read_only());
                  }),
                  "");
        EXPECT_NE(error_of<InvalidArgument>([&] {
                    op.run(x.tensor(), Tensor(w.tensor().data(), DType::f32, {6, 4}, {0, 1}),
                           out.tensor());
                  }),
                  "");
      }
      op.run(x.tensor(), w.tensor(), out.tensor());
      EXPECT_EQ(bytes_of(out.tensor()), bytes_of(expected.tensor()));
    }
  });
}

TEST(GpuExtents, ExtentsBeyondKernelLimitsAreRefused) {
  const int64_t maximum = int64_t(1) << 30;
  EXPECT_EQ(
      error_of<InvalidArgument>([&] { check_gpu_extents("gemm_ar", maximum, maximum, maximum); }),
      "");
  EXPECT_EQ(error_of<InvalidArgument>([] { check_gpu_extents("gemm_ar", 8, 8, int64_t(1) << 31); }),
            "gemm_ar: M 8 N 8 K 2147483648: expected at most 1073741824 each on GPUs");
  EXPECT_NE(error_of<InvalidArgument>([&] { check_gpu_extents("gemm_ar", maximum + 8, 8, 8); }),
            "");
  EXPECT_NE(error_of<InvalidArgument>([&] { check_gpu_extents("gemm_ar", 8, maximum + 8, 8); }),
            "");
}

TEST_P(PublicOperators, ReceiptsTellWhatWasAskedAndWhatRan) {
  run([](Communicator& comm) {
    set_kernel_threads(1);
    const Matrix x(DType::f32, 64, 4, 1), weight(DType::f32, 6, 4, 2), out(DType::f32, 64, 6, 3);
    const Tensor rows = out.tensor().rows(0, shard_of(64, comm.size(), comm.rank()).count);
    const size_t before = receipts().size();
    for (const Strategy strategy : {Strategy::serial, Strategy::automatic, Strategy::serial}) {
      GemmRs op(comm, {.m = 64, .n = 6, .k = 4}, {strategy, 0});
      for (int i = 0; i < 3; ++i) op.run(x.tensor(), weight.tensor(), rows);
    }
    const GemmAr never_called(comm, {.m = 64, .n = 6, .k = 4});
    const std::vector<Receipt> all = receipts();
    ASSERT_EQ(all.size(), before + 2);
    for (const Receipt& r : {all[before], all[before + 1]}) {
      EXPECT_EQ(r.op + " " + r.shape, "gemm_rs m 64 n 6 k 4 f32");
      EXPECT_EQ(r.group, comm.size());
      EXPECT_EQ(r.calls, r.asked == Strategy::serial ? 6 : 3);
      EXPECT_EQ(r.why.empty(), r.asked == Strategy::serial || r.ran == Strategy::overlapped);
      EXPECT_TRUE(r.asked == Strategy::automatic || r.ran == Strategy::serial);
      const bool compared = r.asked == Strategy::automatic && comm.size() > 1 && env().tune;
      EXPECT_EQ(r.speedup > 0, compared);
    }
  });
}

TANDEM_INSTANTIATE(PublicOperators);

}  // namespace
}  // namespace tandem::test
