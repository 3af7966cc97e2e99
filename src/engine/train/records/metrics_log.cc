#include "engine/train/records/metrics_log.h"

#include <fcntl.h>
#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "core/system/json.h"
#include "core/system/lines.h"
#include "core/system/log.h"
#include "engine/report/progress.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using nlohmann::ordered_json;

/// Step number of a line written by `to_json_line`.
std::optional<int64_t> parse_step(std::string_view line) {
  const auto entry = parse_json<ordered_json>(line);
  if (!entry.is_object() || !entry.contains("step") || !entry["step"].is_number_integer())
    return {};
  return entry["step"].get<int64_t>();
}

/// Moves damaged lines to PATH.damaged.
void set_aside(const std::string& path, const std::vector<std::string>& lines, size_t first) {
  if (lines.empty()) return;
  const std::string aside = path + ".damaged";
  const FileDescriptor file(aside, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW);
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  write_at(file.get(), aside, text.data(), text.size(), 0);
  log_message(LogLevel::warn,
              fmt::format("{}: {} damaged line{} (the first: line {}) moved to {}; "
                          "all other steps are kept",
                          path, lines.size(), lines.size() == 1 ? "" : "s", first, aside));
}

/// Logs a warning if not all steps up to `last_step` are among `steps`, which are at most that.
void warn_of_missing(const std::string& path, const std::set<int64_t>& steps, int64_t last_step) {
  const int64_t missing = last_step - int64_t(steps.size());
  if (missing <= 0) return;
  int64_t first = 1;
  for (const int64_t step : steps) {
    if (step > first) break;
    first = step + 1;
  }
  log_message(LogLevel::warn,
              fmt::format("{}: no lines of {} of the {} steps (the first: step {}): the file was "
                          "removed or changed",
                          path, missing, last_step, first));
}

/// Rewrites `path` (if it exists) without the lines past `last_step` and without damaged ones;
/// returns it. A truncated line is always past `last_step`: lines up to a checkpoint are synced
/// before the checkpoint.
const std::string& trimmed(const std::string& path, int64_t last_step) {
  std::error_code code;
  std::set<int64_t> steps;
  if (!std::filesystem::exists(std::filesystem::symlink_status(path, code))) {
    warn_of_missing(path, steps, last_step);
    return path;
  }
  const Lines lines(path_exists(path) ? read_file(path) : "");
  std::string text_up_to_step;
  std::vector<std::string> damaged;
  size_t number = 0, first = 0;
  for (const std::string_view line : lines) {
    ++number;
    if (const auto step = parse_step(line)) {
      if (*step > last_step) continue;
      text_up_to_step.append(line) += '\n';
      if (*step > 0) steps.insert(*step);
    } else if (!lines.is_cut(line) && !line.empty()) {
      if (damaged.empty()) first = number;
      damaged.emplace_back(line);
    }
  }
  set_aside(path, damaged, first);
  warn_of_missing(path, steps, last_step);
  replace_file(path, text_up_to_step);
  return path;
}

}  // namespace

namespace {

ordered_json to_json(const AxisMeans& means) {
  return {{"tp", means.tp}, {"ep", means.ep}, {"dp", means.dp},
          {"pp", means.pp}, {"cp", means.cp}, {"sync", means.sync}};
}

ordered_json sent_by_axis(const StepRecord& m) {
  ordered_json sent = to_json(m.sent_bytes);
  if (!m.counts_layer_bytes) sent["tp"] = sent["ep"] = sent["cp"] = nullptr;
  return sent;
}

}  // namespace

std::string to_json_line(const StepRecord& m) {
  ordered_json line{{"step", m.step},
                    {"loss", m.loss},
                    {"lr", m.lr},
                    {"grad_norm", m.grad_norm},
                    {"batch", m.batch},
                    {"tokens", m.tokens},
                    {"tokens_per_s", m.tokens_per_s},
                    {"step_ms", m.step_ms},
                    {"compute_ms", m.compute_ms},
                    {"gemm_ms", m.gemm_ms},
                    {"exposed_comm_ms", m.exposed_comm_ms},
                    {"exposed_ms", to_json(m.exposed_ms)},
                    {"sent_bytes", sent_by_axis(m)},
                    {"state_bytes_per_parameter", m.state_bytes_per_parameter},
                    {"data_wait_ms", m.data_wait_ms},
                    {"mfu", m.mfu > 0 ? ordered_json(m.mfu) : ordered_json(nullptr)},
                    {"memory_bytes", m.memory_bytes}};
  if (m.checkpoint_ms) line["checkpoint_ms"] = *m.checkpoint_ms;
  if (m.saved_step) line["saved_step"] = *m.saved_step;
  if (m.recompute_ms > 0) line["recompute_ms"] = m.recompute_ms;
  if (m.bubble) line["bubble"] = *m.bubble;
  if (m.tp_bytes > 0) line["tp_bytes"] = m.tp_bytes;
  if (m.expert_bytes > 0) line["expert_bytes"] = m.expert_bytes;
  if (m.stage_bytes) line["stage_bytes"] = *m.stage_bytes;
  if (m.uncompressed_gradient_bytes > 0) {
    line["gradient_bytes"] = m.gradient_bytes;
    line["weight_bytes"] = m.weight_bytes;
  }
  if (!m.counted_learners.empty()) line["counted_learners"] = m.counted_learners;
  if (m.validation_loss) {
    line["validation_loss"] = *m.validation_loss;
    line["validation_unit"] = m.validates_bytes ? "byte" : "token";
  }
  if (m.aux_loss) line["aux_loss"] = *m.aux_loss;
  if (!m.imbalance.empty()) {
    line["imbalance"] = m.imbalance;
    line["expert_imbalance"] = m.expert_imbalance;
    line["expert_rows"] = m.expert_rows;
  }
  return dump_json(line) + "\n";
}

std::vector<std::string> describe_sent(const CodecPolicy& policy, bool error_feedback,
                                       const StepRecord& step) {
  std::vector<std::string> lines;
  const auto uncompressed = double(step.uncompressed_gradient_bytes);
  const auto add = [&](const char* what, const Wire& wire, uint64_t sent, const char* how) {
    if (wire.is_none() || uncompressed == 0) return;
    lines.push_back(fmt::format("{} as {}{}: {} sent in a step, {:.1f} % of {} in f32", what,
                                wire.describe(), how, format_bytes(double(sent)),
                                100 * double(sent) / uncompressed, format_bytes(uncompressed)));
  };
  add("gradients", policy.gradients, step.gradient_bytes,
      policy.gradients.is_exact() ? ""
      : error_feedback            ? " with error feedback"
                                  : " without error feedback");
  add("weights", policy.weights, step.weight_bytes,
      policy.weights.is_exact() ? "" : " differences");
  return lines;
}

MetricsLog::MetricsLog(const std::string& path, int64_t last_step)
    : path_(path), file_(trimmed(path, last_step), O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW) {}

void MetricsLog::add(const StepRecord& step) {
  const std::lock_guard lock(mutex_);
  unwritten_ += to_json_line(step);
  append_to(file_.get(), path_, unwritten_);
}

void MetricsLog::sync() {
  {
    const std::lock_guard lock(mutex_);
    append_to(file_.get(), path_, unwritten_);
  }
  sync_file(file_.get(), path_);
}

}  // namespace tandem
