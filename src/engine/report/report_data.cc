#include "engine/report/report_data.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <functional>
#include <optional>
#include <vector>

#include "core/median.h"
#include "core/system/files.h"
#include "core/system/json.h"
#include "core/system/lines.h"
#include "core/system/machine.h"
#include "core/system/process/processor_time.h"
#include "core/version.h"
#include "engine/report/metrics_file.h"
#include "engine/report/ranks/rank_map.h"
#include "engine/report/ranks/rank_state.h"
#include "engine/report/receipts.h"
#include "engine/report/runs.h"
#include "engine/report/trace/step_pairs.h"
#include "tandem/error.h"

namespace tandem::report {
namespace {

namespace fs = std::filesystem;

// The first tenth, at least one of more than two steps.
size_t warm_up(size_t steps) {
  return steps > 2 ? std::max<size_t>(1, steps / 10) : 0;
}

// Median after the warm-up.
double typical(const std::vector<double>& values) {
  const size_t skip = warm_up(values.size());
  std::vector<double> finite_values;
  for (size_t i = skip; i < values.size(); ++i) {
    if (std::isfinite(values[i])) finite_values.push_back(values[i]);
  }
  if (finite_values.empty()) return std::nan("");
  return interpolated_median(std::move(finite_values));
}

Json finite(double value) {
  return std::isfinite(value) ? Json(value) : Json(nullptr);
}

// Last finite value; NaN if there is none.
double last_finite(const std::vector<double>& values) {
  const auto found = std::find_if(values.rbegin(), values.rend(),
                                  [](double value) { return std::isfinite(value); });
  return found == values.rend() ? std::nan("") : *found;
}

Json training(const Metrics& metrics, const Json& run) {
  const double step_ms = typical(metrics.step_ms), gemm_ms = typical(metrics.gemm_ms);
  Json result{{"steps", metrics.step.back()},
              {"final_loss", finite(metrics.loss.back())},
              {"tokens_per_s", finite(typical(metrics.tokens_per_s))},
              {"step_ms", finite(step_ms)},
              {"gemm_ms", finite(gemm_ms)},
              {"compute_ms", finite(typical(metrics.compute_ms))},
              {"exposed_comm_ms", finite(typical(metrics.exposed_comm_ms))},
              {"gemm_share", finite(gemm_ms / step_ms)},
              {"mfu", finite(typical(metrics.mfu))},
              {"validation_loss", finite(last_finite(metrics.validation_loss))}};
  if (!metrics.validation_unit.empty()) result["validation_unit"] = metrics.validation_unit;
  if (run.contains("tokens")) result["tokens"] = run["tokens"];
  if (!metrics.last_imbalance.empty()) result["expert_imbalance"] = metrics.last_imbalance;
  return result;
}

Json held_out(const Json& given) {
  const double bytes = given.at("bytes").get<double>();
  if (!(bytes > 0)) throw IoError("report: run.json: heldout.bytes: expected more than 0");
  Json result{{"files", given.at("files")},
              {"bytes", given.at("bytes")},
              {"model_bits_per_byte", given.at("model_bits_per_byte").get<double>()},
              {"compressors", Json::array()}};
  for (const Json& compressor : given.at("compressors")) {
    const double size = compressor.at("bytes").get<double>();
    result["compressors"].push_back({{"name", compressor.at("name").get<std::string>()},
                                     {"bytes", size},
                                     {"bits_per_byte", 8 * size / bytes}});
  }
  return result;
}

constexpr const char* kFormula =
    "E = 1 − ECT(overlapped) / ECT(serial): 100 % is all communication hidden, below 0 is slower "
    "than serial. ECT, the effective communication time, is the step less the shortest time any of "
    "the strategies needed without its exposed communication. Exposed communication is what "
    "computation had to wait for; rest is input and bookkeeping.";

/// Indices of consecutively timed steps of the two runs, after the warm-up.
std::vector<size_t> paired_steps(const Metrics& serial, const Metrics& overlapped) {
  const size_t all = std::min(serial.step.size(), overlapped.step.size());
  std::vector<size_t> pairs;
  for (size_t i = warm_up(all); i < all; ++i) {
    if (std::isfinite(serial.step_ms[i]) && std::isfinite(overlapped.step_ms[i]))
      pairs.push_back(i);
  }
  return pairs;
}

// Means over the same steps of one rank each: unlike medians, they add up.
Json split_row(const std::string& strategy, const Metrics& metrics,
               const std::vector<size_t>& steps) {
  const auto mean = [&](const std::vector<double>& values) {
    double sum = 0;
    for (const size_t i : steps) sum += values[i];
    return sum / double(steps.size());
  };
  const double step = mean(metrics.step_ms), gemm = mean(metrics.gemm_ms);
  const double compute = mean(metrics.compute_ms), exposed = mean(metrics.exposed_comm_ms);
  return {{"strategy", strategy},
          {"step_ms", finite(step)},
          {"gemm_ms", finite(gemm)},
          {"other_compute_ms", finite(std::max(0.0, compute - gemm))},
          {"exposed_comm_ms", finite(exposed)},
          {"rest_ms", finite(std::max(0.0, step - compute - exposed))}};
}

/// Sentence about what the numbers of pairs show.
std::string verdict(Shown shown, double chance) {
  const std::string often =
      fmt::format("chance alone gives as many in {:.2g} % of measurements", 100 * chance);
  switch (shown) {
    case Shown::faster:
      return often;
    case Shown::slower:
      return "slower today: " + often + " the other way";
    case Shown::nothing:
      break;
  }
  return fmt::format("not shown today: {} (shown: below {:g} %)", often, 100 * kChance);
}

/// Uses the half of the step pairs with the middle differences, so outliers do not decide.
Json step_split(const Metrics& serial, const Metrics& overlapped, const Json& run) {
  const Json others = run.value("others_share", Json());
  const auto gain = [&](size_t i) { return serial.step_ms[i] - overlapped.step_ms[i]; };
  std::vector<size_t> pairs = paired_steps(serial, overlapped);
  const auto faster = std::ranges::count_if(pairs, [&](size_t i) { return gain(i) > 0; });
  const auto slower = std::ranges::count_if(pairs, [&](size_t i) { return gain(i) < 0; });
  const size_t all = pairs.size(), outside = all / 4;
  std::ranges::stable_sort(pairs, [&](size_t a, size_t b) { return gain(a) < gain(b); });
  const std::vector<size_t> middle(pairs.begin() + ptrdiff_t(outside),
                                   pairs.end() - ptrdiff_t(outside));
  Json rows{split_row("serial", serial, middle), split_row("overlapped", overlapped, middle)};
  double busy = HUGE_VAL;
  for (const Json& row : rows) {
    for (const char* key : {"step_ms", "gemm_ms", "exposed_comm_ms"}) {
      if (row.at(key).is_null()) return nullptr;
    }
    busy = std::min(busy, row["step_ms"].get<double>() - row["exposed_comm_ms"].get<double>());
  }
  for (Json& row : rows) row["ect_ms"] = row["step_ms"].get<double>() - busy;
  const double before = rows[0]["ect_ms"].get<double>(), after = rows[1]["ect_ms"].get<double>();
  const Shown shown = compare_pairs(faster, slower);
  const double chance = chance_of_wins(std::max(faster, slower), faster + slower);
  return {{"link", run.value("link", "")},
          {"link_choice", run.value("link_choice", Json())},
          {"rows", std::move(rows)},
          {"pairs", all},
          {"pairs_overlapped_faster", faster},
          {"chance", chance},
          {"shown", shown != Shown::nothing},
          {"verdict", verdict(shown, chance)},
          {"compute_floor_ms", busy},
          {"efficiency", finite(before > 0 ? 1 - after / before : std::nan(""))},
          {"others_share", others},
          {"warning",
           others.is_number() && others.get<double>() >= kBusyShare
               ? Json(fmt::format("Other programs kept {:.0f} % of the processors busy while these "
                                  "steps were timed. Times and E are of a busy machine: measure "
                                  "again when it is idle.",
                                  100 * others.get<double>()))
               : Json()},
          {"formula", kFormula}};
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M UTC", &utc);
  return text;
}

/// [{"step", "text"}] of samples.jsonl, which `report --complete` writes.
Json samples_over_time(const fs::path& dir) {
  const std::string file = (dir / "samples.jsonl").string();
  Json samples = Json::array();
  for (const std::string_view line : Lines(read_if_there(file).value_or(""))) {
    samples.push_back(parse_named(line, file));
  }
  return samples;
}

/// Adds `others` to `runs`; the numbers of all, and what differs in their settings.
Json add_others(Json& runs, const Json& first, std::span<const fs::path> others,
                const std::function<RunGoal(const fs::path&)>& goal_of) {
  Json compared = Json::array({first});
  for (const fs::path& other : others) {
    const Metrics metrics = read_metrics(other / "metrics.jsonl");
    compared.push_back(training(metrics, Json::object()));
    runs.push_back(describe_run(other, metrics, goal_of(other)));
  }
  for (size_t i = 0; i < runs.size(); ++i) compared[i]["name"] = runs[i]["name"];
  return {{"runs", std::move(compared)}, {"settings", differing_settings(runs)}};
}

Json run_facts(const Json& run) {
  return {{"title", run.value("title", "Tandem training run")},
          {"command", run.value("command", "")},
          {"hardware", run.value("hardware", this_machine().describe())},
          {"date", run.value("date", today())},
          {"version", kVersion},
          {"commit", kCommit}};
}

}  // namespace

Json collect(const fs::path& dir, const GoalReader& read_goal, std::span<const fs::path> others) {
  const Metrics metrics = read_metrics(dir / "metrics.jsonl");
  const auto run_text = read_if_there(dir / "run.json");
  const Json run = run_text ? parse_named(*run_text, (dir / "run.json").string()) : Json::object();
  Json summary, omitted = Json::array(), timelines = Json::array();
  const std::string link = naming((dir / "run.json").string(), [&] {
    summary["run"] = run_facts(run);
    summary["training"] = training(metrics, run);
    if (run.contains("heldout")) {
      summary["held_out"] = held_out(run["heldout"]);
    } else {
      summary["held_out"] = nullptr;
      omitted.push_back(
          "held-out comparison (no heldout in run.json; tandem report --complete measures it)");
    }
    return run.value("link", "");
  });

  const fs::path split = dir / "split";
  const fs::path serial = split / "serial", overlapped = split / "overlapped";
  summary["step_split"] = nullptr;
  if (path_exists(serial / "metrics.jsonl") && path_exists(overlapped / "metrics.jsonl")) {
    summary["step_split"] = step_split(read_metrics(serial / "metrics.jsonl"),
                                       read_metrics(overlapped / "metrics.jsonl"), run);
    if (summary["step_split"].is_null()) {
      omitted.push_back("step-time split (split/*/metrics.jsonl lacks gemm_ms or exposed_comm_ms)");
    }
  } else {
    omitted.push_back(
        "step-time split (no split/serial and split/overlapped; tandem report --complete)");
  }

  const auto add_timeline = [&](const fs::path& file, const char* title, const std::string& on) {
    if (!path_exists(file)) return;
    const std::vector<RankEvents> ranks = read_trace(file, Source::no_link);
    Json timeline = layer_timeline(ranks);
    if (timeline["span_us"] == 0) return;
    timeline["step"] = ranks.front().step;
    timeline["title"] = title;
    timeline["link"] = on;
    timelines.push_back(std::move(timeline));
  };
  add_timeline(serial / "trace.json", "serial", link);
  add_timeline(overlapped / "trace.json", "overlapped", link);
  if (timelines.empty()) add_timeline(dir / "trace.json", "this run", "");
  if (timelines.empty()) omitted.push_back("timeline (no trace.json with events)");

  summary["receipts"] = read_receipts(dir.string());
  summary["overlap"] = describe_receipts(summary["receipts"]);

  if (const auto sample = read_if_there(dir / "sample.txt")) {
    summary["sample"] = {
        {"prompt", naming((dir / "run.json").string(), [&] { return run.value("prompt", ""); })},
        {"text", *sample}};
  } else {
    summary["sample"] = nullptr;
    omitted.push_back("sample (no sample.txt; tandem report --complete)");
  }
  const std::vector<RankHistory> histories = read_rank_records((dir / "ranks").string());
  const auto goal_of = [&](const fs::path& folder) {
    const auto config = read_if_there(folder / "config.toml");
    return config && read_goal ? read_goal(*config) : RunGoal();
  };
  const RunGoal goal = goal_of(dir);
  summary["omitted"] = std::move(omitted);
  Json runs = Json::array({describe_run(dir, metrics, goal)});
  if (!others.empty()) summary["compared"] = add_others(runs, summary["training"], others, goal_of);
  return {{"summary", std::move(summary)},
          {"runs", std::move(runs)},
          {"samples", samples_over_time(dir)},
          {"experts", metrics.load.empty() ? Json() : Json(metrics.load.json())},
          {"ranks", rank_map(histories)},
          {"groups", histories.empty() ? Json() : rank_state(histories, goal, metrics.sent)},
          {"timelines", std::move(timelines)}};
}

}  // namespace tandem::report
