#include "engine/plan/plan_target.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <system_error>
#include <vector>

#include "core/system/files.h"
#include "core/system/nearest.h"
#include "core/system/printable.h"
#include "engine/checkpoint/initial_model.h"
#include "engine/checkpoint/stored_model.h"
#include "engine/model/published_models.h"
#include "tandem/error.h"

namespace tandem::plan {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kSeq = 4096, kStepTokens = 4096 * 1024;

/// Sequence length, and a batch that every number of replicas up to the GPUs divides.
void set_step(const TargetRequest& request, TrainConfig& config) {
  config.train.seq = request.seq > 0 ? request.seq : std::min(kSeq, config.model.max_seq);
  config.model.max_seq = std::max(config.model.max_seq, config.train.seq);
  const double per_gpu = double(kStepTokens) / double(config.train.seq) / request.gpus;
  config.train.batch = request.batch > 0
                           ? request.batch
                           : int64_t(request.gpus * std::max(1.0, std::round(per_gpu)));
}

PlanTarget target_of_folder(const TargetRequest& request) {
  const std::string folder = find_model(request.subject, [](const std::string&) {});
  const std::string shape = folder + "/config.json";
  const fs::path absolute = fs::absolute(request.subject).lexically_normal();
  const fs::path last = absolute.filename().empty() ? absolute.parent_path() : absolute;
  PlanTarget target{.name = last.filename().string()};
  target.config.model = model_config_from_json(read_small_file(shape), shape);
  target.config.train.init = last.string();
  target.base.model = target.config.model;
  return target;
}

PlanTarget target_of_model(const TargetRequest& request) {
  const auto model = find_published_model(request.subject);
  if (!model) {
    const std::vector<std::string> names = published_models();
    const std::string close = nearest(request.subject, names);
    throw InvalidArgument(
        fmt::format("{}: {}expected a job file, the folder of a model, or one of {}",
                    printable(request.subject), close.empty() ? "" : "did you mean " + close + "? ",
                    fmt::join(names, ", ")));
  }
  PlanTarget target{.name = request.subject};
  target.config.model = *model;
  return target;
}

PlanTarget target_of_file(const TargetRequest& request) {
  if (request.seq > 0 || request.batch > 0) {
    throw InvalidArgument(fmt::format(
        "{} with a job file: expected train.{} in {}", request.seq > 0 ? "--seq" : "--batch",
        request.seq > 0 ? "seq" : "batch", printable(request.subject)));
  }
  PlanTarget target{.name = fs::path(request.subject).filename().string()};
  target.config = load_run_config(request.subject, {}, request.init, "", nullptr);
  if (!target.config.train.init.empty()) target.base.model = target.config.model;
  return target;
}

/// Whether the subject can only be a name: no path of a file that is missing.
bool is_name(const std::string& subject) {
  return !path_exists(subject) && subject.find('/') == std::string::npos &&
         !subject.ends_with(".toml");
}

}  // namespace

PlanTarget read_target(const TargetRequest& request) {
  std::error_code error;  // a name that is too long is no folder
  const bool is_folder = fs::is_directory(request.subject, error);
  const bool is_file = !is_folder && !is_name(request.subject);
  if (!is_file && !request.init.empty()) {
    throw InvalidArgument("--init without a job file: expected the folder as the model to plan");
  }
  PlanTarget target = is_file     ? target_of_file(request)
                      : is_folder ? target_of_folder(request)
                                  : target_of_model(request);
  if (!is_file) set_step(request, target.config);
  if (request.tokens > 0) {
    target.config.train.tokens = request.tokens;
    target.config.train.seconds = 0;  // a run has one length
  }
  return target;
}

}  // namespace tandem::plan
