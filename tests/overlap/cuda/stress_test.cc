// Back-to-back calls: operator, shape and candidate are drawn for each call (equal on all ranks),
// and each rank is delayed at random. Ranks synchronize only after every fourth call, where all
// four outputs are checked. TANDEM_STRESS_CALLS sets the number of calls.
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "bench/cuda/verify.h"
#include "comm/device/signal_kernels.h"
#include "core/system/env.h"
#include "overlap/ag_gemm/cuda/ag_gemm.h"
#include "overlap/gemm_ar/cuda/gemm_ar.h"
#include "overlap/gemm_rs/cuda/gemm_rs.h"
#include "tandem/cuda.h"
#include "tandem/random.h"
#include "tests/comm/cuda/digests.h"
#include "tests/gpu/gpu_ranks.h"
#include "tests/overlap/cuda/matrix.h"

namespace tandem::test {
namespace {

using namespace gpu;

class Stress : public OnGpus {};

// Operands of one operator, and the expected result.
struct Inputs {
  Matrix x, weight;
  ProductReference reference;
  std::vector<uint64_t> bits;  // each candidate's first output, verified
};

// One operator at one shape. Two sets of inputs: leftovers of the other call would show.
struct StressCase {
  std::vector<Inputs> sets;
  Tensor out;  // shape and dtype of the output
  std::shared_ptr<void> op;
  std::vector<Candidate> candidates;
  std::string name;
};

Inputs make_inputs(GpuCommunicator& comm, const OpDesc& s, bool gathers, bool scatters,
                   uint64_t seed) {
  const Shard local = shard_of(s.m, comm.size(), comm.rank());
  const auto rank = uint64_t(comm.rank());
  Inputs inputs{Matrix(s.dtype, gathers ? local.count : s.m, s.k),
                Matrix(s.dtype, s.n, s.k),
                gathers ? ag_reference(comm, s, seed) : sum_reference(comm, s, scatters, seed),
                {}};
  const ProductReference& reference = inputs.reference;
  fill_uniform(inputs.x.tensor, seed, reference.x_stream + (gathers ? 0 : rank),
               gathers ? local.begin * s.k : 0, comm.stream());
  fill_uniform(inputs.weight.tensor, seed, reference.w_stream + (gathers ? 0 : rank), 0,
               comm.stream());
  return inputs;
}

template <typename Op>
std::unique_ptr<StressCase> make_stress_case(GpuCommunicator& comm, const LtContext& lt,
                                             const OpDesc& s, bool gathers, bool scatters,
                                             const char* name, const char* only = nullptr) {
  auto stress_case = std::make_unique<StressCase>();
  const int64_t local = shard_of(s.m, comm.size(), comm.rank()).count;
  stress_case->out = Tensor(nullptr, s.dtype, {scatters ? local : s.m, s.n}, device_of(comm));
  auto op = std::make_shared<Op>(comm, lt, s);
  // One of each family, drawn as often as the others.
  for (const Candidate& candidate : candidates_of(*op)) {
    const auto same = [&](const Candidate& other) { return other.group() == candidate.group(); };
    if (candidate.family.empty() ||
        (only ? candidate.name == only : std::ranges::none_of(stress_case->candidates, same)))
      stress_case->candidates.push_back(candidate);
  }
  if (only) {
    EXPECT_EQ(stress_case->candidates.back().name, only);
  }
  stress_case->op = op;
  for (const uint64_t seed : {7, 8}) {
    stress_case->sets.push_back(make_inputs(comm, s, gathers, scatters, seed));
    stress_case->sets.back().bits.resize(stress_case->candidates.size());
  }
  stress_case->name = fmt::format("{} {}x{}x{}", name, s.m, s.n, s.k);
  return stress_case;
}

TEST_P(Stress, CallsAlternateUnderRandomDelays) {
  const char* text = std::getenv("TANDEM_STRESS_CALLS");
  const uint64_t calls = text ? std::strtoull(text, nullptr, 10) : 4000;
  run([&](GpuCommunicator& comm) {
    const LtContext lt;
    const uint64_t rank = uint64_t(comm.rank());
    std::vector<std::unique_ptr<StressCase>> cases;
    for (const OpDesc& s :
         {OpDesc{256 * comm.size(), 136, 64}, OpDesc{40, 64, 256}, OpDesc{1001, 8, 24}}) {
      cases.push_back(make_stress_case<AgGemm>(comm, lt, s, true, false, "ag_gemm"));
      cases.push_back(make_stress_case<GemmRs>(comm, lt, s, false, true, "gemm_rs"));
      cases.push_back(make_stress_case<GemmAr>(comm, lt, s, false, false, "gemm_ar"));
    }
    const OpDesc added{256 * comm.size(), 8704, 2472};
    cases.push_back(make_stress_case<GemmRs>(comm, lt, added, false, true, "gemm_rs"));
    if (!env().gpu_portable && comm.size() != 3) {
      const OpDesc split{128 * comm.size(), 5000, 2472};
      for (const char* only :
           {"128x256 in pairs, split copy warps", "128x256 in pairs, split local first 8/8"}) {
        cases.push_back(make_stress_case<AgGemm>(comm, lt, split, true, false, "ag_gemm", only));
      }
    }
    int64_t max_bytes = 0;
    for (const auto& stress_case : cases)
      max_bytes = std::max(max_bytes, int64_t(stress_case->out.bytes()));
    constexpr size_t kInARow = 4;
    CallsInARow row(comm, kInARow, size_t(max_bytes));
    struct Done {
      StressCase* stress_case;
      Inputs* inputs;
      size_t candidate;
    };
    std::vector<Done> done;
    for (uint64_t i = 0; i < calls; ++i) {
      const auto draw = philox(1, 0, i);
      StressCase& stress_case = *cases[draw[0] % cases.size()];
      const size_t which = draw[1] % stress_case.candidates.size();
      const uint32_t delay = philox(2, rank, i)[0] % 60000;
      if (delay < 20000) launch_pause(delay, comm.stream());
      Inputs& inputs = stress_case.sets[draw[2] % stress_case.sets.size()];
      stress_case.candidates[which].run(
          {inputs.x.tensor, inputs.weight.tensor, row.next(stress_case.out)});
      done.push_back({&stress_case, &inputs, which});
      if (!row.full() && i + 1 < calls) continue;
      const std::vector<uint64_t> now = row.digests();
      for (size_t call = 0; call < now.size(); ++call) {
        const auto& [of, given, used] = done[call];
        const std::string& candidate = of->candidates[used].name;
        const std::string what =
            fmt::format("behind call {}: {}: {} {}", i, call, of->name, candidate);
        uint64_t& first = given->bits[used];
        if (first == 0) {
          expect_right(comm, row.out(call), given->reference, what, candidate);
          first = now[call];
        }
        ASSERT_EQ(now[call], first) << what;
      }
      row.begin_again();
      done.clear();
    }
    comm.synchronize();
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, Stress, testing::Values(2, 3, 4), gpus_name);

}  // namespace
}  // namespace tandem::test
