#include "engine/report/report_data.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <optional>
#include <vector>

#include "core/median.h"
#include "core/system/files.h"
#include "core/system/json.h"
#include "core/system/machine.h"
#include "core/system/process/processor_time.h"
#include "core/version.h"
#include "engine/report/ranks/load_map.h"
#include "engine/report/ranks/rank_map.h"
#include "engine/report/ranks/rank_state.h"
#include "engine/report/trace/step_pairs.h"
#include "tandem/error.h"

namespace tandem::report {
namespace {

namespace fs = std::filesystem;

std::optional<std::string> read(const fs::path& file) {
  if (!path_exists(file)) return std::nullopt;
  try {
    return read_file(file, Source::no_link);
  } catch (const IoError& error) {
    throw IoError(fmt::format("report: {}", error.what()));
  }
}

// Throws IoError naming `place`.
Json parsed(std::string_view text, const std::string& location) {
  Json json = parse_json<Json>(text);
  if (!json.is_discarded()) return json;
  throw IoError(
      fmt::format("report: {}: not JSON, or nested more than {} deep", location, kMaxJsonDepth));
}

// Converts exceptions of `body` about a JSON value to IoError naming `place`.
template <typename Body>
auto naming(const std::string& location, Body&& body) {
  try {
    return body();
  } catch (const nlohmann::json::exception& error) {
    throw IoError(fmt::format("report: {}: {}", location, error.what()));
  }
}

struct Metrics {
  std::vector<double> step, loss, tokens_per_s, step_ms, gemm_ms, compute_ms, exposed_comm_ms;
  std::vector<double> validation_loss, lr, grad_norm, mfu;
  std::vector<double> aux_loss, imbalance;  // MoE only; of the layer with the fullest expert
  std::vector<double> last_imbalance;       // by layer, of the last step
  std::string validation_unit;              // byte or token; "" if no row says
  LoadMap load;
  SentBytes sent;  // of the last step
};

// Missing numbers are NaN.
Metrics read_metrics(const fs::path& file) {
  const auto text = read(file);
  if (!text) {
    throw IoError(fmt::format("report: {}: not found, expected what `tandem train` writes there",
                              file.string()));
  }
  Metrics metrics;
  size_t line_number = 0;
  for (size_t begin = 0; begin < text->size();) {
    const size_t end = std::min(text->find('\n', begin), text->size());
    const std::string_view line(text->data() + begin, end - begin);
    begin = end + 1;
    ++line_number;
    if (line.empty()) continue;
    const std::string location = fmt::format("{}:{}", file.string(), line_number);
    naming(location, [&] {
      const Json row = parsed(line, location);
      const auto number = [&](const char* key) {
        return row.contains(key) && !row[key].is_null() ? row[key].get<double>() : std::nan("");
      };
      metrics.step.push_back(row.at("step").get<double>());
      metrics.loss.push_back(row.at("loss").is_null() ? std::nan("") : number("loss"));
      metrics.tokens_per_s.push_back(number("tokens_per_s"));
      metrics.validation_loss.push_back(number("validation_loss"));
      metrics.validation_unit = row.value("validation_unit", metrics.validation_unit);
      metrics.lr.push_back(number("lr"));
      metrics.grad_norm.push_back(number("grad_norm"));
      const double mfu = number("mfu");  // above 1 in older files: of a peak that was too low
      metrics.mfu.push_back(mfu > 1 ? std::nan("") : mfu);
      metrics.aux_loss.push_back(number("aux_loss"));
      metrics.last_imbalance = row.value("expert_imbalance", std::vector<double>());
      metrics.imbalance.push_back(metrics.last_imbalance.empty()
                                      ? std::nan("")
                                      : *std::ranges::max_element(metrics.last_imbalance));
      if (row.contains("expert_rows")) {
        metrics.load.add(metrics.step.back(),
                         row["expert_rows"].get<std::vector<std::vector<double>>>());
      }
      metrics.sent.set(row);
      metrics.gemm_ms.push_back(number("gemm_ms"));
      metrics.compute_ms.push_back(number("compute_ms"));
      metrics.exposed_comm_ms.push_back(number("exposed_comm_ms"));
      const double step_ms = number("step_ms");
      metrics.step_ms.push_back(std::isnan(step_ms)
                                    ? metrics.compute_ms.back() + metrics.exposed_comm_ms.back()
                                    : step_ms);
    });
  }
  if (metrics.step.empty()) {
    throw IoError(fmt::format("report: {}: is empty, expected one object a step", file.string()));
  }
  return metrics;
}

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

Json run_facts(const Json& run) {
  return {{"title", run.value("title", "Tandem training run")},
          {"command", run.value("command", "")},
          {"hardware", run.value("hardware", this_machine().describe())},
          {"date", run.value("date", today())},
          {"version", kVersion},
          {"commit", kCommit}};
}

Json to_array(const std::vector<double>& values) {
  Json array = Json::array();
  for (const double value : values) array.push_back(finite(value));
  return array;
}

}  // namespace

Json collect(const fs::path& dir, const GoalReader& read_goal) {
  const Metrics metrics = read_metrics(dir / "metrics.jsonl");
  const auto run_text = read(dir / "run.json");
  const Json run = run_text ? parsed(*run_text, (dir / "run.json").string()) : Json::object();
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

  if (const auto sample = read(dir / "sample.txt")) {
    summary["sample"] = {
        {"prompt", naming((dir / "run.json").string(), [&] { return run.value("prompt", ""); })},
        {"text", *sample}};
  } else {
    summary["sample"] = nullptr;
    omitted.push_back("sample (no sample.txt; tandem report --complete)");
  }
  const std::vector<RankHistory> histories = read_rank_records((dir / "ranks").string());
  RunGoal goal;
  if (const auto config = read(dir / "config.toml"); config && read_goal) goal = read_goal(*config);
  summary["omitted"] = std::move(omitted);
  return {{"summary", std::move(summary)},
          {"series",
           {{"step", to_array(metrics.step)},
            {"loss", to_array(metrics.loss)},
            {"validation_loss", to_array(metrics.validation_loss)},
            {"lr", to_array(metrics.lr)},
            {"grad_norm", to_array(metrics.grad_norm)},
            {"mfu", to_array(metrics.mfu)},
            {"aux_loss", to_array(metrics.aux_loss)},
            {"expert_imbalance", to_array(metrics.imbalance)},
            {"tokens_per_s", to_array(metrics.tokens_per_s)}}},
          {"experts", metrics.load.empty() ? Json() : Json(metrics.load.json())},
          {"ranks", rank_map(histories)},
          {"groups", histories.empty() ? Json() : rank_state(histories, goal, metrics.sent)},
          {"timelines", std::move(timelines)}};
}

}  // namespace tandem::report
