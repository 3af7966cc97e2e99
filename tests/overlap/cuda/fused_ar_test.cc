// Fused GEMM+AR: every candidate on odd shapes, on one GPU (GEMM without exchange) and on 2 to 4
// GPUs, also e4m3; alternating candidates under random delays; bias; captured and replayed.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/device/signal_kernels.h"
#include "core/system/env.h"
#include "overlap/gemm_ar/cuda/gemm_ar.h"
#include "tandem/random.h"
#include "tests/comm/cuda/digests.h"
#include "tests/comm/cuda/host_copies.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/captured_calls.h"
#include "tests/overlap/cuda/scaled_operands.h"

namespace tandem::test {
namespace {

using namespace gpu;

class FusedAr : public OnGpus {
 protected:
  void SetUp() override {
    OnGpus::SetUp();
    if (env().gpu_portable) GTEST_SKIP() << "no fused kernels are allowed";
  }
};

// Operand and output dtypes.
struct Format {
  DType dtype;
  DType out = DType::bf16;
  Scaling scaling = Scaling::tensor;

  OpDesc shape(int64_t m, int64_t n, int64_t k) const {
    const int64_t step = 16 / int64_t(size_of(dtype));
    const auto rounded = [step](int64_t size) { return (size + step - 1) / step * step; };
    OpDesc s{m, rounded(n), rounded(k), dtype};
    s.out_dtype = out;
    s.scaling = scaling;
    return s;
  }
};
constexpr Format kFormats[] = {{DType::bf16},
                               {DType::f16},
                               {DType::e4m3},
                               {DType::e4m3, DType::bf16, Scaling::row},
                               {DType::e4m3, DType::f16, Scaling::row}};

// One operator with its operands.
struct Case {
  Case(GpuCommunicator& comm_, const LtContext& lt, const OpDesc& s, Values values = Values::any)
      : comm(comm_),
        shape(s),
        op(comm_, lt, s),
        fused(candidates_of(op, "fused")),
        operands(scaled_sum_operands(comm_, s, false, 5, values)),
        x(operands.x.tensor),
        out(operands.out.tensor) {}
  void run(size_t number, const Tensor* bias = nullptr) { run_into(out, number, bias); }
  void run_into(const Tensor& to, size_t number, const Tensor* bias = nullptr) {
    fused[number].run({x, operands.weight.tensor, to, bias, operands.given()});
  }
  void run_serial() {
    candidate_of(op, kNccl).run({x, operands.weight.tensor, out, nullptr, operands.given()});
  }
  // Digest after the scales moved elsewhere and their old memory was set to NaN.
  uint64_t bits_with_moved_scales(size_t number) {
    const MovedScales moved(comm, operands.scales);
    poison(operands.scales.x, comm.stream());
    poison(operands.scales.weight, comm.stream());
    fused[number].run({x, operands.weight.tensor, out, nullptr, &moved.scales});
    MovedScales::copy(comm, moved.scales, operands.scales);
    return bits();
  }
  // Candidates that differ only in their exchange give equal bits.
  std::string product_of(size_t number) const {
    const std::string& name = fused[number].name;
    return name.substr(0, name.rfind(','));
  }
  uint64_t bits() const { return digest(out, comm.stream()); }
  std::string what(size_t number) const {
    return fmt::format("M {} N {} K {} {} to {} by {} of {}: {}", shape.m, shape.n, shape.k,
                       name_of(shape.dtype), name_of(shape.result()), name_of(shape.scaling),
                       comm.size(), fused[number].name);
  }
  void expect_right(const std::string& about) const { expect_right(out, about); }
  void expect_right(const Tensor& result, const std::string& about) const {
    comm.synchronize();
    const int64_t samples = std::min<int64_t>(result.elements(), 20000);
    const Verdict verdict = verify_product(result, operands.reference, samples, comm.stream());
    EXPECT_LE(verdict.of_bound, 1) << about;
    EXPECT_EQ(verdict.not_finite, 0) << about;
  }

  GpuCommunicator& comm;
  OpDesc shape;
  GemmAr op;
  std::vector<Candidate> fused;
  ScaledOperands operands;
  Tensor x, out;
};

// Includes more than 132 tiles of 64 features, so that a block has several; with few tiles several
// blocks share one, if K is long enough.
constexpr int64_t kShapes[][3] = {
    {1, 8, 8},         {1, 8192, 2048}, {3, 72, 136},    {7, 136, 8},      {8, 8968, 72},
    {9, 64, 1096},     {16, 8, 200},    {17, 8968, 72},  {31, 200, 264},   {64, 8, 8},
    {64, 1000, 776},   {100, 72, 1000}, {5, 2048, 4104}, {24, 4096, 2056}, {60, 2816, 2056},
    {120, 4104, 1096}, {128, 264, 64},  {129, 136, 72},  {200, 8968, 136}, {256, 1160, 584},
    {250, 4096, 1544}};

TEST_P(FusedAr, EveryCandidateIsReproducibleAndMatchesReferenceOnOddShapes) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    for (const Format& format : kFormats) {
      for (const auto& [m, n, k] : kShapes) {
        Case c(comm, lt, format.shape(m, n, k));
        ASSERT_GT(c.fused.size(), 0u);
        std::map<std::string, uint64_t> of_product;
        for (size_t number = 0; number < c.fused.size(); ++number) {
          uint64_t& first = of_product[c.product_of(number)];
          for (int i = 0; i < 4; ++i) {
            poison(c.out, comm.stream());
            c.run(number);
            const uint64_t bits = c.bits();
            if (first == 0) first = bits;
            EXPECT_EQ(bits, first) << c.what(number) << ", call " << i;
          }
          c.expect_right(c.what(number));
          if (c.shape.scaled()) {
            EXPECT_EQ(c.bits_with_moved_scales(number), first)
                << c.what(number) << ", moved scales";
          }
        }
        comm.synchronize();
        for (const auto& [product, bits] : of_product) {
          comm.require_same("bits of the sum, " + product, std::to_string(bits));
        }
      }
    }
  });
}

// Truncation in narrow accumulators adds up if all terms are positive: the bound allows for a
// limited span of K between promotions (tests/bench/error_bound_test.cc).
TEST_P(FusedAr, LongSumsOfE4m3ArePromotedInTime) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    const Format format{DType::e4m3, DType::f16};
    for (const int64_t m : {8, 40, 128, 256}) {
      Case c(comm, lt, format.shape(m, 1040, 4096), Values::positive);
      ASSERT_GT(c.fused.size(), 0u);
      for (size_t number = 0; number < c.fused.size(); ++number) {
        poison(c.out, comm.stream());
        c.run(number);
        c.expect_right(c.what(number));
      }
    }
  });
}

TEST_P(FusedAr, UnsupportedWeightsAndSizesHaveNoFusedCandidate) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    OpDesc kn{8, 16, 16};
    kn.weight_kn = true;
    for (const OpDesc& s : {OpDesc{257, 16, 16}, OpDesc{0, 16, 16}, OpDesc{8, 16, 16, DType::f32},
                            kn, Format{DType::e4m3, DType::f32}.shape(8, 16, 16)}) {
      EXPECT_TRUE(candidates_of(GemmAr(comm, lt, s), "fused").empty());
    }
  });
}

std::vector<float> read_bf16(const GpuCommunicator& comm, const Tensor& tensor) {
  std::vector<float> values;
  for (const BFloat16 value : read<BFloat16>(comm, tensor)) values.push_back(value.to_float());
  return values;
}

TEST_P(FusedAr, BiasIsAddedOnce) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    for (const Format& format : kFormats) {
      if (format.out != DType::bf16 || format.dtype == DType::f16) continue;
      for (const int64_t k : {16, 264}) {  // without and with tiles that blocks share
        for (const int64_t m : {5, 64, 130}) {
          OpDesc shape = format.shape(m, 208, k);
          const Matrix bias(DType::bf16, {shape.n});
          fill_uniform(bias.tensor, 9, 1, 0, comm.stream());
          Case without(comm, lt, shape);
          shape.bias = true;
          Case with(comm, lt, shape);
          ASSERT_EQ(with.fused.size(), without.fused.size());
          for (size_t number = 0; number < with.fused.size(); ++number) {
            without.run(number);
            with.run(number, &bias.tensor);
            const auto without_norm = read_bf16(comm, without.out), sum = read_bf16(comm, with.out),
                       added = read_bf16(comm, bias.tensor);
            // Rounding of rank 0's partial sum, with and without the bias, and of the total: half a
            // unit in the last of 8 bits of at most six standard deviations of a sum of products of
            // uniform numbers, times scales of 25/16.
            const auto rounding = [&](int ranks) {
              const double scales = format.dtype == DType::e4m3 ? 25.0 / 16 : 1;
              const double largest = 6 * std::sqrt(double(shape.k) * ranks) / 3 * scales + 1;
              return std::exp2(std::floor(std::log2(largest)) - 8);
            };
            const double bound = 2 * (rounding(1) + rounding(comm.size()));
            ASSERT_LT(bound, 0.9);  // fails if the bias is missing or added twice
            for (size_t i = 0; i < sum.size(); ++i) {
              ASSERT_NEAR(sum[i] - without_norm[i], added[i % size_t(shape.n)], bound)
                  << with.what(number) << " at " << i;
            }
          }
        }
      }
    }
  });
}

// The last rank has too few k-steps for the split of the other ranks. All elements of the sum are
// equal.
TEST_P(FusedAr, KMayDifferByRank) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    const bool last = comm.rank() + 1 == comm.size();
    for (const Format& format : {kFormats[0], kFormats[3]}) {
      const bool codes = format.dtype == DType::e4m3;
      for (const int64_t m : {4, 100, 256}) {
        Case c(comm, lt, format.shape(m, 520, last ? 400 : 2048));
        const auto fill = [&](const Tensor& tensor, int byte) {
          gpu::check(cudaMemsetAsync(tensor.data(), byte, tensor.bytes(), comm.stream()), "fill");
        };
        // 0x38 is 1 in e4m3; bytes 0x3f are 191/256 in bf16 and 0.747 in f32.
        for (const Tensor& operand : {c.x, c.operands.weight.tensor})
          fill(operand, codes ? 0x38 : 0x3f);
        for (const Tensor& scales : {c.operands.scales.x, c.operands.scales.weight}) {
          fill(scales, 0x3f);
        }
        const double each = codes ? 0.74706 * 0.74706 : 191.0 * 191 / 65536;
        const double sum = each * double(2048 * (comm.size() - 1) + 400);
        for (size_t number = 0; number < c.fused.size(); ++number) {
          poison(c.out, comm.stream());
          c.run(number);
          for (const float value : read_bf16(comm, c.out)) {
            ASSERT_NEAR(value, sum, sum * 0x1p-7) << c.what(number);
          }
        }
      }
    }
  });
}

// An empty exchange slot is marked by a NaN that rounding never produces, unlike a NaN from x.
TEST_P(FusedAr, NanIsSentLikeAnyValue) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    for (const int64_t m : {8, 16, 64, 128, 256}) {
      for (const Format& format : kFormats) {
        Case c(comm, lt, format.shape(m, 136, 1096));
        for (size_t number = 0; number < c.fused.size(); ++number) {
          if (comm.rank() + 1 == comm.size()) poison(c.x, comm.stream());
          c.run(number);
          const auto codes = read<uint16_t>(comm, c.out);
          const int infinity = c.shape.result() == DType::bf16 ? 0x7f80 : 0x7c00;
          EXPECT_TRUE(std::all_of(codes.begin(), codes.end(), [&](uint16_t code) {
            return (code & 0x7fff) > infinity;
          })) << c.what(number);
          fill_uniform(c.x, 5, 100 + uint64_t(comm.rank()), 0, comm.stream());
          c.run(number);
          c.expect_right(c.what(number));
        }
      }
    }
  });
}

TEST_P(FusedAr, AlternatingCandidatesAreReproducibleUnderRandomDelays) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    std::vector<std::unique_ptr<Case>> cases;
    const Format bf16 = kFormats[0], by_tensor = kFormats[2], by_row = kFormats[3];
    for (const OpDesc& shape :
         {bf16.shape(1, 8192, 512), bf16.shape(40, 1000, 264), bf16.shape(128, 520, 264),
          bf16.shape(256, 4096, 136), bf16.shape(12, 1024, 4096), by_row.shape(1, 8960, 1040),
          by_tensor.shape(40, 1008, 272), by_row.shape(200, 8960, 272),
          by_row.shape(100, 2048, 4096)}) {
      cases.push_back(std::make_unique<Case>(comm, lt, shape));
    }
    constexpr size_t kInARow = 20;
    CallsInARow calls(comm, kInARow, size_t(256 * 8960) * size_of(DType::bf16));
    std::vector<std::pair<size_t, size_t>> done;  // case and candidate
    std::map<std::pair<size_t, std::string>, uint64_t> bits;
    for (uint64_t i = 0; i < 800; ++i) {
      const auto draw = philox(1, 0, i);
      const size_t which = draw[0] % cases.size();
      Case& c = *cases[which];
      const size_t number = draw[1] % c.fused.size();
      const uint32_t delay = philox(2, uint64_t(comm.rank()), i)[0] % 60000;
      if (delay < 20000) launch_pause(delay, comm.stream());
      if (draw[2] % 16 == 0) c.run_serial();
      c.run_into(calls.next(c.out), number);
      done.emplace_back(which, number);
      if (!calls.full()) continue;
      const std::vector<uint64_t> now = calls.digests();
      for (size_t call = 0; call < now.size(); ++call) {
        const auto& [of, used] = done[call];
        const std::string what =
            fmt::format("behind call {}: {}: {}", i, call, cases[of]->what(used));
        uint64_t& first = bits[{of, cases[of]->product_of(used)}];
        if (first == 0) {
          cases[of]->expect_right(calls.out(call), what);
          first = now[call];
        }
        ASSERT_EQ(now[call], first) << what;
      }
      calls.begin_again();
      done.clear();
    }
    comm.synchronize();
  });
}

TEST_P(FusedAr, CapturedGraphReplays) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    Case one(comm, lt, {1, 1032, 264}), some(comm, lt, {64, 1032, 520}),
        many(comm, lt, {200, 1032, 264}), scaled(comm, lt, kFormats[3].shape(24, 1040, 1040));
    const auto all = {&one, &some, &many, &scaled};
    comm.synchronize();
    const CapturedCalls graph(comm, [&] {
      one.run(0);
      for (Case* c : {&some, &scaled}) {
        for (size_t number = 0; number < c->fused.size(); ++number) c->run(number);
      }
      many.run(0);
      one.run(0);
    });
    constexpr int kReplays = 100;
    Digests digests(comm, all.size() * kReplays);
    for (int i = 0; i < kReplays; ++i) {
      for (Case* c : all) poison(c->out, comm.stream());
      if ((i + comm.rank()) % 5 == 0) launch_pause(20000, comm.stream());
      graph.launch();
      for (const Case* c : all) digests.add(c->out);
    }
    const std::vector<uint64_t> replayed = digests.take();
    for (size_t i = all.size(); i < replayed.size(); ++i) {
      ASSERT_EQ(replayed[i], replayed[i % all.size()])
          << "replay " << i / all.size() << ", operator " << i % all.size();
    }
    for (Case* c : all) c->expect_right("replayed");
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, FusedAr, testing::Values(1, 2, 3, 4), gpus_name);

}  // namespace
}  // namespace tandem::test
