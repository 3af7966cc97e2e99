// State of a run while it trains, from the files that it appends to: what the live page shows. It
// needs nothing of the processes that train, and its memory is bounded.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/report/line_tail.h"
#include "engine/report/ranks/live_ranks.h"
#include "engine/report/run_goal.h"
#include "engine/report/sent_bytes.h"

namespace tandem::report {

class LiveRun {
 public:
  using Json = nlohmann::ordered_json;

  /// `dir`: OUT of the run, which need not be there yet.
  LiveRun(std::string dir, GoalReader read_goal);

  /// Reads what was written since the last call. Returns whether anything has changed.
  bool refresh();

  /// Progress, curves (at most 1,024 points), events (the last 100), the self-check and problems:
  ///   {"name", "layout", "state": "waiting" | "running" | "done", "step", "steps", "share",
  ///    "eta_s", "idle_s", "last": {loss, …}, "series": {"step": […], "loss": […], …},
  ///    "events": [{"file", …}], "event_counts": {"lost": n}, "self_check", "problems": […],
  ///    "ranks_version"}
  /// `share`, `steps` and `eta_s` are null if not known.
  Json state() const;
  /// Name, curves and problems: {"name", "series", "validation_unit", "problems"} of state().
  Json curves() const;
  /// rank_state's, and {"version", "map": rank_map's or null}.
  Json ranks() const;
  /// Text of the Prometheus exposition format, version 0.0.4.
  std::string metrics() const;

 private:
  struct Curve {
    std::vector<double> values;  ///< NaN: missing
  };
  void clear_steps();
  void add_step(std::string_view line);
  void fold_steps();
  void add_event(const char* file, std::string_view line);
  bool is_done() const;
  bool is_over_in_time() const;
  /// Share of the run that is done, and seconds until its end; NaN if not known.
  double share() const;
  double eta_s() const;
  double last(const std::string& key) const;

  std::string dir_;
  LineTail steps_tail_, events_tail_, checks_tail_, injected_tail_;
  LiveRanks live_ranks_;
  GoalReader read_goal_;
  std::optional<RunGoal> goal_;  // once config.toml is there
  Json self_check_;
  std::map<std::string, Curve> curves_;  // by key of metrics.jsonl
  std::string validation_unit_ = "byte";
  SentBytes sent_;        // of the last step
  int64_t folded_ = 1;    // steps of a point
  int64_t in_point_ = 0;  // steps of the last point so far
  double elapsed_s_ = 0, tokens_ = 0;
  std::deque<Json> events_;
  std::map<std::string, int64_t> event_counts_;
  std::vector<std::string> problems_;
  std::chrono::steady_clock::time_point grown_;
  int64_t ranks_version_ = 0;
};

}  // namespace tandem::report
