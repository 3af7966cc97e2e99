// Dense operators over wire formats on GPU ranks, by every candidate, against CPU ranks.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "bench/cuda/verify.h"
#include "comm/device/signal_kernels.h"
#include "tests/comm/cuda/host_copies.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/captured_calls.h"
#include "tests/overlap/cuda/encoded_problem.h"
#include "tests/overlap/cuda/matrix.h"
#include "tune/cuda/measure.h"

namespace tandem::test {
namespace {

using namespace gpu;

class EncodedOperators : public OnGpus {};

/// Operands of one rank on its GPU.
struct OnGpu {
  Matrix x, weight, out;
  OnGpu(GpuCommunicator& comm, const EncodedProblem& p)
      : x(p.dtype, p.x_rows(comm.size(), comm.rank()).count, p.k),
        weight(p.dtype, p.n, p.k),
        out(p.dtype, p.out_rows(comm.size(), comm.rank()), p.n) {
    write(comm, x.tensor.data(), stored_as(p.dtype, p.x(comm.size(), comm.rank())));
    write(comm, weight.tensor.data(), stored_as(p.dtype, p.weight(comm.rank())));
  }
  tandem::Operands operands() const { return {x.tensor, weight.tensor, out.tensor}; }
};

std::vector<EncodedProblem> problems(int ranks) {
  const int64_t m = 256 * ranks;
  return {{"gemm_rs", "int8", 2 * m, 640, 1024},
          {"gemm_rs", "int4:g32", m, 384, 512},
          {"gemm_rs", "int4", m, 136, 576},
          {"gemm_rs", "e4m3", 37, 136, 72},
          {"gemm_rs", "int8", 96, 128, 256, DType::f32},
          {"ag_gemm", "int8", m, 384, 2432},
          {"ag_gemm", "int4:g32", 2 * m, 256, 1024},
          {"ag_gemm", "int4", m, 136, 640},
          {"ag_gemm", "int6", 37, 24, 128},
          {"gemm_ar", "int8", m, 256, 512},
          {"gemm_ar", "int8", 64, 512, 256},
          {"gemm_ar", "int4:g32", 300, 256, 512}};
}

/// Results of the CPU ranks, by rank.
struct OnCpu {
  std::vector<std::vector<float>> exact, encoded;
  OnCpu(const EncodedProblem& p, int ranks)
      : exact(on_cpu_ranks(p, ranks, true)), encoded(on_cpu_ranks(p, ranks, false)) {}
};

/// Three randomly delayed calls of `candidate` give equal bits, as accurate as the CPU ranks'.
void expect_as_exact(GpuCommunicator& comm, const EncodedProblem& p, const OnGpu& on,
                     const OnCpu& cpu, const Candidate& candidate) {
  const std::string what = p.describe() + " by " + candidate.name;
  EXPECT_TRUE(candidate.encoded) << what;
  uint64_t bits = 0;
  for (int call = 0; call < 3; ++call) {
    poison(on.out.tensor, comm.stream());
    if ((call + comm.rank()) % 2 == 0) launch_pause(50000, comm.stream());
    candidate.run(on.operands());
    const uint64_t found = digest(on.out.tensor, comm.stream());
    if (call == 0) bits = found;
    EXPECT_EQ(found, bits) << what << ", call " << call;
  }
  if (p.op == "gemm_ar") comm.require_same("bits", std::to_string(bits));
  const size_t rank = size_t(comm.rank());
  const Wire wire = Wire::parse(p.wire);
  const auto found = floats_of(p.dtype, read<std::byte>(comm, on.out.tensor));
  const Difference of = between(found, cpu.exact[rank]),
                   of_cpu = between(cpu.encoded[rank], cpu.exact[rank]);
  // Error of the codes, plus rounding of partial sums and of the result.
  const double each = wire.error_bound() + 0x1p-7;
  EXPECT_LE(of.largest, p.gathers() ? each * double(p.k) / 2 : 2 * comm.size() * each * p.largest())
      << what;
  // If the row length is no multiple of the group size, a rank's groups there are smaller.
  const double groups = (p.gathers() ? p.k : p.n) % wire.group == 0 ? 1.03 : 1.1;
  EXPECT_LE(of.root_mean_square, groups * of_cpu.root_mean_square + 1e-6) << what;
  if (!p.gathers()) return;
  // Codes are equal, so only GEMM rounding remains. Fused kernels do not encode local rows.
  std::vector<float> wanted = cpu.encoded[rank];
  if (candidate.form == Strategy::overlapped) {
    const Shard local = shard_of(p.m, comm.size(), comm.rank());
    std::copy_n(cpu.exact[rank].begin() + local.begin * p.n, local.count * p.n,
                wanted.begin() + local.begin * p.n);
  }
  EXPECT_LE(between(found, wanted).largest, 0x1p-7 * p.largest()) << what;
}

TEST_P(EncodedOperators, AreAsAccurateAsCpuRanks) {
  if (ranks() == 1) GTEST_SKIP() << "one rank encodes nothing";
  for (const EncodedProblem& p : problems(ranks())) {
    const OnCpu cpu(p, ranks());
    run([&](GpuCommunicator& comm) {
      const OnGpu on(comm, p);
      const auto op = p.make(comm);
      for (const Candidate& candidate : op->candidates()) {
        expect_as_exact(comm, p, on, cpu, candidate);
      }
    });
  }
}

// Fused kernels do not support an emulated link, so they are no candidates there.
TEST_P(EncodedOperators, AreNoFasterThanAnEmulatedLink) {
  if (ranks() == 1) GTEST_SKIP() << "one rank sends nothing";
  constexpr EmulatedLink kSlow{2e9, 20e-6};
  for (const char* name : {"gemm_rs", "gemm_ar", "ag_gemm"}) {
    const EncodedProblem p{name, "int8", 256 * ranks(), 512, 512};
    const OnCpu cpu(p, ranks());
    run_gpus({ranks(), kSlow, 20, ranks()}, [&](Communicator& any) {
      GpuCommunicator& comm = as_gpu(any);
      const OnGpu on(comm, p);
      const auto op = p.make(comm);
      EXPECT_EQ(op->candidates().size(), 1u);
      EXPECT_THAT(op->receipt().why, testing::HasSubstr("fused as int8: expected int8, int4"));
      Stopwatch stopwatch(comm);
      const int64_t columns = p.gathers() ? p.k : p.n, sums = p.op == "gemm_ar" ? 2 : 1;
      const double minimum = double(sums * (ranks() - 1) * 256 * columns) / kSlow.bytes_per_s * 1e6;
      for (const Candidate& candidate : op->candidates()) {
        expect_as_exact(comm, p, on, cpu, candidate);
        const double us = stopwatch.time_once([&] { candidate.run(on.operands()); }, 1000);
        EXPECT_GE(us, minimum) << p.describe() << " by " << candidate.name;
        EXPECT_LE(us, 5 * minimum + 20000) << p.describe() << " by " << candidate.name;
      }
    });
  }
}

TEST_P(EncodedOperators, RunInACapturedGraph) {
  if (ranks() == 1) GTEST_SKIP() << "one rank encodes nothing";
  run([&](GpuCommunicator& comm) {
    for (const EncodedProblem& p : problems(ranks())) {
      const OnGpu on(comm, p);
      const auto op = p.make(comm);
      for (const Candidate& candidate : op->candidates()) {
        candidate.run(on.operands());
        const uint64_t bits = digest(on.out.tensor, comm.stream());
        const CapturedCalls graph(comm, [&] { candidate.run(on.operands()); });
        for (int n = 0; n < 5; ++n) {
          poison(on.out.tensor, comm.stream());
          if ((n + comm.rank()) % 3 == 0) launch_pause(40000, comm.stream());
          graph.launch();
        }
        EXPECT_EQ(digest(on.out.tensor, comm.stream()), bits)
            << p.describe() << " by " << candidate.name;
      }
    }
  });
}

TEST_P(EncodedOperators, PublicOperatorsAcceptAWireFormat) {
  run([&](GpuCommunicator& comm) {
    const int64_t m = 64, n = 128, k = 256;
    const Shard local = shard_of(m, comm.size(), comm.rank());
    const Matrix x(DType::bf16, local.count, k), whole(DType::bf16, m, k), w(DType::bf16, n, k),
        out(DType::bf16, m, n), rows(DType::bf16, local.count, n);
    fill_uniform(x.tensor, 3, 100, local.begin * k, comm.stream());
    fill_uniform(whole.tensor, 3, 100 + uint64_t(comm.rank()), 0, comm.stream());
    fill_uniform(w.tensor, 3, 200 + uint64_t(comm.rank()), 0, comm.stream());
    const Wire wire = Wire::parse("int8");
    for (const bool allow_uncompressed : {false, true}) {
      for (const Strategy strategy : {Strategy::serial, Strategy::automatic}) {
        const OverlapOptions how{
            .strategy = strategy, .wire = wire, .allow_uncompressed = allow_uncompressed};
        tandem::AgGemm ag(comm, {m, n, k, DType::bf16, true}, how);
        ag.run(x.tensor, w.tensor, out.tensor);
        comm.require_same("gathered", std::to_string(digest(ag.gathered(), comm.stream())));
        tandem::GemmRs(comm, {m, n, k, DType::bf16}, how).run(whole.tensor, w.tensor, rows.tensor);
        tandem::GemmAr(comm, {m, n, k, DType::bf16}, how).run(whole.tensor, w.tensor, out.tensor);
        comm.require_same("sums", std::to_string(digest(out.tensor, comm.stream())));
      }
    }
    if (comm.size() == 1) return;
    using AgShape = tandem::AgGemm::Shape;
    const AgShape shape{m, n, k, DType::bf16};
    const auto made = [&](const char* text, bool allow_uncompressed = false) {
      tandem::AgGemm(comm, shape, {Strategy::serial, 0, Wire::parse(text), allow_uncompressed});
    };
    EXPECT_THROW(made("lossless"), Unsupported);
    EXPECT_THROW(made(comm.rank() == 0 ? "int8" : "int4"), Mismatch);
    EXPECT_THROW(made(comm.rank() == 0 ? "int8" : "none"), Mismatch);
    EXPECT_THROW(made("int8", comm.rank() == 0), Mismatch);
    EXPECT_THROW(tandem::AgWgrad(comm, shape, {Strategy::serial, 0, wire}), Unsupported);
    EXPECT_THROW(tandem::AgGemm(comm, {.m = m, .n = n, .k = k, .dtype = DType::e4m3},
                                {Strategy::serial, 0, wire}),
                 Unsupported);
  });
}

TEST_P(EncodedOperators, AbsentRankIsNamed) {
  if (ranks() == 1) GTEST_SKIP() << "one rank waits for nobody";
  for (const char* name : {"gemm_rs", "ag_gemm"}) {
    const EncodedProblem p{name, "int8", 256 * ranks(), 256, 512};
    for (const Strategy strategy : {Strategy::serial, Strategy::overlapped}) {
      timeout_without_last([&](GpuCommunicator& comm) {
        const auto on = std::make_shared<OnGpu>(comm, p);
        const std::shared_ptr<OverlapOperator> op = p.make(comm, strategy);
        return [on, op] { op->run(on->operands()); };
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Gpu, EncodedOperators, testing::Values(1, 2, 3, 4, 8), gpus_name);

}  // namespace
}  // namespace tandem::test
