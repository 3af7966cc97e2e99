#include "train/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "core/files.h"
#include "core/json.h"
#include "tandem/error.h"

namespace tandem {
namespace {

using nlohmann::ordered_json;

/// Rewrites `path` (if there) without the lines past `last_step`; returns it.
const std::string& trimmed(const std::string& path, int64_t last_step) {
  if (!path_exists(path)) return path;
  std::istringstream lines(read_file(path));
  std::string kept, line;
  while (std::getline(lines, line)) {
    const auto entry = parse_json<ordered_json>(line);
    if (!entry.is_object() || !entry.contains("step") || !entry["step"].is_number_integer() ||
        entry["step"].get<int64_t>() > last_step) {
      break;
    }
    kept += line + "\n";
  }
  replace_file(path, kept);
  return path;
}

}  // namespace

std::string to_json_line(const StepMetrics& m) {
  ordered_json line{{"step", m.step},       {"loss", m.loss},
                    {"lr", m.lr},           {"grad_norm", m.grad_norm},
                    {"tokens", m.tokens},   {"tokens_per_s", m.tokens_per_s},
                    {"step_ms", m.step_ms}, {"compute_ms", m.compute_ms},
                    {"gemm_ms", m.gemm_ms}, {"exposed_comm_ms", m.exposed_comm_ms},
                    {"mfu", m.mfu}};
  if (m.validation_loss) line["validation_loss"] = *m.validation_loss;
  if (m.aux_loss) line["aux_loss"] = *m.aux_loss;
  if (!m.imbalance.empty()) {
    line["imbalance"] = m.imbalance;
    line["expert_rows"] = m.expert_rows;
  }
  return line.dump() + "\n";
}

MetricsLog::MetricsLog(const std::string& path, int64_t last_step)
    : path_(path), file_(trimmed(path, last_step), O_WRONLY | O_CREAT | O_APPEND, 0644) {}

void MetricsLog::append(const StepMetrics& metrics) {
  const std::string line = to_json_line(metrics);
  size_t done = 0;
  while (done < line.size()) {
    const ssize_t put = ::write(file_.get(), line.data() + done, line.size() - done);
    if (put < 0) throw_errno(path_, "cannot write");
    done += size_t(put);
  }
}

void MetricsLog::sync() {
  if (::fsync(file_.get()) != 0) throw_errno(path_, "cannot sync");
}

}  // namespace tandem
