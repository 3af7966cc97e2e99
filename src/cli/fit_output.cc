#include "cli/fit_output.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/system/json.h"
#include "core/version.h"
#include "engine/report/page_text.h"
#include "engine/report/progress.h"

namespace tandem::cli {
namespace {

using Json = nlohmann::ordered_json;

Json to_json(const fit::FitPoint& point) {
  return {{"rounds", point.rounds},           {"floats_up", point.floats.up},
          {"floats_down", point.floats.down}, {"bytes_sent", point.bytes_sent},
          {"distance", point.distance},       {"objective", point.objective}};
}

Json config_json(const FitHeader& header, const FinishedFit& finished) {
  const fit::Problem& problem = header.problem;
  const fit::FitOptions& options = header.options;
  Json json{{"rows", problem.data().rows()},
            {"features", problem.features()},
            {"loss", options.loss == fit::Loss::squared ? "squared" : "logistic"},
            {"l1", problem.l1()},
            {"l2", problem.l2()}};
  if (std::isfinite(problem.kappa())) json["kappa"] = problem.kappa();
  json["clients"] = problem.clients();
  json["shuffle"] = options.shuffle;
  json["seed"] = options.seed;
  json["tol"] = options.tol;
  json["control"] = finished.is_control;
  for (const fit::Setting& setting : finished.run.settings) json[setting.name] = setting.value;
  json["ranks"] = header.ranks;
  if (!header.link.empty()) json["link"] = "emulated " + header.link;
  json["commit"] = kCommit;
  return json;
}

/// Features that the answer and the exact one use, and their accuracy on held-out rows.
void add_answer(Json& json, const FitHeader& header, const fit::Vector& answer) {
  if (answer.empty()) return;
  const fit::Vector& optimum = header.problem.optimum();
  const auto nonzeros = [](const fit::Vector& x) {
    return int64_t(x.size()) - std::ranges::count(x, 0.0);
  };
  json["nonzeros"] = nonzeros(answer);
  json["optimal_nonzeros"] = nonzeros(optimum);
  if (!header.test) return;
  json["accuracy"] = fit::accuracy(*header.test, answer);
  json["optimal_accuracy"] = fit::accuracy(*header.test, optimum);
}

Json to_json(const FitHeader& header, const FinishedFit& finished) {
  const fit::FitRun& run = finished.run;
  Json json{{"method", finished.method->name}};
  json.update(to_json(run.last));
  if (run.bias > 0) json["bias"] = run.bias;
  json["optimum"] = header.problem.optimal_value();
  json["seconds"] = run.last.seconds;
  add_answer(json, header, run.answer);
  json["reached_tol"] = run.reached_tol;
  json["config"] = config_json(header, finished);
  json["history"] = Json::array();
  for (const fit::FitPoint& point : run.history) {
    json["history"].push_back(to_json(point));
    json["history"].back()["seconds"] = point.seconds;
  }
  return json;
}

Json runs_json(const FitHeader& header, const std::vector<FinishedFit>& finished) {
  Json all = Json::array();
  for (const FinishedFit& each : finished) all.push_back(to_json(header, each));
  return all;
}

}  // namespace

std::string fit_json(const FitHeader& header, const std::vector<FinishedFit>& finished) {
  const Json all = runs_json(header, finished);
  return dump_json(all.size() == 1 ? all[0] : all, 1) + "\n";
}

std::string fit_page(const FitHeader& header, const std::vector<FinishedFit>& finished) {
  std::string data = dump_json(runs_json(header, finished));
  for (size_t at = 0; (at = data.find('<', at)) != std::string::npos;)
    data.replace(at, 1, "\\u003c");
  return tandem::fit_page(data);
}

std::string fit_table(const FitHeader& header, const std::vector<FinishedFit>& finished) {
  const fit::Problem& problem = header.problem;
  std::string text = fmt::format(
      "{} rows, {} features, {} clients on {} ranks{}; optimum {:.10g}\n\n"
      "| method | rounds | floats up | floats down | bytes sent | distance | seconds |\n"
      "| --- | --- | --- | --- | --- | --- | --- |\n",
      problem.data().rows(), problem.features(), problem.clients(), header.ranks,
      header.link.empty() ? "" : ", emulated " + header.link, problem.optimal_value());
  for (const auto& [method, is_control, run] : finished) {
    const fit::FitPoint& last = run.last;
    text +=
        fmt::format("| {}{} | {} | {} | {} | {} | {:.2e} | {:.3g} |\n", method->name,
                    is_control ? " (control)" : "", last.rounds, last.floats.up, last.floats.down,
                    format_bytes(double(last.bytes_sent)), last.distance, last.seconds);
  }
  return text;
}

}  // namespace tandem::cli
