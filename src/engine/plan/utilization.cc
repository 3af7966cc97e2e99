#include "engine/plan/utilization.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <set>
#include <vector>

#include "core/processor_time.h"
#include "core/random_buffer.h"
#include "engine/report/progress.h"
#include "gemm/gemm.h"
#include "tune/measure.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kSide = 512;
constexpr int kMaxRounds = 5;  // on a busy machine; the best round counts

/// Share of rank 0's host used by other programs since `begin`; the same on every rank.
double share_of_others(Communicator& world, const ProcessorTime& begin) {
  struct Used {
    uint64_t host = 0;
    int64_t process = 0;
    ProcessorTime begin, end;
  };
  std::string host;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), host);
  const Used local{std::hash<std::string>()(host), ::getpid(), begin, ProcessorTime::now()};
  std::vector<Used> all;
  for (const auto& blob : world.exchange(std::as_bytes(std::span(&local, 1)), "peak")) {
    std::memcpy(&all.emplace_back(), blob.data(), sizeof(Used));
  }
  ProcessorTime end = all[0].end;
  std::set<int64_t> processes{all[0].process};
  for (const Used& used : all) {
    if (used.host != all[0].host || !processes.insert(used.process).second) continue;
    end.own += used.end.own - used.begin.own;
  }
  return share_of_others(all[0].begin, end);
}

}  // namespace

Utilization measure_utilization(Communicator& world, const TrainConfig& config) {
  const DType dtype = parse_dtype(config.train.dtype);
  const Memory a = random_buffer(dtype, kSide * kSide, 1);
  const Memory b = random_buffer(dtype, kSide * kSide, 2);
  const Memory c(size_t(kSide * kSide) * size_of(dtype));
  const auto square = [&](const Memory& memory) { return memory.view(dtype, {kSide, kSide}); };
  // Timed until all ranks have finished: if they share cores, a rank's own time is too short.
  const std::vector<TimedVariant> product{[&] {
    world.barrier("peak");
    const auto begin = Clock::now();
    gemm(square(a), square(b).transposed(), square(c));
    world.barrier("peak");
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }};
  double fastest = HUGE_VAL, others = 1;
  for (int round = 0; round < kMaxRounds && others >= kBusyShare; ++round) {
    const ProcessorTime begin = ProcessorTime::now();
    const auto samples = measure(world, product, {uint64_t(round) + 1, 3, 9, 0.1});
    fastest = std::min(fastest, *std::ranges::min_element(samples[0]));
    others = share_of_others(world, begin);
  }
  return {config.model.flops_per_token(config.train.seq),
          double(world.size()) * 2 * double(kSide * kSide * kSide) / fastest, others};
}

std::string Utilization::describe(const TrainConfig& config) const {
  const int64_t ranks = config.parallel.tp * config.parallel.dp;
  std::string text = fmt::format(
      "MFU: tokens/s x FLOPs per token / peak. FLOPs per token: {}, forward and backward:\n"
      "  {};\n"
      "  peak: {:.3g} GFLOP/s, measured now: {} products of {} x {} x {} on {} rank{} at once",
      format_count(flops_per_token), ModelConfig::flops_formula(), peak_flops / 1e9,
      config.train.dtype, kSide, kSide, kSide, ranks, ranks == 1 ? "" : "s");
  if (others < kBusyShare) return text;
  return text + fmt::format(
                    "\nwarning: other programs kept {:.0f} % of the processors busy while "
                    "the peak was measured: it may be too low, and MFU too high",
                    100 * others);
}

}  // namespace tandem
