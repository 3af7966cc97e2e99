#include "engine/plan/plan_answer.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/system/printable.h"

namespace tandem::plan {
namespace {

constexpr double kDay = 86400, kHoursADay = 24;
/// GPUs of one host in the largest runs of bench/results.
constexpr double kMaxTestedGpus = 4;

std::string untested(const AnswerParams& params, const GpuSpec& gpu, std::span<const RunRow> runs) {
  std::string text;
  if (!gpu.has_run_tandem) {
    text = fmt::format("Tandem on {}: it has run on H100 and H200", gpu.name);
  } else if (params.gpus > kMaxTestedGpus) {
    text = fmt::format("Tandem on more than {:g} {}, or between hosts", kMaxTestedGpus, gpu.name);
  } else {
    text = fmt::format("this layout on {}", gpu.name);
  }
  const bool has_runs = std::ranges::any_of(runs, [&](const RunRow& run) {
    const auto known = find_gpu(run.gpu);
    return run.skipped.empty() && run.step_s && known && known->name == gpu.name;
  });
  text += has_runs ? "; step times are those of other software"
                   : fmt::format("; no run of other software on {} was fitted", gpu.name);
  return text;
}

/// Three digits or all before the point, with separators of thousands.
std::string readable(double value) {
  constexpr double kThousand = 999.5;  // rounded to three digits
  if (value < kThousand) return fmt::format("{:.3g}", value);
  std::string digits = fmt::format("{:.0f}", value);
  for (ptrdiff_t at = ptrdiff_t(digits.size()) - 3; at > 0; at -= 3) digits.insert(size_t(at), ",");
  return digits;
}

}  // namespace

PlanAnswer make_answer(const AnswerParams& params, const Layout& layout, const GpuSpec& gpu,
                       std::span<const RunRow> runs) {
  const RunRow& row = layout.row;
  PlanAnswer answer{.params = params, .gpu = std::string(gpu.name)};
  answer.step_s = layout.time.total;
  answer.step_tokens = row.tokens() * params.learners;
  answer.memory_gib = layout.memory_gib;
  answer.tokens_per_s = answer.step_tokens / answer.step_s;
  answer.flops_per_token = flops_per_token(row);
  answer.peak_flops = gpu.bf16_flops;
  answer.mfu = answer.tokens_per_s * answer.flops_per_token / params.gpus / gpu.bf16_flops;
  answer.days = params.tokens / answer.tokens_per_s / kDay;
  answer.cost = answer.days * kHoursADay * params.gpus * params.price;
  answer.bar = error_bar(runs, row);
  answer.untested = untested(params, gpu, runs);
  return answer;
}

std::string describe(const PlanAnswer& answer) {
  const auto& [name, gpus, learners, tokens, price] = answer.params;
  const auto& bar = answer.bar;
  const std::string error = bar ? fmt::format(" ± {:.0f} %", 100 * bar->share) : "";
  std::string text = fmt::format("{} on {:g} {}, {} tokens a step, bf16\n\n", single_line(name),
                                 gpus, answer.gpu, readable(answer.step_tokens));
  text += fmt::format("tokens/s   {}{} ({} a GPU)\n", readable(answer.tokens_per_s), error,
                      readable(answer.tokens_per_s / gpus));
  text += fmt::format(
      "MFU        {:.1f} % of {:g} TFLOP/s, at {} GFLOP a token "
      "(6 x weights of GEMMs + 6 x layers x width x seq)\n",
      100 * answer.mfu, answer.peak_flops / 1e12, readable(answer.flops_per_token / 1e9));
  text += fmt::format("step       {:.4g} s, {:.1f} GiB a rank\n", answer.step_s, answer.memory_gib);
  if (tokens > 0) {
    text +=
        fmt::format("run        {} days{} for {:.3g} tokens", readable(answer.days), error, tokens);
    text +=
        price > 0 ? fmt::format(", {} at {:g} a GPU-hour\n", readable(answer.cost), price) : "\n";
  }
  text += bar ? fmt::format(
                    "error bar  80 % of {} runs ({}, {} sources) are within it, each predicted "
                    "from other sources\n",
                    bar->runs, bar->of, bar->groups)
              : "error bar  none: the runs that were fitted are not of two sources\n";
  return text + fmt::format("untested   {}\n", answer.untested);
}

}  // namespace tandem::plan
