#include "engine/report/live_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <utility>

#include "core/system/files.h"
#include "core/system/json.h"
#include "engine/report/ranks/rank_map.h"
#include "engine/report/ranks/rank_state.h"
#include "engine/report/runs.h"
#include "tandem/error.h"

namespace tandem::report {
namespace {

using Json = LiveRun::Json;

constexpr size_t kMaxPoints = 1024, kMaxEvents = 100, kMaxEventText = 400, kMaxLiveProblems = 8;
constexpr std::array kCurveKeys{"step",         "loss",       "validation_loss", "lr",
                                "grad_norm",    "mfu",        "tokens_per_s",    "step_ms",
                                "memory_bytes", "compute_ms", "exposed_comm_ms", "saved_step",
                                "tokens",       "elapsed_s"};
/// Keys whose point has the value at its end; others have the mean of its steps.
constexpr std::array kEndKeys{"step", "tokens", "elapsed_s"};

bool is_end_key(std::string_view key) {
  return std::ranges::find(kEndKeys, key) != kEndKeys.end();
}

Json number_or_null(double value) {
  return std::isfinite(value) ? Json(value) : Json(nullptr);
}

double mean_of_finite(double a, double b) {
  if (!std::isfinite(a)) return b;
  return std::isfinite(b) ? (a + b) / 2 : a;
}

}  // namespace

LiveRun::LiveRun(std::string dir, GoalReader read_goal)
    : dir_(std::move(dir)),
      steps_tail_(dir_ + "/metrics.jsonl"),
      events_tail_(dir_ + "/events.jsonl"),
      checks_tail_(dir_ + "/checks.jsonl"),
      injected_tail_(dir_ + "/injected.jsonl"),
      live_ranks_(dir_ + "/ranks"),
      read_goal_(std::move(read_goal)),
      grown_(std::chrono::steady_clock::now()) {
  clear_steps();
}

void LiveRun::clear_steps() {
  curves_.clear();
  for (const char* key : kCurveKeys) curves_[key];
  folded_ = 1;
  in_point_ = 0;
  elapsed_s_ = tokens_ = 0;
  sent_ = {};
}

void LiveRun::add_step(std::string_view line) {
  const auto row = parse_json<Json>(line);
  if (!row.is_object() || !row.contains("step") || !row["step"].is_number()) return;
  const auto number = [&](const char* key) {
    return row.contains(key) && row[key].is_number() ? row[key].get<double>() : std::nan("");
  };
  const double step_ms = number("step_ms"), tokens = number("tokens");
  if (std::isfinite(step_ms)) elapsed_s_ += step_ms / 1e3;
  if (std::isfinite(tokens)) tokens_ += tokens;
  sent_.set(row);
  if (row.contains("validation_unit") && row["validation_unit"] == "token") {
    validation_unit_ = "token";
  }
  const bool is_new = in_point_ == 0 || in_point_ >= folded_;
  in_point_ = is_new ? 1 : in_point_ + 1;
  for (const char* key : kCurveKeys) {
    std::vector<double>& values = curves_[key].values;
    const double value = key == std::string_view("tokens")      ? tokens_
                         : key == std::string_view("elapsed_s") ? elapsed_s_
                                                                : number(key);
    if (is_new) {
      values.push_back(value);
    } else if (std::isfinite(value)) {
      const bool is_last = is_end_key(key) || !std::isfinite(values.back());
      values.back() = is_last ? value : values.back() + (value - values.back()) / double(in_point_);
    }
  }
  if (curves_[kCurveKeys[0]].values.size() > kMaxPoints) fold_steps();
}

void LiveRun::fold_steps() {
  for (const char* key : kCurveKeys) {
    std::vector<double>& values = curves_[key].values;
    std::vector<double> halved;
    for (size_t i = 0; i < values.size(); i += 2) {
      const bool is_pair = i + 1 < values.size();
      halved.push_back(!is_pair          ? values[i]
                       : is_end_key(key) ? values[i + 1]
                                         : mean_of_finite(values[i], values[i + 1]));
    }
    values = std::move(halved);
  }
  folded_ *= 2;
}

void LiveRun::add_event(const char* file, std::string_view line) {
  Json row = parse_json<Json>(line.substr(0, kMaxEventText * 10));
  if (!row.is_object()) return;
  Json event{{"file", file}};
  std::string kind = file;
  if (row.contains("event") && row["event"].is_string()) kind = row["event"].get<std::string>();
  kind = kind.substr(0, 40);
  if (event_counts_.size() < kMaxEvents || event_counts_.contains(kind)) ++event_counts_[kind];
  event["event"] = kind;
  for (const char* key : {"rank", "step", "noticed_ms", "recovered_ms", "replacement", "time_s"}) {
    if (row.contains(key) && row[key].is_number()) event[key] = row[key];
  }
  std::string text;
  if (row.contains("cause") && row["cause"].is_string()) text = row["cause"].get<std::string>();
  if (text.empty()) {
    row.erase("event");
    text = dump_json(row);
  }
  event["text"] = text.substr(0, kMaxEventText);
  events_.push_back(std::move(event));
  if (events_.size() > kMaxEvents) events_.pop_front();
}

bool LiveRun::refresh() {
  const std::vector<std::string> before = std::exchange(problems_, {});
  bool has_changed = false;
  const auto read = [&](LineTail& tail, const std::function<void()>& clear,
                        const std::function<void(std::string_view)>& add) {
    try {
      const bool has_grown = tail.read(clear, add);
      has_changed |= has_grown;
      return has_grown;
    } catch (const IoError& error) {
      problems_.push_back(error.what());
      return false;
    }
  };
  if (read(
          steps_tail_, [this] { clear_steps(); },
          [this](std::string_view line) { add_step(line); })) {
    grown_ = std::chrono::steady_clock::now();
  }
  const auto read_events = [&](LineTail& tail, const char* file) {
    read(
        tail, [] {}, [this, file](std::string_view line) { add_event(file, line); });
  };
  read_events(events_tail_, "events");
  read_events(checks_tail_, "checks");
  read_events(injected_tail_, "injected");
  if (live_ranks_.refresh()) {
    ++ranks_version_;
    has_changed = true;
  }
  try {
    if (const std::string path = dir_ + "/config.toml"; !goal_ && path_exists(path)) {
      goal_ = read_goal_(read_small_file(path));
      has_changed = true;
    }
    if (const std::string path = dir_ + "/self_check.json";
        self_check_.is_null() && path_exists(path)) {
      self_check_ = parse_json<Json>(read_small_file(path));
      if (!self_check_.is_object()) self_check_ = Json::object();
      has_changed = true;
    }
  } catch (const Error& error) {
    problems_.push_back(error.what());
  }
  for (const std::string& problem : live_ranks_.problems()) problems_.push_back(problem);
  if (problems_.size() > kMaxLiveProblems) problems_.resize(kMaxLiveProblems);
  return has_changed || problems_ != before;
}

double LiveRun::last(const std::string& key) const {
  const std::vector<double>& values = curves_.at(key).values;
  const auto found = std::find_if(values.rbegin(), values.rend(),
                                  [](double value) { return std::isfinite(value); });
  return found == values.rend() ? std::nan("") : *found;
}

bool LiveRun::is_done() const {
  return path_exists(dir_ + "/final/config.json") && share() >= 1 - 1e-9;
}

/// Whether the model was written after the last step: steps do not add up to the run's seconds.
bool LiveRun::is_over_in_time() const {
  std::error_code unknown;
  const auto ended = std::filesystem::last_write_time(dir_ + "/final/config.json", unknown);
  if (unknown) return false;
  const auto stepped = std::filesystem::last_write_time(dir_ + "/metrics.jsonl", unknown);
  return !unknown && ended >= stepped;
}

double LiveRun::share() const {
  const double step = last("step");
  if (!goal_ || !std::isfinite(step)) return std::nan("");
  if (goal_->seconds > 0) {
    return is_over_in_time() ? 1 : std::min(1.0, elapsed_s_ / goal_->seconds);
  }
  if (goal_->tokens > 0) return std::min(1.0, tokens_ / double(goal_->tokens));
  return std::min(1.0, step / double(goal_->steps));
}

/// At the pace of the last point, or of the whole run.
double LiveRun::eta_s() const {
  const double share = this->share();
  if (!(share > 0)) return std::nan("");
  if (!goal_->ends_by_steps()) return elapsed_s_ * (1 - share) / share;
  return (double(goal_->steps) - last("step")) * last("step_ms") / 1e3;
}

Json LiveRun::curves() const {
  Json series;
  for (const char* key : kCurveKeys) {
    Json values = Json::array();
    for (const double value : curves_.at(key).values) values.push_back(number_or_null(value));
    series[key] = std::move(values);
  }
  return {{"name", report::name_of_run(dir_)},
          {"series", std::move(series)},
          {"validation_unit", validation_unit_},
          {"problems", problems_}};
}

Json LiveRun::state() const {
  Json curves = this->curves(), latest;
  for (const char* key : kCurveKeys) latest[key] = number_or_null(last(key));
  const std::chrono::duration<double> idle = std::chrono::steady_clock::now() - grown_;
  const bool has_steps = goal_ && goal_->ends_by_steps();
  return {{"name", std::move(curves["name"])},
          {"layout", goal_ ? Json(goal_->layout) : Json()},
          {"state", is_done()                           ? "done"
                    : curves_.at("step").values.empty() ? "waiting"
                                                        : "running"},
          {"step", latest["step"]},
          {"steps", has_steps ? Json(goal_->steps) : Json()},
          {"share", number_or_null(share())},
          {"eta_s", number_or_null(eta_s())},
          {"idle_s", std::round(idle.count())},
          {"last", std::move(latest)},
          {"series", std::move(curves["series"])},
          {"validation_unit", validation_unit_},
          {"events", events_},
          {"event_counts", event_counts_},
          {"self_check", self_check_},
          {"problems", problems_},
          {"ranks_version", ranks_version_}};
}

Json LiveRun::ranks() const {
  const std::vector<RankHistory> histories = live_ranks_.histories();
  Json all{{"version", ranks_version_}, {"map", rank_map(histories)}};
  all.update(rank_state(histories, goal_.value_or(RunGoal()), sent_));
  return all;
}

std::string LiveRun::metrics() const {
  std::string text;
  const auto begin = [&](const char* name, const char* type, const char* help) {
    text += fmt::format("# HELP tandem_{0} {2}\n# TYPE tandem_{0} {1}\n", name, type, help);
  };
  const auto gauge = [&](const char* name, double value, const char* help) {
    if (!std::isfinite(value)) return;
    begin(name, "gauge", help);
    text += fmt::format("tandem_{} {}\n", name, value);
  };
  gauge("step", last("step"), "Last finished step.");
  gauge("progress_ratio", share(), "Share of the run that is done.");
  gauge("eta_seconds", eta_s(), "Time until the end at the present pace.");
  gauge("loss", last("loss"), "Training loss, nats per token.");
  gauge("validation_loss", last("validation_loss"),
        "Loss on held-out data, nats per byte of text or per token.");
  gauge("learning_rate", last("lr"), "Learning rate.");
  gauge("gradient_norm", last("grad_norm"), "Norm of the gradients before they are clipped.");
  gauge("tokens_per_second", last("tokens_per_s"), "Tokens of all ranks per second.");
  gauge("step_seconds", last("step_ms") / 1e3, "Time of a step.");
  gauge("mfu_ratio", last("mfu"), "Model FLOPs utilization.");
  gauge("memory_bytes", last("memory_bytes"), "Memory in use on a rank, largest.");
  gauge("saved_step", last("saved_step"), "Newest checkpoint on disk.");
  const std::vector<RankHistory> histories = live_ranks_.histories();
  gauge("ranks", double(histories.size()), "Ranks with records.");
  if (!histories.empty())
    begin("phase_seconds", "gauge", "Time of a phase in a step, mean of ranks.");
  for (size_t p = 0; p < kPhases && !histories.empty(); ++p) {
    double ms = 0;
    for (const RankHistory& history : histories) ms += latest_frame(history).phases[p];
    text += fmt::format("tandem_phase_seconds{{phase=\"{}\"}} {}\n", name_of(Phase(p)),
                        ms / 1e3 / double(histories.size()));
  }
  if (!event_counts_.empty()) begin("events_total", "counter", "Events of the run.");
  for (const auto& [kind, count] : event_counts_) {
    std::string label;
    for (const char c : kind) {
      if (c == '"' || c == '\\') label += '\\';
      label += c == '\n' ? ' ' : c;
    }
    text += fmt::format("tandem_events_total{{event=\"{}\"}} {}\n", label, count);
  }
  return text;
}

}  // namespace tandem::report
