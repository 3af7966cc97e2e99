#include "engine/train/run_files.h"

#include <fmt/format.h>

#include <utility>

#include "core/files.h"
#include "core/log.h"
#include "engine/checkpoint/made_by.h"
#include "engine/checkpoint/same_run.h"
#include "tandem/error.h"

namespace tandem {

RunFiles::RunFiles(const std::string& out, bool resume, const TrainConfig& config,
                   const Corpus& corpus, ProgressLine& progress)
    : out_(out), corpus_(corpus), progress_(progress) {
  make_directories(out);
  lock_.emplace(out);
  if (resume) {
    find_checkpoint(config);
  } else {
    require_no_run(out);
  }
}

void RunFiles::find_checkpoint(const TrainConfig& config) {
  const auto found = newest_checkpoint(out_, [this](const std::string& text) { warn(text); });
  if (!found) {
    progress_.note(fmt::format("{} holds no checkpoint: starting at step 0", out_));
    return;
  }
  require_same_run(*found, config, corpus_.fingerprint());
  const std::string change = describe_change(found->state.made_by, build_identity());
  if (!change.empty()) warn(change);
  resume_from_ = found->path;
  progress_.note(fmt::format("resuming from {}", resume_from_));
  for (const std::string& line : describe_resume(found->state, config)) progress_.note(line);
}

void RunFiles::write_configuration(const TrainConfig& config) const {
  replace_file(out_ + "/heldout.txt", join_paths(corpus_.val_files()));
  replace_file(out_ + "/config.toml", to_toml(config));
}

void RunFiles::open_log(int64_t step) {
  auto log = std::make_shared<MetricsLog>(out_ + "/metrics.jsonl", step);
  const std::lock_guard lock(mutex_);
  log_ = std::move(log);
}

void RunFiles::add(const StepRecord& step) {
  const std::lock_guard lock(mutex_);
  log_->add(step);
}

void RunFiles::prepare_checkpoint(int64_t step, const TrainConfig& config) {
  if (lock_->renew()) {
    write_configuration(config);
    open_log(step);
  }
  std::shared_ptr<MetricsLog> log;
  {
    const std::lock_guard lock(mutex_);
    log = log_;
  }
  try {
    log->sync();
    sync_fails_ = false;
  } catch (const IoError& error) {  // the checkpoint does not need these lines
    if (!std::exchange(sync_fails_, true)) log_message(LogLevel::warn, error.what());
  }
}

}  // namespace tandem
