#include "train/utilization.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "core/random_buffer.h"
#include "gemm/gemm.h"
#include "observe/progress.h"
#include "tune/measure.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kSide = 512;

}  // namespace

Utilization measure_utilization(Communicator& world, const TrainConfig& config) {
  const DType dtype = parse_dtype(config.train.dtype);
  const Buffer a = random_buffer(dtype, kSide * kSide, 1);
  const Buffer b = random_buffer(dtype, kSide * kSide, 2);
  const Buffer c(size_t(kSide * kSide) * size_of(dtype));
  const auto square = [&](const Buffer& memory) { return memory.view(dtype, {kSide, kSide}); };
  // Until all ranks have ended: where they share cores, each one's own time would say too little.
  const std::vector<TimedVariant> product{[&] {
    world.barrier("peak");
    const auto begin = Clock::now();
    gemm(square(a), square(b).transposed(), square(c));
    world.barrier("peak");
    return std::chrono::duration<double>(Clock::now() - begin).count();
  }};
  const auto samples = measure(world, product, {1, 3, 9, 0.1});
  const double fastest = *std::min_element(samples[0].begin(), samples[0].end());
  return {config.model.flops_per_token(config.train.seq),
          double(world.size()) * 2 * double(kSide * kSide * kSide) / fastest};
}

std::string Utilization::describe(const TrainConfig& config) const {
  const int64_t ranks = config.parallel.tp * config.parallel.dp;
  return fmt::format(
      "MFU: tokens/s x FLOPs per token / peak. FLOPs per token: {}, forward and backward:\n"
      "  {};\n"
      "  peak: {:.3g} GFLOP/s, measured now: {} products of {} x {} x {} on {} rank{} at once",
      format_count(flops_per_token), ModelConfig::flops_formula(), peak_flops / 1e9,
      config.train.dtype, kSide, kSide, kSide, ranks, ranks == 1 ? "" : "s");
}

}  // namespace tandem
