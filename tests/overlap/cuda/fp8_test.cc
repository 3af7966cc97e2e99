// e4m3 operands: the GEMM by each implementation, the operators by every candidate against the
// exact product of the scaled codes, scales that are exchanged, quantization, and rejected
// arguments.
#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "bench/cuda/verify.h"
#include "codec/cuda/quantize.h"
#include "codec/quantize.h"
#include "comm/device/signal_kernels.h"
#include "gemm/cuda/scaled_gemm.h"
#include "overlap/ag_gemm/cuda/ag_gemm.h"
#include "overlap/gemm_ar/cuda/gemm_ar.h"
#include "overlap/gemm_rs/cuda/gemm_rs.h"
#include "tandem/overlap.h"
#include "tandem/random.h"
#include "tests/comm/cuda/digests.h"
#include "tests/comm/cuda/host_copies.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/captured_calls.h"
#include "tests/overlap/cuda/scaled_operands.h"
#include "tests/overlap/cuda/strategy_roundings.h"

namespace tandem::test {
namespace {

using namespace gpu;

class Fp8 : public OnGpus {};
class Fp8Product : public OnGpus {};

// Every implementation that this GPU and library support; prints the one in use.
TEST_P(Fp8Product, EveryImplementationMatchesReference) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    for (const Scaling scaling : kScalings) {
      for (const DType out : {DType::bf16, DType::f32, DType::f16}) {
        for (const Shape3& size :
             {Shape3{128, 64, 64}, {33, 48, 80}, {1, 16, 16}, {7, 16, 32}, {512, 256, 4096}}) {
          const OpDesc shape = scaled_shape(size.m, size.n, size.k, scaling, out);
          const ScaledOperands o = scaled_ag_operands(comm, shape, 3);
          const auto multiply = [&](const ScaledGemm& gemm, int64_t first, int64_t rows) {
            gemm.run(o.x.tensor.rows(first, rows).data(), o.weight.tensor.data(),
                     o.out.tensor.rows(first, rows).data(), nullptr, comm.stream(),
                     pointers_of(shape, &o.scales, first));
          };
          for (const GemmAlgorithm algorithm :
               {GemmAlgorithm::library, GemmAlgorithm::after, GemmAlgorithm::widened}) {
            const std::string what =
                fmt::format("{} {}", gpu::name_of(algorithm), describe_scaled(shape));
            std::unique_ptr<ScaledGemm> gemm, first_row, rest;
            try {
              gemm = std::make_unique<ScaledGemm>(lt, product_of(shape, size.m, false), algorithm);
              first_row = std::make_unique<ScaledGemm>(lt, product_of(shape, 1, false), algorithm);
              rest =
                  std::make_unique<ScaledGemm>(lt, product_of(shape, size.m - 1, false), algorithm);
            } catch (const Unsupported&) {
              EXPECT_NE(algorithm, GemmAlgorithm::widened) << what;
              fmt::print("cuBLASLt has no {}\n", what);
              continue;
            }
            poison(o.out.tensor, comm.stream());
            multiply(*gemm, 0, size.m);
            expect_right(comm, o, what);
            poison(o.out.tensor, comm.stream());
            multiply(*first_row, 0, 1);
            multiply(*rest, 1, size.m - 1);  // the remaining scales are unaligned
            expect_right(comm, o, what + " in two shards");
          }
          fmt::print("{}: {}\n", describe_scaled(shape),
                     gpu::name_of(ScaledGemm(lt, product_of(shape, size.m, false)).algorithm()));
        }
      }
    }
  });
}

// Truncation in narrow accumulators adds up if all terms are positive: the bound allows for a
// limited span of K between promotions (tests/bench/error_bound_test.cc).
TEST_P(Fp8Product, LongSumsArePromotedInTime) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    const OpDesc shape = scaled_shape(128, 256, 4096, Scaling::tensor, DType::f16);
    const ScaledOperands o = scaled_ag_operands(comm, shape, 3, Values::positive);
    for (const GemmAlgorithm algorithm :
         {GemmAlgorithm::library, GemmAlgorithm::after, GemmAlgorithm::widened}) {
      std::unique_ptr<ScaledGemm> gemm;
      try {
        gemm = std::make_unique<ScaledGemm>(lt, product_of(shape, shape.m, false), algorithm);
      } catch (const Unsupported&) {
        EXPECT_NE(algorithm, GemmAlgorithm::widened);
        continue;
      }
      poison(o.out.tensor, comm.stream());
      gemm->run(o.x.tensor.data(), o.weight.tensor.data(), o.out.tensor.data(), nullptr,
                comm.stream(), pointers_of(shape, &o.scales));
      expect_right(comm, o, std::string(gpu::name_of(algorithm)));
    }
  });
}

TEST_P(Fp8Product, BiasIsAddedAfterTheScales) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    for (const Scaling scaling : kScalings) {
      for (const DType out : {DType::f32, DType::bf16}) {
        const OpDesc shape = scaled_shape(33, 48, 64, scaling, out);
        const ScaledOperands o = scaled_ag_operands(comm, shape, 5);
        const Matrix bias(out, {48});
        fill_uniform(bias.tensor, 9, 1, 0, comm.stream());
        const auto outputs = [&](bool with_bias) {
          ScaledGemm(lt, product_of(shape, 33, with_bias))
              .run(o.x.tensor.data(), o.weight.tensor.data(), o.out.tensor.data(),
                   with_bias ? bias.tensor.data() : nullptr, comm.stream(),
                   pointers_of(shape, &o.scales));
          if (out == DType::f32) return read<float>(comm, o.out.tensor);
          std::vector<float> values;
          for (const BFloat16 value : read<BFloat16>(comm, o.out.tensor))
            values.push_back(value.to_float());
          return values;
        };
        const auto without = outputs(false), with = outputs(true);
        const Matrix wide(DType::f32, {48});
        fill_uniform(wide.tensor, 9, 1, 0, comm.stream());
        const auto expected = read<float>(comm, wide.tensor);
        for (size_t i = 0; i < with.size(); ++i) {
          // bf16: bound on the rounding of either output and of the bias.
          const double bound =
              out == DType::f32 ? 0.05 : 0.05 + 0x1p-8 * (2 * std::abs(with[i]) + 2);
          ASSERT_NEAR(with[i] - without[i], expected[i % 48], bound)
              << describe_scaled(shape) << " element " << i;
        }
      }
    }
  });
}

// Rows of random numbers, and edge cases for the scaling.
template <typename T>
std::vector<T> hard_rows(int64_t rows, int64_t columns) {
  std::vector<T> host(size_t(rows * columns));
  for (int64_t i = 0; i < rows * columns; ++i) {
    const int64_t row = i / columns, column = i % columns;
    float value = (2 * uniform(11, uint64_t(row), uint64_t(column)) - 1) *
                  std::ldexp(1.0f, int(row % 12) - 6);
    if (row == 1) value = 0;
    if (row == 2) value = column == 3 ? 1e-38f : 0;
    if (row == 3 && column == 5) value = std::numeric_limits<float>::infinity();
    if (row == 4 && column == 6) value = std::nanf("");
    if (row == 5) value = column == 0 ? 448.0f : float(column % 33) * 0x1p-10f;  // scale 1: ties
    if constexpr (std::is_same_v<T, float>) {
      host[size_t(i)] = value;
    } else {
      host[size_t(i)] = T::from_float(value);
    }
  }
  return host;
}

template <typename T>
void expect_the_cpus_codes(GpuCommunicator& comm, DType dtype, int64_t rows, int64_t columns) {
  std::vector<T> host = hard_rows<T>(rows, columns);
  std::vector<uint8_t> expected(host.size());
  std::vector<float> expected_scales(static_cast<size_t>(rows));
  quantize_rows_on_cpu(Tensor(host.data(), dtype, {rows, columns}),
                       Tensor(expected.data(), DType::e4m3, {rows, columns}),
                       Tensor(expected_scales.data(), DType::f32, {rows}));
  const Matrix x(dtype, {rows, columns}), codes(DType::e4m3, {rows, columns}),
      scales(DType::f32, {rows});
  write(comm, x.tensor.data(), host);
  quantize_rows(comm, x.tensor, codes.tensor, scales.tensor);
  EXPECT_EQ(read<float>(comm, scales.tensor), expected_scales) << tandem::name_of(dtype);
  EXPECT_EQ(read<uint8_t>(comm, codes.tensor), expected)
      << tandem::name_of(dtype) << " " << rows << " x " << columns;
}

TEST_P(Fp8Product, QuantizedRowsMatchTheCpu) {
  run([](GpuCommunicator& comm) {
    for (const Shape3& size : {Shape3{0, 16, 0}, {6, 16, 0}, {40, 1040, 0}, {7, 8192, 0}}) {
      expect_the_cpus_codes<float>(comm, DType::f32, size.m, size.n);
      expect_the_cpus_codes<BFloat16>(comm, DType::bf16, size.m, size.n);
      expect_the_cpus_codes<Float16>(comm, DType::f16, size.m, size.n);
    }
    const Matrix x(DType::f32, {4, 24}), codes(DType::e4m3, {4, 24}), scales(DType::f32, {4});
    EXPECT_THROW(quantize_rows(comm, x.tensor, codes.tensor, scales.tensor), InvalidArgument);
    std::vector<float> host(64);
    const Matrix other(DType::e4m3, {4, 16});
    EXPECT_THROW(
        quantize_rows(comm, Tensor(host.data(), DType::f32, {4, 16}), other.tensor, scales.tensor),
        InvalidArgument);
  });
}

TEST_P(Fp8, EveryCandidateMatchesReferenceOnOddShapes) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    const auto try_shape = [&](const OpDesc& shape) {
      const auto try_candidates = [&](const auto& op, const ScaledOperands& o, const char* name) {
        for (const Candidate& candidate : candidates_of(op)) {
          const std::string what = fmt::format("{} {} {} of {}", name, candidate.name,
                                               describe_scaled(shape), comm.size());
          std::vector<uint64_t> digests;
          for (int i = 0; i < 3; ++i) {
            poison(o.out.tensor, comm.stream());
            if ((i + comm.rank()) % 3 == 0) launch_pause(20000, comm.stream());
            candidate.run({o.x.tensor, o.weight.tensor, o.out.tensor, nullptr, &o.scales});
            digests.push_back(digest(o.out.tensor, comm.stream()));
          }
          expect_right(comm, o, what, candidate.name);
          EXPECT_EQ(digests, std::vector<uint64_t>(3, digests[0])) << what;
        }
      };
      gpu::AgGemm ag(comm, lt, shape, Strategy::serial);
      try_candidates(ag, scaled_ag_operands(comm, shape, 3), "ag_gemm");
      gpu::GemmRs rs(comm, lt, shape, Strategy::serial);
      try_candidates(rs, scaled_sum_operands(comm, shape, true, 4), "gemm_rs");
      gpu::GemmAr ar(comm, lt, shape, Strategy::serial);
      const ScaledOperands o = scaled_sum_operands(comm, shape, false, 5);
      try_candidates(ar, o, "gemm_ar");
      comm.require_same("bits", std::to_string(digest(o.out.tensor, comm.stream())));
    };
    for (const Scaling scaling : kScalings) {
      for (const Shape3& size :
           {Shape3{128, 64, 64}, {33, 48, 80}, {2, 16, 16}, {0, 16, 32}, {513, 272, 144}}) {
        try_shape(scaled_shape(size.m, size.n, size.k, scaling));
      }
      try_shape(scaled_shape(384 * comm.size(), 512, 1024, scaling));
      try_shape(scaled_shape(33, 48, 80, scaling, DType::f32));
      try_shape(scaled_shape(33, 48, 80, scaling, DType::f16));
    }
  });
}

TEST_P(Fp8, KeptRowsAreTheCodesOfAllRanks) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    for (const Scaling scaling : kScalings) {
      for (const Shape3& size : {Shape3{33, 48, 80}, {256 * comm.size(), 512, 1024}}) {
        OpDesc shape = scaled_shape(size.m, size.n, size.k, scaling);
        shape.keep_gathered = true;
        gpu::AgGemm ag(comm, lt, shape);
        const ScaledOperands o = scaled_ag_operands(comm, shape, 3);
        const Matrix all(DType::e4m3, {size.m, size.k});
        fill_uniform(all.tensor, o.reference.seed, o.reference.x_stream, 0, comm.stream());
        const uint64_t whole = digest(all.tensor, comm.stream());
        for (const Candidate& candidate : candidates_of(ag)) {
          const std::string what = fmt::format("{} {}", candidate.name, describe_scaled(shape));
          poison(o.out.tensor, comm.stream());
          poison(ag.gathered(), comm.stream());
          comm.synchronize();
          comm.barrier("poisoned");
          candidate.run({o.x.tensor, o.weight.tensor, o.out.tensor, nullptr, &o.scales});
          EXPECT_EQ(digest(ag.gathered(), comm.stream()), whole) << what;
          expect_right(comm, o, what, candidate.name);
        }
      }
    }
  });
}

// Two sets of operands alternate through the same operators: scales of the last call would show.
TEST_P(Fp8, OperandsAlternateUnderRandomDelaysAndInAGraph) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    const OpDesc shape = scaled_shape(130, 64, 96, Scaling::row);
    gpu::AgGemm ag(comm, lt, shape, Strategy::serial);
    gpu::GemmRs rs(comm, lt, shape, Strategy::serial);
    std::vector<ScaledOperands> ag_o, rs_o;
    for (const uint64_t seed : {3, 8}) {
      ag_o.push_back(scaled_ag_operands(comm, shape, seed));
      rs_o.push_back(scaled_sum_operands(comm, shape, true, seed));
    }
    const auto call = [&](const auto& op, const ScaledOperands& o, const char* candidate,
                          const Tensor& out) {
      candidate_of(op, candidate).run({o.x.tensor, o.weight.tensor, out, nullptr, &o.scales});
    };
    constexpr uint64_t kInARow = 4;
    CallsInARow calls(comm, 2 * kInARow, size_t(130 * 64) * size_of(DType::bf16));
    for (uint64_t i = 0; i < 200; ++i) {
      const uint32_t delay = philox(2, uint64_t(comm.rank()), i)[0] % 60000;
      if (delay < 20000) launch_pause(delay, comm.stream());
      const char* const candidate = i % 3 == 0 ? "serial_copy" : "chunked";
      call(ag, ag_o[i % 2], candidate, calls.next(ag_o[i % 2].out.tensor));
      call(rs, rs_o[i % 2], candidate, calls.next(rs_o[i % 2].out.tensor));
      if (!calls.full()) continue;
      for (size_t j = 0; j < 2 * kInARow; ++j) {  // even: ag_gemm
        const size_t set = j / 2 % 2;
        const ScaledOperands& o = j % 2 ? rs_o[set] : ag_o[set];
        expect_right(comm, calls.out(j), o.reference,
                     fmt::format("{} behind call {}: {}", j % 2 ? "gemm_rs" : "ag_gemm", i, j));
      }
      calls.begin_again();
    }
    comm.synchronize();
    const CapturedCalls graph(comm, [&] {
      for (const size_t set : {0, 1}) {
        call(ag, ag_o[set], "chunked", ag_o[set].out.tensor);
        call(rs, rs_o[set], "chunked", rs_o[set].out.tensor);
      }
    });
    constexpr int kReplays = 50;
    Digests digests(comm, 4 * kReplays);
    for (int i = 0; i < kReplays; ++i) {
      for (const size_t set : {0, 1}) {
        poison(ag_o[set].out.tensor, comm.stream());
        poison(rs_o[set].out.tensor, comm.stream());
      }
      if ((i + comm.rank()) % 5 == 0) launch_pause(20000, comm.stream());
      graph.launch();
      for (const size_t set : {0, 1}) {
        digests.add(ag_o[set].out.tensor);
        digests.add(rs_o[set].out.tensor);
      }
    }
    const std::vector<uint64_t> replayed = digests.take();
    for (size_t i = 4; i < replayed.size(); ++i) {
      ASSERT_EQ(replayed[i], replayed[i % 4]) << "replay " << i / 4 << ", output " << i % 4;
    }
    for (const size_t set : {0, 1}) {
      expect_right(comm, ag_o[set], "ag_gemm replayed");
      expect_right(comm, rs_o[set], "gemm_rs replayed");
    }
  });
}

// Replayed graphs copy rows and their scales: new ones may be allocated at freed addresses.
TEST_P(Fp8, OperandsMayBeFreed) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    for (const int64_t m : {int64_t(130), int64_t(1024 * comm.size())}) {
      const OpDesc shape = scaled_shape(m, 64, 2048, Scaling::row);
      gpu::AgGemm ag(comm, lt, shape, Strategy::serial);
      gpu::GemmRs rs(comm, lt, shape, Strategy::serial);
      const auto rounds = [&](auto& op, const auto& operands, const std::string& name) {
        std::set<const void*> rows, scales;
        constexpr uint64_t kRounds = 6;
        for (uint64_t round = 0; round < kRounds; ++round) {
          const ScaledOperands o = operands(3 + round);
          rows.insert(o.x.tensor.data());
          scales.insert(o.scales.x.data());
          for (int call = 0; call < 3; ++call) {
            poison(o.out.tensor, comm.stream());
            candidate_of(op, "chunked")
                .run({o.x.tensor, o.weight.tensor, o.out.tensor, nullptr, &o.scales});
            expect_right(comm, o, fmt::format("{} M {} round {} call {}", name, m, round, call));
          }
        }
        if (comm.shares_gpu()) return;  // ranks may reuse memory that other ranks freed
        EXPECT_LT(rows.size(), kRounds) << name << ": all rows where none were";
        EXPECT_LT(scales.size(), kRounds) << name << ": all scales where none were";
      };
      rounds(
          ag, [&](uint64_t seed) { return scaled_ag_operands(comm, shape, seed); }, "ag_gemm");
      rounds(
          rs, [&](uint64_t seed) { return scaled_sum_operands(comm, shape, true, seed); },
          "gemm_rs");
    }
  });
}

TEST_P(Fp8, PublicOperatorsAcceptScalesAndRejectInvalidArguments) {
  run([](GpuCommunicator& comm) {
    for (const Scaling scaling : kScalings) {
      const OpDesc shape = scaled_shape(37, 32, 48, scaling);
      const ScaledOperands ao = scaled_ag_operands(comm, shape, 3),
                           ro = scaled_sum_operands(comm, shape, true, 4),
                           so = scaled_sum_operands(comm, shape, false, 5);
      for (const Strategy strategy :
           {Strategy::serial, Strategy::overlapped, Strategy::automatic}) {
        if (strategy == Strategy::overlapped && comm.size() == 1) continue;
        const std::string what = fmt::format("{} {}", name_of(strategy), describe_scaled(shape));
        tandem::AgGemm ag(comm,
                          {.m = 37, .n = 32, .k = 48, .dtype = DType::e4m3, .scaling = scaling},
                          {strategy, 0});
        ag.run(ao.x.tensor, ao.weight.tensor, ao.out.tensor, nullptr, &ao.scales);
        expect_right(comm, ao, "ag_gemm " + what);
        const tandem::GemmRs::Shape sum{
            .m = 37, .n = 32, .k = 48, .dtype = DType::e4m3, .scaling = scaling};
        tandem::GemmRs rs(comm, sum, {strategy, 0});
        rs.run(ro.x.tensor, ro.weight.tensor, ro.out.tensor, nullptr, &ro.scales);
        expect_right(comm, ro, "gemm_rs " + what, candidate_of(strategy));
        tandem::GemmAr ar(comm,
                          {.m = 37, .n = 32, .k = 48, .dtype = DType::e4m3, .scaling = scaling},
                          {strategy, 0});
        ar.run(so.x.tensor, so.weight.tensor, so.out.tensor, nullptr, &so.scales);
        expect_right(comm, so, "gemm_ar " + what, candidate_of(strategy));
      }
    }
    const LtContext lt;
    const OpDesc shape = scaled_shape(32, 32, 48, Scaling::row);
    EXPECT_THROW(gpu::GemmAr(comm, lt, scaled_shape(32, 24, 48, Scaling::row)), InvalidArgument);
    EXPECT_THROW(gpu::GemmAr(comm, lt, scaled_shape(32, 32, 40, Scaling::row)), InvalidArgument);
    EXPECT_THROW(gpu::GemmAr(comm, lt, scaled_shape(32, 32, 48, Scaling::row, DType::e4m3)),
                 InvalidArgument);
    OpDesc kn = shape;
    kn.weight_kn = true;
    EXPECT_THROW(gpu::AgGemm(comm, lt, kn), InvalidArgument);
    tandem::GemmAr ar(comm,
                      {.m = 32, .n = 32, .k = 48, .dtype = DType::e4m3, .scaling = Scaling::row},
                      {Strategy::serial});
    const ScaledOperands o = scaled_sum_operands(comm, shape, false, 5);
    const auto run_with = [&](const Scales* scales) {
      ar.run(o.x.tensor, o.weight.tensor, o.out.tensor, nullptr, scales);
    };
    EXPECT_THROW(run_with(nullptr), InvalidArgument);
    const Scales swapped{o.scales.x, Tensor()};
    EXPECT_THROW(run_with(&swapped), InvalidArgument);
    const Scales too_few{o.scales.x.rows(0, 1), o.scales.weight};
    EXPECT_THROW(run_with(&too_few), InvalidArgument);
    std::vector<float> host(48);
    const Scales on_host{Tensor(host.data(), DType::f32, {32}), o.scales.weight};
    EXPECT_THROW(run_with(&on_host), InvalidArgument);
    tandem::GemmAr unscaled(comm, {.m = 32, .n = 32, .k = 48, .dtype = DType::bf16},
                            {Strategy::serial});
    const Matrix x(DType::bf16, {32, 48});
    EXPECT_THROW(unscaled.run(x.tensor, x.tensor, o.out.tensor, nullptr, &o.scales),
                 InvalidArgument);
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, Fp8, testing::Values(1, 2, 3, 4), gpus_name);
INSTANTIATE_TEST_SUITE_P(Gpu, Fp8Product, testing::Values(1), gpus_name);

}  // namespace
}  // namespace tandem::test
