// Any M in the hand-written fused kernels: shards that end within a tile, empty tiles, shards of
// unequal length, one row a rank; with and without a bias, on 2 to 8 ranks.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "comm/device/signal_kernels.h"
#include "core/system/env.h"
#include "overlap/ag_gemm/cuda/ag_gemm.h"
#include "overlap/gemm_rs/cuda/gemm_rs.h"
#include "tandem/random.h"
#include "tests/comm/cuda/host_copies.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/captured_calls.h"
#include "tests/overlap/cuda/scaled_operands.h"

namespace tandem::test {
namespace {

using namespace gpu;

class AnyRows : public OnGpus {
 protected:
  void SetUp() override {
    OnGpus::SetUp();
    if (env().gpu_portable) GTEST_SKIP() << "no fused kernels are allowed";
  }
};

void call(const Candidate& candidate, const ScaledOperands& o, const Tensor* bias = nullptr) {
  candidate.run({o.x.tensor, o.weight.tensor, o.out.tensor, bias, o.given()});
}

// Runs every fused candidate a few times under random delays, with another one in between.
template <class Op>
void try_candidates(GpuCommunicator& comm, const Op& op, const ScaledOperands& o,
                    const std::string& name) {
  const auto fused = candidates_of(op, "fused");
  const Candidate chunked = candidate_of(op, "chunked");
  ASSERT_GT(fused.size(), 0u) << name;
  std::set<uint64_t> right;
  for (const Candidate& candidate : fused) {
    const std::string what = fmt::format("{} {} of {}", name, candidate.name, comm.size());
    std::vector<uint64_t> digests;
    for (uint64_t i = 0; i < 4; ++i) {
      const uint32_t delay = philox(2, uint64_t(comm.rank()), i)[0] % 60000;
      if (delay < 20000) launch_pause(delay, comm.stream());
      if (i == 2) call(chunked, o);
      poison(o.out.tensor, comm.stream());
      call(candidate, o);
      digests.push_back(digest(o.out.tensor, comm.stream()));
    }
    EXPECT_EQ(digests, std::vector<uint64_t>(4, digests[0])) << what;
    // Bits that were right before need no further check, which takes far longer than the call.
    if (right.insert(digests[0]).second) expect_right(comm, o, what);
  }
}

void try_both(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape) {
  const std::string what =
      fmt::format("M {} N {} K {} {} to {}", shape.m, shape.n, shape.k,
                  tandem::name_of(shape.dtype), tandem::name_of(shape.result()));
  gpu::AgGemm ag(comm, lt, shape);
  try_candidates(comm, ag, scaled_ag_operands(comm, shape, 3), "ag_gemm " + what);
  gpu::GemmRs rs(comm, lt, shape);
  try_candidates(comm, rs, scaled_sum_operands(comm, shape, true, 4), "gemm_rs " + what);
}

OpDesc shape_of(int64_t m, int64_t n, int64_t k, DType dtype) {
  OpDesc shape{m, n, k, dtype};
  shape.scaling = Scaling::row;
  return shape;
}

// On 8 ranks: one row a rank, and 65; one tile, half a tile, all but a row of a tile pair, a row
// past a pair on some ranks only.
TEST_P(AnyRows, EveryVariantMatchesReferenceIfShardsEndWithinATile) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    const int64_t ranks = comm.size();
    for (const int64_t m : {ranks, 65 * ranks - 1, 128 * ranks + 1, 255 * ranks, 256 * ranks + 1,
                            384 * ranks, 641 * ranks + 1}) {
      try_both(comm, lt, shape_of(m, 520, 1096, DType::bf16));
    }
    try_both(comm, lt, shape_of(3000, 2056, 512, DType::bf16));
    try_both(comm, lt, shape_of(515 * ranks + 1, 4104, 2200, DType::bf16));
    try_both(comm, lt, shape_of(200 * ranks + 1, 1000, 648, DType::f16));
    for (const DType out : {DType::bf16, DType::f16}) {
      OpDesc shape = shape_of(333 * ranks + 1, 272, 1040, DType::e4m3);
      shape.out_dtype = out;
      try_both(comm, lt, shape);
    }
    OpDesc whole = shape_of(300 * ranks, 528, 1040, DType::e4m3);
    whole.scaling = Scaling::tensor;
    try_both(comm, lt, whole);
  });
}

// Checks two candidates of each operator.
TEST_P(AnyRows, OddNumbersOfRowsMatchReference) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    for (uint64_t i = 0; i < 24; ++i) {
      const auto random = philox(11, 0, i);  // equal on all ranks
      const int64_t maximum = i < 6 ? 300 : 5120;
      const int64_t m = std::max<int64_t>(comm.size(), random[0] % maximum) | 1;
      const OpDesc shape = shape_of(m, 8 * (1 + random[1] % 150), 512 + 8 * (random[2] % 100),
                                    i % 3 == 2 ? DType::f16 : DType::bf16);
      const auto try_one = [&](const auto& op, const ScaledOperands& o, const char* name) {
        const auto fused = candidates_of(op, "fused");
        for (const Candidate& candidate : {fused.at(0), fused.back()}) {
          poison(o.out.tensor, comm.stream());
          call(candidate, o);
          expect_right(comm, o,
                       fmt::format("{} M {} N {} K {} {} of {}", name, shape.m, shape.n, shape.k,
                                   candidate.name, comm.size()));
        }
      };
      gpu::AgGemm ag(comm, lt, shape);
      try_one(ag, scaled_ag_operands(comm, shape, 3), "ag_gemm");
      gpu::GemmRs rs(comm, lt, shape);
      try_one(rs, scaled_sum_operands(comm, shape, true, 4), "gemm_rs");
    }
  });
}

// A bias is added once: AG+GEMM adds each rank's bias, GEMM+RS that of rank 0. Also for whole
// tiles, and tiles split along K.
TEST_P(AnyRows, BiasIsAddedOnce) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    const auto try_bias = [&](const auto& make, const ScaledOperands& o, OpDesc shape) {
      const Matrix bias(shape.result(), {shape.n});
      std::vector<uint16_t> words;
      const auto value = [](int64_t column) { return float(256 << (column % 3)); };
      for (int64_t i = 0; i < shape.n; ++i) {
        words.push_back(uint16_t(std::bit_cast<uint32_t>(value(i)) >> 16));
      }
      write(comm, static_cast<uint16_t*>(bias.tensor.data()), words);
      const auto reference_op = make(shape);
      shape.bias = true;
      const auto biased = make(shape);
      const Candidate reference = candidate_of(*reference_op, "chunked");
      for (const Candidate& candidate : candidates_of(*biased, "fused")) {
        poison(o.out.tensor, comm.stream());
        call(reference, o);
        const auto without = read<uint16_t>(comm, o.out.tensor);
        poison(o.out.tensor, comm.stream());
        call(candidate, o, &bias.tensor);
        const auto with = read<uint16_t>(comm, o.out.tensor);
        const auto f32 = [](uint16_t word) { return std::bit_cast<float>(uint32_t(word) << 16); };
        float worst = 0;
        for (size_t i = 0; i < with.size(); ++i) {
          // Far above rounding errors: a bias that is missing or added twice fails.
          const float b = value(int64_t(i) % shape.n), bound = b / 8;
          worst = std::max(worst, std::abs(f32(with[i]) - f32(without[i]) - b) / bound);
        }
        EXPECT_LE(worst, 1) << candidate.name << " of M " << shape.m;
      }
    };
    for (const int64_t m : {int64_t(512) * comm.size(), int64_t(3001)}) {
      for (const DType dtype : {DType::bf16, DType::e4m3}) {
        const OpDesc shape = shape_of(m, 528, 2208, dtype);
        try_bias([&](const OpDesc& s) { return std::make_unique<gpu::AgGemm>(comm, lt, s); },
                 scaled_ag_operands(comm, shape, 3), shape);
        try_bias([&](const OpDesc& s) { return std::make_unique<gpu::GemmRs>(comm, lt, s); },
                 scaled_sum_operands(comm, shape, true, 4), shape);
      }
    }
  });
}

TEST_P(AnyRows, CapturedGraphsReplay) {
  run([](GpuCommunicator& comm) {
    const LtContext lt;
    const OpDesc shape = shape_of(1537, 1000, 1096, DType::bf16);
    const auto try_captured = [&](const auto& op, const ScaledOperands& o) {
      const Candidate fused = candidate_of(op, "fused");
      call(fused, o);
      const uint64_t once = digest(o.out.tensor, comm.stream());
      const CapturedCalls graph(comm, [&] { call(fused, o); });
      for (int i = 0; i < 10; ++i) {
        poison(o.out.tensor, comm.stream());
        if ((i + comm.rank()) % 3 == 0) launch_pause(20000, comm.stream());
        graph.launch();
        ASSERT_EQ(digest(o.out.tensor, comm.stream()), once) << "replay " << i;
      }
    };
    gpu::AgGemm ag(comm, lt, shape);
    try_captured(ag, scaled_ag_operands(comm, shape, 3));
    gpu::GemmRs rs(comm, lt, shape);
    try_captured(rs, scaled_sum_operands(comm, shape, true, 4));
  });
}

class AnyRowsAlone : public OnGpus {};

// Times the kernels without exchange, on all SMs: whole tiles, the same tiles in the kernel for any
// M, and rows that end within a tile. Logs the time per tile at the largest M.
TEST_P(AnyRowsAlone, PartialTileCostsAsMuchAsAWholeOne) {
  if (env().gpu_portable) GTEST_SKIP() << "no fused kernels are allowed";
  run([](GpuCommunicator& comm) {
    constexpr int64_t kN = 8192, kK = 8192;
    const auto shape_for = [&](int64_t m) {
      return FusedAgShape{m, kN, kK, 0, 1, DType::bf16, DType::bf16, {8}};
    };
    const Matrix x(DType::bf16, 4352, kK), weight(DType::bf16, kN, kK), out(DType::bf16, 4352, kN);
    const DeviceMemory epoch(sizeof(uint64_t));
    fill_uniform(x.tensor, 1, 1, 0, comm.stream());
    fill_uniform(weight.tensor, 1, 2, 0, comm.stream());
    FusedAgArgs args{x.tensor.data(),
                     x.tensor.data(),
                     weight.tensor.data(),
                     out.tensor.data(),
                     {},
                     nullptr,
                     8,
                     {},
                     0,
                     {}};
    args.arrivals.epoch = reinterpret_cast<const uint64_t*>(epoch.data());
    args.arrivals.deadline = comm.device_deadline();
    struct Case {
      std::string name;
      std::unique_ptr<FusedAgKernel> kernel;
      double tiles;
      std::vector<double> us;
    };
    std::vector<Case> cases;
    cases.push_back({"M 4096, whole tiles", make_fused_ag_128x256(shape_for(4096)), 32, {}});
    for (const int64_t m : {4096, 4095, 3969, 3000, 4097}) {
      cases.push_back({fmt::format("M {}, any rows", m),
                       make_fused_ag_any_rows(shape_for(m)),
                       double((m + 127) / 128),
                       {}});
    }
    const Event begin(Event::Kind::timing), end(Event::Kind::timing);
    for (int i = 0; i < 25; ++i) {
      for (Case& c : cases) {
        c.kernel->launch(args, comm.stream());
        comm.synchronize();
        check(cudaEventRecord(begin.get(), comm.stream()), "begin");
        c.kernel->launch(args, comm.stream());
        check(cudaEventRecord(end.get(), comm.stream()), "end");
        comm.synchronize();
        c.us.push_back(microseconds(begin, end));
      }
    }
    const auto median = [](std::vector<double> us) {
      std::ranges::sort(us);
      return us[us.size() / 2];
    };
    const double whole = median(cases[0].us);
    for (const Case& c : cases) {
      fmt::print("{}: {:.1f} us, a row of tiles {:.2f} us\n", c.name, median(c.us),
                 median(c.us) / c.tiles);
    }
    EXPECT_LE(median(cases[1].us), 1.03 * whole);
    EXPECT_LE(median(cases[2].us), 1.03 * whole);
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, AnyRowsAlone, testing::Values(1), gpus_name);
INSTANTIATE_TEST_SUITE_P(Gpu, AnyRows, testing::Values(2, 3, 4, 8), gpus_name);

}  // namespace
}  // namespace tandem::test
