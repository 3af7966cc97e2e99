// Whether `tandem bench OP` without --transport runs on GPUs.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "bench/bench_moe.h"
#include "cli/bench_options.h"
#include "cli/devices.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

constexpr std::array<std::string_view, 8> kGpuOps{"ag_gemm",    "ag_wgrad",      "gemm_rs",
                                                  "gemm_ar",    "moe",           "all_reduce",
                                                  "all_gather", "reduce_scatter"};

/// Throws Unsupported for a request that GPUs do not time.
void check_gpu_request(const BenchOptions& options, const BenchRequest& request, int ranks) {
  if (std::ranges::find(kGpuOps, request.op) == kGpuOps.end()) {
    throw Unsupported(request.op + " on GPUs: expected CPU ranks");
  }
  if (!options.timeline.empty()) throw Unsupported("--timeline: expected CPU ranks");
  if (is_moe(request.op) && request.dtype == DType::f32) {
    throw Unsupported("moe in f32 on GPUs: expected bf16");
  }
  if (request.op == "ag_wgrad" && !request.wire.is_none()) {
    throw Unsupported("ag_wgrad with --codec on GPUs: expected none");
  }
  if (!is_gemm(request.op)) return;
  const int64_t unit = int64_t(16 / size_of(request.dtype)) * ranks;
  if (request.n % unit == 0 && request.k % unit == 0) return;
  throw Unsupported(fmt::format("n {} and k {} on {} GPUs: expected multiples of {}", request.n,
                                request.k, ranks, unit));
}

}  // namespace

std::string choose_transport(BenchOptions& options) {
  if (!options.transport.empty() || launched()) return "";
  const MoeBench& moe = options.request.moe;
  WorldOptions world;
  world.ranks_per_gpu = options.ranks_per_gpu;
  if (!options.link.empty()) world.link = EmulatedLink::parse(options.link);
  const bool shares = options.ranks_per_gpu > 1;
  // With one rank there is nothing to overlap, so one GPU is not the default.
  world.ranks = options.ranks ? options.ranks
                : moe.ep > 0  ? moe.ep * moe.tp
                : shares      ? options.ranks_per_gpu
                              : 2;
  const auto check_gpus = [&] {
    BenchOptions on_gpus = options;
    on_gpus.transport = "nccl";
    const BenchPlan plan = make_plan(on_gpus);
    for (const BenchRequest& request : plan.requests) {
      check_gpu_request(options, request, plan.world.ranks);
    }
    return 0.0;
  };
  const DeviceChoice choice = default_device(world, {"", check_gpus}, "--transport threads");
  if (choice.on_gpus) options.transport = "nccl";
  return choice.note;
}

}  // namespace tandem::cli
