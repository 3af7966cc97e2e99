#include "engine/report/runs.h"

#include <set>

#include "core/system/json.h"

namespace tandem::report {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

std::string name_of_run(const fs::path& dir) {
  const fs::path path = dir.lexically_normal();
  return (path.has_filename() ? path : path.parent_path()).string();
}

void check_runs(std::span<const fs::path> dirs) {
  if (dirs.size() > kMaxRuns) {
    throw InvalidArgument(
        fmt::format("report: {} folders: expected at most {}", dirs.size(), kMaxRuns));
  }
  std::set<std::string> names;
  for (const fs::path& dir : dirs) {
    if (!names.insert(name_of_run(dir)).second) {
      throw InvalidArgument(
          fmt::format("report: {} is given twice: expected different runs", dir.string()));
    }
  }
}

Json describe_run(const fs::path& dir, const Metrics& metrics, const RunGoal& goal) {
  const std::string started = (dir / "started.json").string();
  const auto text = read_if_there(started);
  Json settings = Json::object(), defaults = Json::object();
  for (const auto& [key, value, usual] : goal.settings) {
    settings[key] = value;
    defaults[key] = usual;
  }
  return {{"name", name_of_run(dir)},
          {"series",
           {{"step", to_array(metrics.step)},
            {"tokens", to_array(metrics.tokens)},
            {"elapsed_s", to_array(metrics.elapsed_s)},
            {"loss", to_array(metrics.loss)},
            {"validation_loss", to_array(metrics.validation_loss)},
            {"lr", to_array(metrics.lr)},
            {"grad_norm", to_array(metrics.grad_norm)},
            {"mfu", to_array(metrics.mfu)},
            {"aux_loss", to_array(metrics.aux_loss)},
            {"expert_imbalance", to_array(metrics.imbalance)},
            {"tokens_per_s", to_array(metrics.tokens_per_s)}}},
          {"validation_unit", metrics.validation_unit},
          {"parameters", goal.parameters > 0 ? Json(goal.parameters) : Json()},
          {"started", text ? parse_named(*text, started) : Json()},
          {"settings", std::move(settings)},
          {"defaults", std::move(defaults)}};
}

Json differing_settings(const Json& runs) {
  Json usual = Json::object();  // of every key that a run sets, in order
  for (const Json& run : runs) {
    for (const auto& [key, value] : run.at("defaults").items()) usual[key] = value;
  }
  Json differing = Json::array();
  for (const auto& [key, value] : usual.items()) {
    Json values = Json::array();
    std::set<std::string> known;
    for (const Json& run : runs) {
      const bool is_known = !run.at("parameters").is_null();
      values.push_back(is_known ? Json(run.at("settings").value(key, value)) : Json());
      if (is_known) known.insert(dump_json(values.back()));
    }
    if (known.size() > 1) differing.push_back({{"key", key}, {"values", std::move(values)}});
  }
  return differing;
}

}  // namespace tandem::report
