#include "engine/train/records/run_files.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <ctime>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>
#include <vector>

#include "core/system/files.h"
#include "core/system/json.h"
#include "core/system/log.h"
#include "core/system/machine.h"
#include "core/system/process/command_line.h"
#include "core/version.h"
#include "engine/checkpoint/run/disk_room.h"
#include "engine/checkpoint/run/made_by.h"
#include "engine/checkpoint/run/run_checkpoints.h"
#include "engine/checkpoint/run/same_run.h"
#include "engine/config/data_format.h"
#include "engine/data/corpus.h"
#include "engine/data/ledger/ledger_check.h"
#include "engine/plan/cost/memory.h"
#include "engine/tokenizer/open.h"
#include "observe/file_activity.h"
#include "tandem/error.h"

namespace tandem {

namespace {

constexpr size_t kMaxRunId = 64;

/// Id of the run in `out`, or a new one.
std::string read_run_id(const std::string& out) {
  if (path_exists(out + kRunId)) return read_small_file(out + kRunId, kMaxRunId);
  std::random_device random;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", random(), random(), random(), random());
}

/// Command, machine and build of this process, for reports.
std::string describe_start() {
  const std::vector<std::string> words = typed_words();
  const std::time_t now = std::time(nullptr);
  const nlohmann::ordered_json start{{"command", joined(words)},
                                     {"date", fmt::format("{:%F %H:%M UTC}", fmt::gmtime(now))},
                                     {"hardware", this_machine().describe()},
                                     {"version", kVersion},
                                     {"commit", kCommit}};
  return dump_json(start, 1) + "\n";
}

}  // namespace

RunFiles::RunFiles(const std::string& out, bool resume, const TrainConfig& config,
                   const TokenSource& source, ProgressLine& progress, double patience_s)
    : out_(out), config_(config), source_(source), progress_(progress) {
  make_directories(out);
  lock_.emplace(out, patience_s);
  restore_final(out);
  if (!resume) require_no_run(out);
  run_id_ = read_run_id(out);
}

std::string RunFiles::find_checkpoint(int64_t after_step) {
  const auto found = newest_checkpoint(
      out_, [this](const std::string& text) { warn(text); }, after_step);
  if (found) {
    accept(*found);
    return found->path;
  }
  if (after_step < 0) {
    progress_.note(fmt::format("{} holds no checkpoint: starting at step 0", out_));
  }
  return "";
}

void RunFiles::accept_memory(const TrainState& state, const std::string& name) {
  accept({name, state, parse_config(state.config, name).model});
}

void RunFiles::accept(const Checkpoint& found) {
  std::string changes;
  if (found.state.data != source_.fingerprint() && path_exists(manifest_path(out_))) {
    changes = describe_changes(Manifest::read(manifest_path(out_)), source_.records());
  }
  const ResumedRun run(config_);
  run.require_same(found, source_.fingerprint(), changes);
  const std::string change = describe_change(found.state.made_by, build_identity());
  if (!change.empty()) warn(change);
  progress_.note(fmt::format("resuming from {}", found.path));
  for (const std::string& line : run.describe(found.state)) progress_.note(line);
}

void RunFiles::write_configuration() const {
  replace_file(out_ + "/heldout.txt", join_paths(source_.held_out().files));
  TrainConfig absolute = config_;  // which may be used from any folder
  make_paths_relative_to(absolute, std::filesystem::current_path().string());
  replace_file(out_ + "/config.toml", absolute.to_toml());
  replace_file(out_ + "/started.json", describe_start());
  replace_file(out_ + kRunId, run_id_);
  const std::string& tokenizer = config_.data.tokenizer;
  if (!tokenizer.empty()) {
    copy_tokenizer(tokenizer, out_);
    if (has_chats(config_.data.format)) copy_side_files(folder_of_tokenizer(tokenizer), out_);
  }
  if (!source_.records().empty()) {
    replace_file(manifest_path(out_), Manifest(source_.records()).to_json());
  }
}

void RunFiles::require_output() const {
  if (const std::string reason = find_other_owner(); !reason.empty()) throw IoError(reason);
}

std::string RunFiles::find_other_owner() const {
  try {
    lock_->check();
  } catch (const ConfigError& error) {
    return error.what();
  } catch (const IoError&) {  // not known: the next write says why
  }
  return "";
}

void RunFiles::write(const std::string& name, const std::string& text) {
  try {
    require_output();
    replace_file(out_ + "/" + name, text);
  } catch (const IoError& error) {
    warn(error.what());
  }
}

void RunFiles::check_room(int64_t step, bool in_memory) {
  const auto bytes = double(size_of(parse_dtype(config_.checkpoint.export_dtype)));
  const int copies = config_.model.fused_experts ? 2 : 1;  // of final/, while experts are fused
  const std::string text =
      check_disk_room(out_, step,
                      {MemoryEstimate(config_).checkpoint_bytes(),
                       copies * bytes * double(config_.model.parameters()), config_.checkpoint.keep,
                       CheckpointSchedule(config_.checkpoint).is_periodic(), !in_memory});
  if (!text.empty()) warn(text);
}

void RunFiles::open_logs(const LedgerStart& start) {
  const std::lock_guard lock(mutex_);
  replace_logs(start);
  if (start.next_sample == 0) return;
  const std::string path = out_ + "/ledger.jsonl";
  const std::vector<std::string> problems = check_ledger(path, {}).problems;
  if (problems.empty()) return;
  warn(fmt::format(
      "{}: {}{}: the file was removed or changed", path, problems.front(),
      problems.size() == 1
          ? ""
          : fmt::format("; and {} more, which tandem data check names", problems.size() - 1)));
}

/// With the mutex.
void RunFiles::replace_logs(const LedgerStart& start) {
  auto ledger = std::make_shared<Ledger>(out_ + "/ledger.jsonl", start);
  log_ = std::make_shared<MetricsLog>(out_ + "/metrics.jsonl", start.step);
  ledger_ = std::move(ledger);
  position_ = start;
}

/// With the mutex. Makes a log that was removed, or is another file now, again; not if the folder
/// is another, which is prepare_checkpoint's to decide.
void RunFiles::replace_removed() {
  const bool has_ledger = ledger_->is_in_place();
  if ((has_ledger && log_->is_in_place()) || !lock_->is_locked()) return;
  warn(fmt::format("{}/{} was removed or replaced: it is continued from here", out_,
                   has_ledger ? "metrics.jsonl" : "ledger.jsonl"));
  replace_logs(LedgerStart(position_));
}

RunFiles::Logs RunFiles::logs() {
  const std::lock_guard lock(mutex_);
  return {ledger_, log_};
}

void RunFiles::add(const StepRecord& step) {
  try_writing(metrics_fail_, [&] {
    const std::lock_guard lock(mutex_);
    replace_removed();
    log_->add(step);
  });
}

void RunFiles::add(const LedgerStep& step) {
  try_writing(ledger_fails_, [&] { append(step); });
  if (step.skip_reason.empty()) return;
  progress_.note(fmt::format("step {}: {}: dropped, samples {} to {} of epoch {} are skipped",
                             step.step, step.skip_reason, step.first_sample, step.end() - 1,
                             step.epoch));
}

/// After an IoError, of the lines before, the line is appended all the same.
void RunFiles::append(const LedgerStep& step) {
  std::string error;
  try {
    logs().ledger->await();
  } catch (const IoError& of_lines_before) {
    error = of_lines_before.what();
  }
  {
    const std::lock_guard lock(mutex_);
    replace_removed();
    ledger_->append(step);
    position_.step = step.skip_reason.empty() ? step.step : step.step - 1;
    position_.next_sample = step.end();
  }
  if (!error.empty()) throw IoError(error);
}

/// Warns once while `write` fails.
template <typename Write>
void RunFiles::try_writing(bool& fails, const Write& write) {
  const FileActivity writes("log");
  try {
    write();
    fails = false;
  } catch (const IoError& error) {
    if (!std::exchange(fails, true)) warn(error.what());
  }
}

void RunFiles::prepare_checkpoint() {
  is_removed_ = lock_->renew() || is_removed_;
  if (is_removed_) {
    write_configuration();
    const std::lock_guard lock(mutex_);
    replace_logs(LedgerStart(position_));
    is_removed_ = false;
  }
  const Logs logs = this->logs();
  logs.ledger->await();
  try {
    logs.metrics->sync();
    sync_fails_ = false;
  } catch (const IoError& error) {  // the checkpoint does not need these lines
    if (!std::exchange(sync_fails_, true)) log_message(LogLevel::warn, error.what());
  }
}

}  // namespace tandem
