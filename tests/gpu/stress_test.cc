// Back-to-back calls: operator, shape and way drawn anew each time (alike on all ranks), each rank
// delayed at random, nothing synchronised between checks. TANDEM_STRESS_CALLS says how many.
#include <fmt/format.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#include "comm/nccl/signal_kernels.h"
#include "core/env.h"
#include "kernels/cuda/verify.h"
#include "overlap/ag_gemm/cuda/ag_gemm.h"
#include "overlap/gemm_ar/cuda/gemm_ar.h"
#include "overlap/gemm_rs/cuda/gemm_rs.h"
#include "tandem/random.h"
#include "tests/gpu/gpu_ranks.h"

namespace tandem::test {
namespace {

using namespace gpu;

class Stress : public OnGpus {};

// One operator at one shape with its operands.
struct Job {
  DeviceMemory x_memory, w_memory, out_memory;
  Tensor x, weight, out;
  ProductReference reference;
  std::vector<Way> ways;
  std::function<void(Way)> run;
  std::vector<uint64_t> bits;  // of each way's first output, which was verified
  std::string name;
};

template <typename Op>
std::unique_ptr<Job> make_job(NcclCommunicator& comm, const LtContext& lt, const DenseShape& s,
                              bool gathers, bool scatters, const char* name,
                              const char* variant = nullptr) {
  const Shard mine = shard_of(s.m, comm.size(), comm.rank());
  const auto rank = uint64_t(comm.rank());
  const size_t element = size_of(s.dtype);
  auto job = std::make_unique<Job>();
  const int64_t x_rows = gathers ? mine.count : s.m, out_rows = scatters ? mine.count : s.m;
  job->x_memory = DeviceMemory(size_t(x_rows * s.k) * element);
  job->w_memory = DeviceMemory(size_t(s.n * s.k) * element);
  job->out_memory = DeviceMemory(size_t(out_rows * s.n) * element);
  job->x = job->x_memory.view(s.dtype, {x_rows, s.k});
  job->weight = job->w_memory.view(s.dtype, {s.n, s.k});
  job->out = job->out_memory.view(s.dtype, {out_rows, s.n});
  job->reference =
      gathers ? ProductReference{7, 100, 200 + rank, 1, s.k, 0, s.dtype}
              : ProductReference{7, 100, 200, comm.size(), s.k, scatters ? mine.begin : 0, s.dtype};
  fill_uniform(job->x, 7, gathers ? 100 : 100 + rank, gathers ? mine.begin * s.k : 0,
               comm.stream());
  fill_uniform(job->weight, 7, 200 + rank, 0, comm.stream());
  auto op = std::make_shared<Op>(comm, lt, s, Way::fused);
  if constexpr (std::is_same_v<Op, AgGemm>) {
    for (int i = 0; variant && i < op->variants(Way::fused); ++i) {
      op->use_variant(Way::fused, i);
      if (op->describe(Way::fused) == variant) break;
      EXPECT_LT(i + 1, op->variants(Way::fused)) << "no variant " << variant;
    }
  }
  job->ways = op->ways();
  job->bits.resize(job->ways.size());
  job->run = [op, job = job.get()](Way way) { op->run(way, job->x, job->weight, job->out); };
  job->name = fmt::format("{} {}x{}x{}", name, s.m, s.n, s.k);
  return job;
}

TEST_P(Stress, CallsAlternateUnderRandomDelays) {
  const char* text = std::getenv("TANDEM_STRESS_CALLS");
  const uint64_t calls = text ? std::strtoull(text, nullptr, 10) : 500;
  run([&](NcclCommunicator& comm) {
    const LtContext lt;
    const uint64_t rank = uint64_t(comm.rank());
    std::vector<std::unique_ptr<Job>> jobs;
    for (const DenseShape& s : {DenseShape{256 * comm.size(), 136, 64}, DenseShape{40, 64, 256},
                                DenseShape{1001, 8, 24}}) {
      jobs.push_back(make_job<AgGemm>(comm, lt, s, true, false, "ag_gemm"));
      jobs.push_back(make_job<GemmRs>(comm, lt, s, false, true, "gemm_rs"));
      jobs.push_back(make_job<GemmAr>(comm, lt, s, false, false, "gemm_ar"));
    }
    const DenseShape added{256 * comm.size(), 8704, 2472};
    jobs.push_back(make_job<GemmRs>(comm, lt, added, false, true, "gemm_rs"));
    if (!env().gpu_portable && comm.size() != 3) {
      const DenseShape split{128 * comm.size(), 5000, 2472};
      for (const char* variant :
           {"128x256 in pairs, split couriers", "128x256 in pairs, split head 8/8"}) {
        jobs.push_back(make_job<AgGemm>(comm, lt, split, true, false, "ag_gemm", variant));
      }
    }
    comm.synchronize();
    for (uint64_t i = 0; i < calls; ++i) {
      const auto draw = philox(1, 0, i);
      Job& job = *jobs[draw[0] % jobs.size()];
      const size_t which = draw[1] % job.ways.size();
      const uint32_t delay = philox(2, rank, i)[0] % 60000;
      if (delay < 20000) launch_pause(delay, comm.stream());
      if (job.bits[which] != 0 && draw[2] % 8 != 0) {
        job.run(job.ways[which]);
        continue;
      }
      poison(job.out, comm.stream());
      job.run(job.ways[which]);
      const uint64_t now = digest(job.out, comm.stream());
      const std::string what = fmt::format("call {}: {} {}", i, job.name, name_of(job.ways[which]));
      if (job.bits[which] == 0) {
        ProductReference reference = job.reference;
        reference.roundings = roundings_of(job.ways[which], reference.terms);
        const Verdict verdict =
            verify_product(job.out, reference, job.out.elements(), comm.stream());
        ASSERT_LE(verdict.of_bound, 1) << what;
        ASSERT_EQ(verdict.not_finite, 0) << what;
        job.bits[which] = now;
      }
      ASSERT_EQ(now, job.bits[which]) << what;
    }
    comm.synchronize();
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, Stress, testing::Values(2, 3, 4), gpus_name);

}  // namespace
}  // namespace tandem::test
