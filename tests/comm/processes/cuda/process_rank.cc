#include "tests/comm/processes/cuda/process_rank.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "bench/cuda/verify.h"
#include "comm/device/gpu_communicator.h"
#include "comm/device/signal_kernels.h"
#include "comm/world/gpus.h"
#include "core/cuda/driver.h"
#include "core/cuda/modules.h"
#include "overlap/gemm_rs/cuda/gemm_rs.h"
#include "tandem/collectives.h"
#include "tandem/cuda.h"
#include "tandem/overlap.h"
#include "tests/comm/cuda/digests.h"
#include "tests/gpu/gpu_count.h"
#include "tests/overlap/cuda/strategy_roundings.h"

namespace tandem::test {
namespace {

using namespace gpu;

struct Operands {
  DeviceMemory x_memory, w_memory, out_memory;
  Tensor x, weight, out;
  Operands(int64_t x_rows, int64_t out_rows, int64_t n, int64_t k)
      : x_memory(size_t(x_rows * k) * 2),
        w_memory(size_t(n * k) * 2),
        out_memory(size_t(out_rows * n) * 2),
        x(x_memory.view(DType::bf16, {x_rows, k})),
        weight(w_memory.view(DType::bf16, {n, k})),
        out(out_memory.view(DType::bf16, {out_rows, n})) {}
};

constexpr int64_t kM = 517, kN = 136, kK = 64;

// `strategy` may select NCCL's algorithm.
bool right(GpuCommunicator& comm, const Tensor& out, ProductReference reference, const char* what,
           Strategy strategy = Strategy::serial) {
  comm.synchronize();
  reference.roundings = roundings_of(candidate_of(strategy), reference.terms);
  const Verdict verdict = verify_product(out, reference, out.elements(), comm.stream());
  const bool ok = verdict.of_bound <= 1 && verdict.not_finite == 0;
  if (!ok) std::fprintf(stderr, "rank %d: %s: wrong\n", comm.rank(), what);
  return ok;
}

// True if the digests repeat `first`.
bool repeat(const GpuCommunicator& comm, const std::vector<uint64_t>& digests,
            const std::vector<uint64_t>& first, const char* what) {
  for (size_t i = 0; i < digests.size(); ++i) {
    if (digests[i] == first[i % first.size()]) continue;
    std::fprintf(stderr, "rank %d: %s: output %zu is not the first one's\n", comm.rank(), what, i);
    return false;
  }
  return true;
}

// Every strategy of every operator, and a collective.
bool work(GpuCommunicator& comm) {
  const auto rank = uint64_t(comm.rank());
  const Shard local = shard_of(kM, comm.size(), comm.rank());
  bool ok = true;
  for (const Strategy strategy : {Strategy::serial, Strategy::overlapped, Strategy::automatic}) {
    if (strategy == Strategy::overlapped && comm.size() == 1) continue;
    const Operands a(local.count, kM, kN, kK), r(kM, local.count, kN, kK), s(kM, kM, kN, kK);
    fill_uniform(a.x, 3, 100, local.begin * kK, comm.stream());
    for (const Operands* o : {&r, &s}) fill_uniform(o->x, 3, 100 + rank, 0, comm.stream());
    for (const Operands* o : {&a, &r, &s}) {
      fill_uniform(o->weight, 3, 200 + rank, 0, comm.stream());
    }
    AgGemm ag(comm, {kM, kN, kK, DType::bf16}, {strategy, 0});
    tandem::GemmRs rs(comm, {kM, kN, kK, DType::bf16}, {strategy, 0});
    constexpr size_t kInARow = 5;
    CallsInARow calls(comm, 2 * kInARow, size_t(a.out.bytes()));
    std::vector<uint64_t> first;
    for (int round = 0; round < 4; ++round) {  // the later ones are replayed
      for (size_t i = 0; i < kInARow; ++i) {
        ag.run(a.x, a.weight, calls.next(a.out));
        rs.run(r.x, r.weight, calls.next(r.out));
      }
      const std::vector<uint64_t> bits = calls.digests();
      if (round == 0) {
        ok =
            right(comm, calls.out(0), {3, 100, 200 + rank, 1, kK, 0, DType::bf16}, "ag_gemm") && ok;
        ok = right(comm, calls.out(1), {3, 100, 200, comm.size(), kK, local.begin, DType::bf16},
                   "gemm_rs", strategy) &&
             ok;
        first = {bits[0], bits[1]};
      }
      ok = repeat(comm, bits, first, "ag_gemm and gemm_rs") && ok;
      calls.begin_again();
    }
    const bool has_ar = comm.one_node() || strategy != Strategy::overlapped;
    if (!has_ar) continue;
    GemmAr ar(comm, {kM, kN, kK, DType::bf16}, {strategy, 0});
    ar.run(s.x, s.weight, s.out);
    ok = right(comm, s.out, {3, 100, 200, comm.size(), kK, 0, DType::bf16}, "gemm_ar", strategy) &&
         ok;
  }
  const DeviceMemory memory(4096);
  const Tensor data = memory.view(DType::bf16, {2048});
  fill_uniform(data, 5, 10 + rank, 0, comm.stream());
  all_reduce(comm, data);
  comm.synchronize();
  const Verdict verdict = verify_sum(data, 5, 10, comm.size(), comm.stream());
  const bool summed = verdict.max_rel <= 0.03 && verdict.not_finite == 0;
  if (!summed) std::fprintf(stderr, "rank %d: all_reduce: wrong\n", comm.rank());
  return summed && ok;
}

// The weight gradient and the saved gather by every strategy.
bool backward(GpuCommunicator& comm) {
  const auto rank = uint64_t(comm.rank());
  const Shard local = shard_of(kM, comm.size(), comm.rank());
  const Operands a(local.count, kM, kN, kK);  // out: dy
  const DeviceMemory dw_memory(size_t(kN * kK) * 4), product(size_t(kM * kN) * 2),
      whole_x(size_t(kM * kK) * 2);
  const Tensor dw = dw_memory.view(DType::f32, {kN, kK}), y = product.view(DType::bf16, {kM, kN}),
               whole = whole_x.view(DType::bf16, {kM, kK});
  fill_uniform(a.x, 3, 100, local.begin * kK, comm.stream());
  fill_uniform(whole, 3, 100, 0, comm.stream());
  fill_uniform(a.weight, 3, 200 + rank, 0, comm.stream());
  fill_uniform(a.out, 3, 300 + rank, 0, comm.stream());
  const uint64_t expected = digest(whole, comm.stream());
  bool ok = true;
  for (const Strategy strategy : {Strategy::serial, Strategy::overlapped, Strategy::automatic}) {
    AgGemm forward(comm, {kM, kN, kK, DType::bf16, true}, {strategy, 0});
    AgWgrad of_weight(comm, {kM, kN, kK, DType::bf16}, {strategy, 0});
    constexpr size_t kCalls = 20;
    Digests digests(comm, 3 * kCalls);
    for (size_t i = 0; i < kCalls; ++i) {
      poison(y, comm.stream());
      check(cudaMemsetAsync(dw.data(), 0, dw.bytes(), comm.stream()), "clear");
      forward.run(a.x, a.weight, y);
      of_weight.run(a.x, a.out, dw);
      for (const Tensor& made : {y, dw, forward.gathered()}) digests.add(made);
    }
    const std::vector<uint64_t> bits = digests.take();
    ok = repeat(comm, bits, {bits[0], bits[1], expected}, "ag_gemm, ag_wgrad and gathered") && ok;
    ok = right(comm, y, {3, 100, 200 + rank, 1, kK, 0, DType::bf16}, "ag_gemm") && ok;
    const ProductReference gradient{.seed = 3,
                                    .x_stream = 300 + rank,
                                    .w_stream = 100,
                                    .terms = 1,
                                    .k = kM,
                                    .first_row = 0,
                                    .dtype = DType::bf16,
                                    .x_is_km = true,
                                    .w_is_kn = true};
    ok = right(comm, dw, gradient, "ag_wgrad") && ok;
  }
  return ok;
}

void work_until_death(GpuCommunicator& comm) {
  const Strategy strategy = Strategy::overlapped;
  const Shard local = shard_of(kM, comm.size(), comm.rank());
  const Operands a(local.count, kM, kN, kK), r(kM, local.count, kN, kK);
  AgGemm ag(comm, {kM, kN, kK, DType::bf16}, {strategy, 0});
  tandem::GemmRs rs(comm, {kM, kN, kK, DType::bf16}, {strategy, 0});
  for (int i = 0;; ++i) {
    if (i == 50 && comm.rank() == comm.size() - 1) kill(getpid(), SIGKILL);
    ag.run(a.x, a.weight, a.out);
    rs.run(r.x, r.weight, r.out);
    if (i % 10 == 9) comm.synchronize();
  }
}

void scatter_until_death(GpuCommunicator& comm, std::string_view group) {
  const LtContext lt;
  const OpDesc shape{256 * comm.size(), 264, 520};
  const gpu::GemmRs rs(comm, lt, shape);
  const Candidate candidate =
      *std::ranges::find(rs.candidates(), group, [](const Candidate& one) { return one.group(); });
  const Operands r(shape.m, shape.m / comm.size(), shape.n, shape.k);
  for (int i = 0;; ++i) {
    if (i == 50 && comm.rank() == comm.size() - 1) kill(getpid(), SIGKILL);
    candidate.run({r.x, r.weight, r.out});
    if (i % 10 == 9) comm.synchronize();
  }
}

// Kernels must be loaded regardless of CUDA_MODULE_LOADING.
bool loaded() {
  const auto is_loaded = driver_function<decltype(&cuFuncIsLoaded)>("cuFuncIsLoaded", 12040);
  int kernels = 0, unloaded = 0;
  for_each_kernel([&](CUfunction kernel) {
    CUfunctionLoadingState state{};
    check_driver(is_loaded(&state, kernel), "cuFuncIsLoaded");
    ++kernels;
    unloaded += state == CU_FUNCTION_LOADING_STATE_LOADED ? 0 : 1;
  });
  if (unloaded > 0) std::fprintf(stderr, "%d of %d kernels are not loaded\n", unloaded, kernels);
  return kernels > 20 && unloaded == 0;
}

// An access to memory that is not there, after which all calls fail.
bool loses_gpu(GpuCommunicator& comm) {
  const bool before = has_lost_gpu();
  launch_wait(reinterpret_cast<const uint64_t*>(256), 1, {OpId::wait, 0, 0}, comm.device_deadline(),
              comm.stream());
  const bool failed = cudaStreamSynchronize(comm.stream()) != cudaSuccess;
  return !before && failed && has_lost_gpu();
}

// Runs a GEMM that no other test runs; true if this process timed its algorithm.
bool times_a_product(GpuCommunicator& comm) {
  const LtContext lt;
  const OpDesc shape{136, 264, 520};
  gpu::GemmRs(comm, lt, shape, Strategy::serial);
  return !timed_gemm_choices(0).choices.empty();
}

}  // namespace

int run_as_rank(const std::string& scenario) {
  int status = kWrong;
  const char* size = std::getenv("WORLD_SIZE");
  if (!size) size = std::getenv("OMPI_COMM_WORLD_SIZE");
  const int last = size ? std::atoi(size) - 1 : 0;
  try {
    const bool fails = scenario != "work" && scenario != "backward";
    run_gpus({1, {}, fails ? 4.0 : 60.0, ranks_per_gpu(last + 1)}, [&](Communicator& any) {
      GpuCommunicator& comm = as_gpu(any);
      if (scenario == "die") work_until_death(comm);
      if (scenario == "die_fused") scatter_until_death(comm, "fused");
      if (scenario == "die_in_nccl") scatter_until_death(comm, kNccl);
      const bool ok = scenario == "backward"   ? backward(comm)
                      : scenario == "loaded"   ? loaded()
                      : scenario == "lost_gpu" ? loses_gpu(comm)
                      : scenario == "timed"    ? times_a_product(comm)
                      : scenario == "kept"     ? !times_a_product(comm)
                                               : work(comm);
      status = ok ? kRight : kWrong;
    });
  } catch (const Timeout& error) {
    std::fprintf(stderr, "Timeout: %s\n", error.what());
    // NCCL's kernels do not report the peer that they wait for.
    const bool named = error.peer == last || error.op == "synchronize";
    status = named ? kNamedTheLastRank : kWrong;
  } catch (const Aborted& error) {
    std::fprintf(stderr, "Aborted: %s\n", error.what());
    status = error.origin == last ? kNamedTheLastRank : kWrong;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
  }
  return status;
}

}  // namespace tandem::test
