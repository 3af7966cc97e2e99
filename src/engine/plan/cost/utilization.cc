#include "engine/plan/cost/utilization.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <set>
#include <utility>
#include <vector>

#include "comm/exec.h"
#include "comm/world/gpus.h"
#include "core/random_buffer.h"
#include "core/system/machine.h"
#include "core/system/process/clock.h"
#include "core/system/process/processor_time.h"
#include "engine/config/device_traits.h"
#include "engine/parallel/dims.h"
#include "engine/report/progress.h"
#include "gemm/gemm.h"
#include "tune/measure.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;
/// Products by which a device's peak is measured.
struct PeakProbe {
  int64_t side;
  int products;
  bool is_rated;           ///< the peak in bf16 may be known
  bool shares_processors;  ///< with other programs
};
// A GPU needs milliseconds of work to reach its clock, and does not wait for other programs.
constexpr PeakProbe kHostProbe{512, 1, false, true}, kGpuProbe{4096, 20, true, false};
constexpr int kMaxRounds = 5, kMaxRoundsOfShortRun = 2;  // on a busy machine; the best one counts
constexpr int64_t kShortRun = 100;  // steps: fewer take less time than all rounds would

/// Share of rank 0's host used by other programs since `begin`; the same on every rank.
double external_share(Communicator& world, const ProcessorTime& begin) {
  struct Used {
    uint64_t host = 0;
    int64_t process = 0;
    ProcessorTime begin, end;
  };
  const Used local{std::hash<std::string>()(boot_id()), ::getpid(), begin, ProcessorTime::now()};
  std::vector<Used> all;
  for (const auto& blob : world.exchange(std::as_bytes(std::span(&local, 1)), "peak")) {
    std::memcpy(&all.emplace_back(), blob.data(), sizeof(Used));
  }
  ProcessorTime end = all[0].end;
  std::set<int64_t> processes{all[0].process};
  for (const Used& used : all) {
    if (used.host != all[0].host || !processes.insert(used.process).second) continue;
    end.process += used.end.process - used.begin.process;
  }
  return external_share(all[0].begin, end);
}

}  // namespace

double rated_bf16_flops(std::string_view gpu) {
  constexpr double kHopper = 989.4e12;  // H100 SXM and H200, without sparsity
  const auto has = [&](std::string_view name) { return gpu.find(name) != gpu.npos; };
  return has("H100 80GB HBM3") || (has("H200") && !has("NVL")) ? kHopper : 0;
}

Utilization measure_utilization(Communicator& world, const TrainConfig& config,
                                std::atomic<double>* rank_flops) {
  const DType dtype = config.train.activation_dtype();
  const Exec exec = make_exec(world);
  const PeakProbe& probe = device_traits(exec).is_host ? kHostProbe : kGpuProbe;
  if (probe.is_rated && dtype == DType::bf16) {
    const std::string gpu = this_machines_gpus().name;
    const int gpus = count_gpus(world);
    if (const double rated = rated_bf16_flops(gpu); rated > 0) {
      return {.flops_per_token = config.model.flops_per_token(config.train.seq),
              .peak_flops = gpus * rated,
              .gpus = gpus,
              .gpu = gpu};
    }
  }
  const int64_t side = probe.side;
  Utilization found{.flops_per_token = config.model.flops_per_token(config.train.seq),
                    .side = side};
  if (rank_flops && *rank_flops > 0) {
    found.peak_flops = world.size() * *rank_flops;
    return found;
  }
  const auto square = [&](const Memory& memory) { return memory.view(dtype, {side, side}); };
  const auto random = [&](uint64_t seed) {
    const Memory on_host = random_buffer(dtype, side * side, seed);
    Memory there(on_host.bytes(), exec.device);
    copy(exec, square(on_host), square(there));
    return there;
  };
  const Memory a = random(1), b = random(2);
  const Memory c(size_t(side * side) * size_of(dtype), exec.device);
  // Timed until all ranks have finished: if they share cores, a rank's own time is too short.
  const std::vector<TimedRun> product{[&] {
    world.barrier("peak");
    const auto begin = Clock::now();
    for (int i = 0; i < probe.products; ++i) {
      gemm(exec, square(a), square(b).transposed(), square(c));
    }
    wait(exec);
    world.barrier("peak");
    return seconds_since(begin);
  }};
  const bool is_short = config.train.ends_by_steps() && config.train.steps < kShortRun;
  const int max_rounds = is_short ? kMaxRoundsOfShortRun : kMaxRounds;
  double fastest = HUGE_VAL, external = 1;
  for (int round = 0; round < max_rounds && external >= kBusyShare; ++round) {
    const ProcessorTime begin = ProcessorTime::now();
    const auto samples = measure(world, product, {uint64_t(round) + 1, 3, 9, 0.1});
    fastest = std::min(fastest, *std::ranges::min_element(samples[0]));
    external = probe.shares_processors ? external_share(world, begin) : 0;
  }
  const double of_rank = probe.products * 2 * double(side * side * side) / fastest;
  if (rank_flops) *rank_flops = of_rank;
  found.peak_flops = world.size() * of_rank;
  found.external_share = external;
  return found;
}

std::optional<std::string> Utilization::check_peak(double tokens_per_s) {
  if (side == 0 || of(tokens_per_s) <= 1) return {};
  const double peak = std::exchange(peak_flops, 0);
  return fmt::format(
      "MFU is not shown from here on: a step reached {:.3g} GFLOP/s, more than the peak of {:.3g} "
      "that was measured at the start (other programs?)",
      tokens_per_s * flops_per_token / 1e9, peak / 1e9);
}

std::vector<std::string> Utilization::describe(const TrainConfig& config) const {
  const int ranks = ParallelDims(config.parallel).ranks();
  std::vector<std::string> lines{
      fmt::format("MFU: tokens/s x FLOPs per token / peak. FLOPs per token: {}, forward and "
                  "backward:",
                  format_count(flops_per_token)),
      fmt::format("  {};", config.model.flops_formula())};
  if (side == 0) {
    lines.push_back(fmt::format("  peak: {:.4g} TFLOP/s, the rated bf16 rate of {}x {}",
                                peak_flops / 1e12, gpus, gpu));
    return lines;
  }
  lines.push_back(
      fmt::format("  peak: {:.3g} GFLOP/s, measured now: {} products of {} x {} x {} on {} rank{} "
                  "at once",
                  peak_flops / 1e9, name_of(config.train.activation_dtype()), side, side, side,
                  ranks, ranks == 1 ? "" : "s"));
  if (external_share >= kBusyShare) {
    lines.push_back(
        fmt::format("warning: other programs kept {:.0f} % of the processors busy while "
                    "the peak was measured: it may be too low, and MFU too high",
                    100 * external_share));
  }
  return lines;
}

}  // namespace tandem
