// Dense operators against the exact product: every candidate x dtype x odd shapes x both weight
// layouts, on 1 to 4 GPUs; under random delays; captured and replayed.
#include <fmt/format.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bench/cuda/verify.h"
#include "comm/device/signal_kernels.h"
#include "core/system/env.h"
#include "overlap/ag_gemm/cuda/ag_gemm.h"
#include "overlap/gemm_ar/cuda/gemm_ar.h"
#include "overlap/gemm_rs/cuda/gemm_rs.h"
#include "tandem/overlap.h"
#include "tandem/random.h"
#include "tests/comm/cuda/digests.h"
#include "tests/comm/cuda/host_copies.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/captured_calls.h"
#include "tests/overlap/cuda/matrix.h"
#include "tests/overlap/cuda/operands.h"

namespace tandem::test {
namespace {

using namespace gpu;

class Operators : public OnGpus {};

struct Shape3 {
  int64_t m, n, k;  // n, k: this rank's
};

// The last is large enough for every protocol of NCCL, with shards of unequal length.
constexpr Shape3 kShapes[] = {{128, 64, 64},    {33, 24, 40},    {7, 8, 8},
                              {2, 16, 8},       {0, 8, 16},      {513, 136, 72},
                              {1024, 256, 128}, {3072, 200, 72}, {2049, 264, 8192}};

// 16 bytes is the only alignment required; cuBLASLt must be told.
TEST_P(Operators, OperandsMayBeginAtAnyMultipleOf16Bytes) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      for (const Shape3& size : {Shape3{1024, 512, 512}, {513, 136, 72}, {512, 1024, 256}}) {
        for (const size_t skip : {16, 48, 128}) {
          const OpDesc shape{size.m, size.n, size.k, dtype};
          const auto try_candidates = [&](const auto& op, const Operands& o, const char* name) {
            for (const Candidate& candidate : candidates_of(op)) {
              poison(o.out, comm.stream());
              candidate.run({o.x, o.weight, o.out});
              expect_right(comm, o,
                           fmt::format("{} {} {}x{}x{} {} from byte {}", name, candidate.name,
                                       size.m, size.n, size.k, tandem::name_of(dtype), skip),
                           candidate.name);
            }
          };
          gpu::AgGemm ag(comm, lt, shape);
          try_candidates(ag, ag_operands(comm, shape, 3, skip), "ag_gemm");
          gpu::GemmRs rs(comm, lt, shape);
          try_candidates(rs, sum_operands(comm, shape, true, 4, skip), "gemm_rs");
          gpu::GemmAr ar(comm, lt, shape);
          try_candidates(ar, sum_operands(comm, shape, false, 5, skip), "gemm_ar");
        }
      }
    }
  });
}

TEST_P(Operators, EveryCandidateMatchesReferenceOnOddShapes) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      for (const Shape3& size : kShapes) {
        const OpDesc shape{size.m, size.n, size.k, dtype};
        const auto try_candidates = [&](const auto& op, const Operands& o, const char* name) {
          for (const Candidate& candidate : candidates_of(op)) {
            const std::string what =
                fmt::format("{} {} M {} N {} K {} {} of {}", name, candidate.name, size.m, size.n,
                            size.k, tandem::name_of(dtype), comm.size());
            std::vector<uint64_t> digests;
            for (int i = 0; i < 3; ++i) {
              poison(o.out, comm.stream());
              candidate.run({o.x, o.weight, o.out});
              digests.push_back(digest(o.out, comm.stream()));
            }
            expect_right(comm, o, what, candidate.name);
            EXPECT_EQ(digests, std::vector<uint64_t>(3, digests[0])) << what;
          }
        };
        gpu::AgGemm ag(comm, lt, shape);
        try_candidates(ag, ag_operands(comm, shape, 3), "ag_gemm");
        gpu::GemmRs rs(comm, lt, shape);
        try_candidates(rs, sum_operands(comm, shape, true, 4), "gemm_rs");
        gpu::GemmAr ar(comm, lt, shape);
        try_candidates(ar, sum_operands(comm, shape, false, 5), "gemm_ar");
      }
    }
  });
}

TEST_P(Operators, EveryFusedCandidateIsReproducibleAndMatchesReference) {
  if (ranks() == 1) GTEST_SKIP() << "one rank exchanges nothing";
  if (env().gpu_portable) GTEST_SKIP() << "no fused kernels are allowed";
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    // `alike`: all of the family add in the same order.
    const auto try_family = [&](const auto& op, const char* family, const Operands& o, bool alike) {
      const auto candidates = candidates_of(op, family);
      EXPECT_GT(candidates.size(), 0u);
      Digests digests(comm, 20);
      uint64_t bits = 0;
      std::set<uint64_t> right;
      for (const Candidate& candidate : candidates) {
        if (!alike) bits = 0;
        for (int i = 0; i < 20; ++i) {
          poison(o.out, comm.stream());
          if ((i + comm.rank()) % 3 == 0) launch_pause(40000, comm.stream());
          candidate.run({o.x, o.weight, o.out});
          digests.add(o.out);
        }
        const std::vector<uint64_t> all = digests.take();
        if (bits == 0) bits = all[0];
        EXPECT_EQ(all, std::vector<uint64_t>(20, bits)) << candidate.name;
        if (right.insert(all.back()).second) expect_right(comm, o, candidate.name);
      }
    };
    // The third shape has fewer blocks than copy warps have groups on 2 ranks. In the sixth and the
    // last two a block has several whole tiles, with the minimum K and with tile pairs that span
    // two shards. On 2 ranks AG+GEMM splits tiles along K: the third and fifth have three and two
    // helpers per tile, the fourth one, the seventh one for two tiles, and the eighth two after a
    // full wave; on 3 ranks the ninth.
    for (const Shape3& size :
         {Shape3{512 * comm.size(), 1000, 192}, Shape3{128 * comm.size(), 8, 64},
          Shape3{128 * comm.size(), 8, 4200}, Shape3{256 * comm.size(), 3000, 2200},
          Shape3{128 * comm.size(), 264, 3072}, Shape3{768 * comm.size(), 8200, 72},
          Shape3{256 * comm.size(), 5000, 4200}, Shape3{512 * comm.size(), 5128, 4200},
          Shape3{256 * comm.size(), 1000, 2200}, Shape3{1024 * comm.size(), 8200, 512},
          Shape3{128 * comm.size(), 24584, 640}}) {
      const OpDesc shape{size.m, size.n, size.k};
      gpu::AgGemm ag(comm, lt, shape);
      try_family(ag, "fused", ag_operands(comm, shape, 3), false);
      gpu::GemmRs rs(comm, lt, shape);
      try_family(rs, "fused_cutlass", sum_operands(comm, shape, true, 4), true);
    }
    const OpDesc half{768 * comm.size(), 2008, 72, DType::f16};
    gpu::GemmRs rs(comm, lt, half);
    try_family(rs, "fused_cutlass", sum_operands(comm, half, true, 4), true);
    for (const OpDesc& shape : {OpDesc{256 * comm.size(), 2008, 1096, DType::f16},
                                OpDesc{1024 * comm.size(), 4104, 1096, DType::f16}}) {
      gpu::AgGemm ag(comm, lt, shape);
      try_family(ag, "fused", ag_operands(comm, shape, 3), false);
    }
  });
}

TEST_P(Operators, FusedScatterIsReproducibleBetweenOtherCandidates) {
  if (ranks() == 1) GTEST_SKIP() << "one rank exchanges nothing";
  if (env().gpu_portable) GTEST_SKIP() << "no fused kernels are allowed";
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    const OpDesc shape{256 * comm.size(), 3000, 512};
    gpu::GemmRs rs(comm, lt, shape);
    const Candidate chunked = candidate_of(rs, "chunked"),
                    fused = candidate_of(rs, "fused_cutlass");
    const Operands o = sum_operands(comm, shape, true, 4);
    std::vector<uint64_t> digests;
    for (uint64_t i = 0; i < 100; ++i) {
      const uint32_t delay = philox(2, uint64_t(comm.rank()), i)[0] % 60000;
      if (delay < 20000) launch_pause(delay, comm.stream());
      poison(o.out, comm.stream());
      if (i % 7 == 0) chunked.run({o.x, o.weight, o.out});
      fused.run({o.x, o.weight, o.out});
      digests.push_back(digest(o.out, comm.stream()));
    }
    expect_right(comm, o, "fused");
    EXPECT_EQ(digests, std::vector<uint64_t>(100, digests[0]));
  });
}

// Every candidate and every transport of the shards writes into the same buffer, call after call.
TEST_P(Operators, FusedGathersAreCompleteBetweenOtherCandidatesUnderRandomDelays) {
  if (ranks() == 1) GTEST_SKIP() << "one rank exchanges nothing";
  if (env().gpu_portable) GTEST_SKIP() << "no fused kernels are allowed";
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    OpDesc shape{256 * comm.size(), 1000, 2200};
    shape.keep_gathered = true;
    gpu::AgGemm ag(comm, lt, shape);
    const Operands o = ag_operands(comm, shape, 3);
    const DeviceMemory memory(size_t(shape.m * shape.k) * size_of(shape.dtype));
    const Tensor all = memory.view(shape.dtype, {shape.m, shape.k});
    fill_uniform(all, o.reference.seed, o.reference.x_stream, 0, comm.stream());
    const uint64_t whole = digest(all, comm.stream());
    const auto fused = candidates_of(ag, "fused");
    const Candidate chunked = candidate_of(ag, "chunked"), serial = candidate_of(ag, kNccl);
    std::map<size_t, uint64_t> bits;  // by candidate
    for (uint64_t i = 0; i < 300; ++i) {
      const uint32_t delay = philox(2, uint64_t(comm.rank()), i)[0] % 60000;
      if (delay < 20000) launch_pause(delay, comm.stream());
      if (i % 7 == 0) chunked.run({o.x, o.weight, o.out});
      if (i % 11 == 0) serial.run({o.x, o.weight, o.out});
      const size_t number = philox(1, 0, i)[0] % fused.size();
      poison(o.out, comm.stream());
      fused[number].run({o.x, o.weight, o.out});
      if (i % 3 != 0) continue;  // back-to-back calls
      poison(ag.gathered(), comm.stream());
      comm.synchronize();
      comm.barrier("poisoned");
      fused[number].run({o.x, o.weight, o.out});
      ASSERT_EQ(digest(ag.gathered(), comm.stream()), whole) << i << " " << fused[number].name;
      const uint64_t now = digest(o.out, comm.stream());
      ASSERT_EQ(bits.try_emplace(number, now).first->second, now) << i << " " << fused[number].name;
    }
    expect_right(comm, o, "fused");
  });
}

// Each transport: calls in a graph count their epochs on the device.
TEST_P(Operators, CapturedFusedGatherReplays) {
  if (ranks() == 1) GTEST_SKIP() << "one rank exchanges nothing";
  if (env().gpu_portable) GTEST_SKIP() << "no fused kernels are allowed";
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    const OpDesc shape{256 * comm.size(), 1000, 2200};
    gpu::AgGemm ag(comm, lt, shape);
    const Operands o = ag_operands(comm, shape, 3), before = ag_operands(comm, shape, 3);
    Digests digests(comm, 40);
    for (const Candidate& candidate : candidates_of(ag, "fused")) {
      comm.synchronize();
      const CapturedCalls graph(comm, [&] {
        candidate.run({before.x, before.weight, before.out});
        candidate.run({o.x, o.weight, o.out});
      });
      for (int i = 0; i < 20; ++i) {
        for (const Operands* call : {&before, &o}) poison(call->out, comm.stream());
        if ((i + comm.rank()) % 5 == 0) launch_pause(20000, comm.stream());
        graph.launch();
        for (const Operands* call : {&before, &o}) digests.add(call->out);
      }
      const std::vector<uint64_t> all = digests.take();
      EXPECT_EQ(all, std::vector<uint64_t>(40, all[0])) << candidate.name;
      expect_right(comm, o, "replayed " + candidate.name);
    }
  });
}

TEST_P(Operators, BiasIsAddedOnce) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    OpDesc shape{32, 16, 16, DType::f32};
    const DeviceMemory bias_memory(16 * 4);
    const Tensor bias = bias_memory.view(DType::f32, {16});
    fill_uniform(bias, 9, 1, 0, comm.stream());
    const auto expected = read<float>(comm, bias);
    const auto compare = [&](auto make, const Operands& o) {
      shape.bias = false;
      const auto without_bias = make(shape);
      shape.bias = true;
      const auto biased = make(shape);
      const auto result = [&](const Candidate& candidate, const Tensor* added) {
        poison(o.out, comm.stream());
        candidate.run({o.x, o.weight, o.out, added});
        return read<float>(comm, o.out);
      };
      const auto with_bias = candidates_of(*biased), without_any = candidates_of(*without_bias);
      ASSERT_EQ(with_bias.size(), without_any.size());
      for (size_t number = 0; number < with_bias.size(); ++number) {
        const auto without = result(without_any[number], nullptr),
                   with = result(with_bias[number], &bias);
        for (size_t i = 0; i < with.size(); ++i) {
          ASSERT_NEAR(with[i] - without[i], expected[i % 16], 1e-4)
              << with_bias[number].name << " " << i;
        }
      }
    };
    compare([&](const OpDesc& s) { return std::make_unique<gpu::AgGemm>(comm, lt, s); },
            ag_operands(comm, shape, 3));
    compare([&](const OpDesc& s) { return std::make_unique<gpu::GemmRs>(comm, lt, s); },
            sum_operands(comm, shape, true, 4));
    compare([&](const OpDesc& s) { return std::make_unique<gpu::GemmAr>(comm, lt, s); },
            sum_operands(comm, shape, false, 5));
  });
}

TEST_P(Operators, TransposedWeightGivesTheSameProduct) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    OpDesc shape{48, 24, 40, DType::f32};
    const Operands o = ag_operands(comm, shape, 3);
    const gpu::AgGemm nk_op(comm, lt, shape);
    candidate_of(nk_op, "chunked").run({o.x, o.weight, o.out});
    const auto expected = read<float>(comm, o.out);
    const auto nk = read<float>(comm, o.weight);
    std::vector<float> kn(nk.size());
    for (size_t n = 0; n < 24; ++n) {
      for (size_t k = 0; k < 40; ++k) kn[k * 24 + n] = nk[n * 40 + k];
    }
    write(comm, o.weight.data(), kn);
    shape.weight_kn = true;
    const Tensor other(o.weight.data(), DType::f32, {40, 24}, o.weight.device());
    const gpu::AgGemm kn_op(comm, lt, shape);
    candidate_of(kn_op, "chunked").run({o.x, other, o.out});
    const auto got = read<float>(comm, o.out);
    for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], 1e-4) << i;
  });
}

TEST_P(Operators, ShapesAlternateUnderRandomDelays) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    const OpDesc shapes[] = {{256, 128, 64}, {40, 64, 256}, {1000, 8, 24}};
    std::vector<std::unique_ptr<gpu::AgGemm>> ag;
    std::vector<std::unique_ptr<gpu::GemmRs>> rs;
    std::vector<Operands> ag_o, rs_o;
    for (const OpDesc& s : shapes) {
      ag.push_back(std::make_unique<gpu::AgGemm>(comm, lt, s, Strategy::serial));
      rs.push_back(std::make_unique<gpu::GemmRs>(comm, lt, s, Strategy::serial));
      // Two sets of operands: leftovers of the other call would show.
      for (const uint64_t seed : {3, 5}) {
        ag_o.push_back(ag_operands(comm, s, seed));
        rs_o.push_back(sum_operands(comm, s, true, seed + 1));
      }
    }
    constexpr size_t kInARow = 20;
    CallsInARow calls(comm, kInARow, size_t(256 * 128) * size_of(DType::bf16));
    std::vector<size_t> cases;  // index into `calls`: operands, then operator
    std::vector<uint64_t> bits(12);
    for (uint64_t i = 0; i < 1500; ++i) {
      const size_t operands = philox(1, 0, i)[0] % 6, which = operands / 2;
      const uint32_t delay = philox(2, uint64_t(comm.rank()), i)[0] % 60000;
      if (delay < 20000) launch_pause(delay, comm.stream());
      for (const bool scatters : {false, true}) {
        const Operands& o = (scatters ? rs_o : ag_o)[operands];
        const Tensor out = calls.next(o.out);
        const Candidate chunked =
            scatters ? candidate_of(*rs[which], "chunked") : candidate_of(*ag[which], "chunked");
        chunked.run({o.x, o.weight, out});
        cases.push_back(2 * operands + size_t(scatters));
      }
      if (!calls.full()) continue;
      const std::vector<uint64_t> now = calls.digests();
      for (size_t call = 0; call < now.size(); ++call) {
        uint64_t& first = bits[cases[call]];
        const std::string what = fmt::format("behind call {}: {}", i, call);
        if (first == 0) {
          const Operands& o = (cases[call] % 2 ? rs_o : ag_o)[cases[call] / 2];
          expect_right(comm, calls.out(call), o.reference, what);
          first = now[call];
        }
        ASSERT_EQ(now[call], first) << what;
      }
      calls.begin_again();
      cases.clear();
    }
  });
}

TEST_P(Operators, CapturedGraphReplays) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    const OpDesc shape{96, 64, 64};
    const gpu::AgGemm ag(comm, lt, shape);
    const gpu::GemmRs rs(comm, lt, shape);
    const gpu::GemmAr ar(comm, lt, shape);
    const OpDesc large{128 * comm.size(), 64, 64}, larger{512 * comm.size(), 1000, 1032};
    gpu::GemmRs cutlass_rs(comm, lt, large), fused_rs(comm, lt, larger);
    std::vector<std::pair<Candidate, Operands>> captured;
    captured.emplace_back(candidate_of(ag, "chunked"), ag_operands(comm, shape, 3));
    captured.emplace_back(candidate_of(rs, "chunked"), sum_operands(comm, shape, true, 4));
    captured.emplace_back(candidate_of(ar, comm.size() > 1 ? kOneShot : kNccl),
                          sum_operands(comm, shape, false, 5));
    for (const Candidate& one : candidates_of(cutlass_rs, "fused_cutlass")) {
      captured.emplace_back(one, sum_operands(comm, large, true, 6));
    }
    if (!candidates_of(fused_rs, "fused").empty()) {
      captured.emplace_back(candidate_of(fused_rs, "fused"), sum_operands(comm, larger, true, 7));
    }
    Digests digests(comm, 100 * captured.size());
    comm.synchronize();
    const CapturedCalls graph(comm, [&] {
      for (const auto& [candidate, o] : captured) candidate.run({o.x, o.weight, o.out});
    });
    for (int i = 0; i < 100; ++i) {
      for (const auto& [candidate, o] : captured) poison(o.out, comm.stream());
      if ((i + comm.rank()) % 5 == 0) launch_pause(20000, comm.stream());
      graph.launch();
      for (const auto& [candidate, o] : captured) digests.add(o.out);
    }
    const std::vector<uint64_t> all = digests.take();
    for (size_t i = captured.size(); i < all.size(); ++i) {
      ASSERT_EQ(all[i], all[i % captured.size()])
          << "replay " << i / captured.size() << ", operator " << i % captured.size();
    }
    for (const auto& [candidate, o] : captured) expect_right(comm, o, candidate.name + " replayed");
  });
}

TEST_P(Operators, InvalidOperandsAreNamedBeforeAnythingIsSent) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    EXPECT_THROW(gpu::AgGemm(comm, lt, {16, 12, 16}), InvalidArgument);
    EXPECT_THROW(gpu::GemmRs(comm, lt, {16, 16, 4}), InvalidArgument);
    EXPECT_THROW(gpu::GemmAr(comm, lt, {16, 16, 16, DType::i32}), InvalidArgument);
    const OpDesc shape{16, 16, 16};
    tandem::AgGemm ag(comm, {16, 16, 16, DType::bf16}, {Strategy::overlapped});
    const Operands o = ag_operands(comm, shape, 1);
    EXPECT_THROW(ag.run(o.out, o.weight, o.out.transposed()), InvalidArgument);
    float host[64];
    EXPECT_THROW(ag.run(Tensor(host, DType::bf16, {o.x.dim(0), 16}), o.weight, o.out),
                 InvalidArgument);
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, Operators, testing::Values(1, 2, 3, 4), gpus_name);

}  // namespace
}  // namespace tandem::test
