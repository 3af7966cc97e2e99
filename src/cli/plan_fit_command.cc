#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/result_output.h"
#include "cli/usage.h"
#include "core/system/json.h"
#include "core/system/printable.h"
#include "engine/plan/fit/prediction.h"
#include "engine/plan/plan_search.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

using Json = nlohmann::ordered_json;

struct FitOptions {
  std::string fit, predict, leave_out, where, fit_where;
  ResultOutput output;
};

/// Rows of a file; those that a later calibration cannot use because of their GPU are skipped.
std::vector<plan::RunRow> load_rows(const std::string& path) {
  std::vector<plan::RunRow> rows = plan::read_rows(path);
  for (plan::RunRow& row : rows) {
    if (row.skipped.empty() && !plan::find_gpu(row.gpu))
      row.skipped = fmt::format("gpu {} is not known", printable(row.gpu));
  }
  return rows;
}

std::vector<plan::RunRow> selected(const std::vector<plan::RunRow>& rows,
                                   const std::string& conditions, const char* option) {
  const plan::RowFilter filter(conditions);
  std::vector<plan::RunRow> matching;
  std::ranges::copy_if(rows, std::back_inserter(matching),
                       [&](const plan::RunRow& row) { return filter.matches(row); });
  if (matching.empty())
    throw InvalidArgument(fmt::format("{} {}: no row matches", option, printable(conditions)));
  return matching;
}

Json shares(const plan::StepTime& time) {
  const auto share = [&](double seconds) { return std::round(1e4 * seconds / time.total) / 1e4; };
  return {{"compute", share(time.compute)},     {"tp", share(time.exposed_tp)},
          {"cp", share(time.exposed_cp)},       {"ep", share(time.exposed_ep)},
          {"pp", share(time.exposed_pp)},       {"imbalance", share(time.imbalance)},
          {"bubble", share(time.bubble)},       {"dp", share(time.exposed_dp)},
          {"optimizer", share(time.optimizer)}, {"fixed", share(time.fixed)},
          {"jitter", share(time.jitter)}};
}

double error_percent(const plan::Prediction& prediction) {
  return 100 * (prediction.time.total / *prediction.row->step_s - 1);
}

Json to_json(const plan::Prediction& prediction) {
  const plan::RunRow& row = *prediction.row;
  Json json{{"id", row.id}, {"model", row.model}};
  json["step_s"] = row.step_s ? Json(*row.step_s) : Json();
  json["predicted_s"] = prediction.time.total;
  json["error_percent"] = row.step_s ? Json(error_percent(prediction)) : Json();
  if (row.step_derived && row.step_s) json["step_derived"] = true;
  json["constant_flops_s"] = prediction.constant_flops_s;
  json["line_s"] = prediction.line_s ? Json(*prediction.line_s) : Json();
  json["memory_gib"] = row.memory_gib > 0 ? Json(row.memory_gib) : Json();
  json["predicted_memory_gib"] = prediction.memory_gib;
  json["shares"] = shares(prediction.time);
  return json;
}

void add_errors(Json& json, const std::string& prefix, const plan::Errors& errors) {
  json[prefix + "mape"] = errors.rows > 0 ? Json(errors.mape) : Json();
  json[prefix + "worst"] = errors.rows > 0 ? Json(errors.worst) : Json();
}

Json fits_json(const plan::Calibration& calibration) {
  Json fits = Json::object();
  for (const auto& [name, fit] : calibration.fits()) {
    Json deviations = Json::object();
    for (const auto& [key, value] : fit.deviations) deviations[key] = value;
    fits[name] = {{"rows", fit.rows},
                  {"models", fit.models},
                  {"effective_parameters", fit.parameters},
                  {"median_tflops", fit.flops_rate / 1e12},
                  {"deviations", std::move(deviations)}};
  }
  return fits;
}

Json to_json(const plan::Predictions& predictions, const std::string& split,
             const plan::Calibration& calibration) {
  Json json{{"split", split}, {"rows", Json::array()}};
  for (const plan::Prediction& row : predictions.rows) json["rows"].push_back(to_json(row));
  add_errors(json, "", predictions.model_errors());
  add_errors(json, "constant_flops_", predictions.constant_flops_errors());
  const plan::Errors line = predictions.line_errors();
  add_errors(json, "line_", line);
  json["line_rows"] = line.rows;
  add_errors(json, "memory_", predictions.memory_errors());
  json["skipped"] = Json::array();
  for (const plan::RunRow* row : predictions.skipped)
    json["skipped"].push_back({{"id", row->id}, {"reason", row->skipped}});
  json["fits"] = fits_json(calibration);
  return json;
}

std::string errors_text(const plan::Errors& errors) {
  return fmt::format("{:.1f} % (worst {:.1f})", errors.mape, errors.worst);
}

/// A line for each model: mean and range of errors.
std::string by_model(const plan::Predictions& predictions) {
  std::map<std::string, plan::Predictions> models;
  for (const plan::Prediction& row : predictions.rows) models[row.row->model].rows.push_back(row);
  std::string text =
      "| model | rows | mean error, % | MAPE, % | worst, % | constant FLOP/s, % |\n"
      "| --- | --- | --- | --- | --- | --- |\n";
  for (const auto& [model, rows] : models) {
    const plan::Errors errors = rows.model_errors();
    double mean = 0;
    for (const plan::Prediction& row : rows.rows) {
      if (row.row->step_s) mean += error_percent(row) / double(errors.rows);
    }
    text += fmt::format("| {} | {} | {:+.1f} | {:.1f} | {:.1f} | {:.1f} |\n", single_line(model),
                        errors.rows, mean, errors.mape, errors.worst,
                        rows.constant_flops_errors().mape);
  }
  return text;
}

std::string describe(const plan::Predictions& predictions, const std::string& split) {
  const plan::Errors errors = predictions.model_errors(), line = predictions.line_errors();
  std::string text = by_model(predictions);
  text += fmt::format("\nsplit           {}\n", split);
  text += fmt::format("rows            {} with a step time, {} predicted, {} skipped\n",
                      errors.rows, predictions.rows.size(), predictions.skipped.size());
  if (errors.rows == 0) return text;
  text += fmt::format("MAPE            {}\n", errors_text(errors));
  text += fmt::format("constant FLOP/s {}\n", errors_text(predictions.constant_flops_errors()));
  if (line.rows > 0)
    text += fmt::format("straight line   {}, of {} rows\n", errors_text(line), line.rows);
  if (const plan::Errors memory = predictions.memory_errors(); memory.rows > 0)
    text += fmt::format("peak memory     {}, of {} rows\n", errors_text(memory), memory.rows);
  return text;
}

void run_fit(const FitOptions& options) {
  options.output.check();
  if (!options.leave_out.empty() && !options.predict.empty()) {
    throw InvalidArgument(
        "--leave-out and --predict: expected one of them (--leave-out predicts the rows of --fit)");
  }
  const std::vector<plan::RunRow> all = load_rows(options.fit);
  const auto fitted = selected(all, options.fit_where, "--fit-where");
  std::string split;
  std::vector<plan::RunRow> rows;
  plan::Predictions predictions;
  if (!options.leave_out.empty()) {
    selected(fitted, options.where, "--where");  // at least one
    predictions = plan::leave_out(fitted, options.leave_out, plan::RowFilter(options.where));
    split = fmt::format("every {} from the others", options.leave_out);
  } else {
    rows = options.predict.empty() ? all : load_rows(options.predict);
    rows = selected(rows, options.where, "--where");
    predictions = plan::predict_rows(fitted, rows);
    split = options.predict.empty() && options.where.empty() && options.fit_where.empty()
                ? "none: rows are predicted from a fit to themselves"
                : "rows of --predict from those of --fit";
  }
  std::vector<const plan::RunRow*> predicted;
  for (const plan::Prediction& row : predictions.rows) predicted.push_back(row.row);
  const plan::Calibration calibration(fitted, predicted);
  options.output.write_json(dump_json(to_json(predictions, split, calibration), 1) + "\n");
  if (options.output.shows_text()) fmt::print("{}", describe(predictions, split));
}

void require_search(const PlanSearchOptions& search, const FitOptions& options) {
  if (search.gpus == 0 || search.hardware.empty()) {
    throw InvalidArgument(fmt::format("{} is missing: tandem plan {} expects --gpus and --hardware",
                                      search.gpus == 0 ? "--gpus" : "--hardware",
                                      printable(search.subject)));
  }
  if (!options.predict.empty() || !options.leave_out.empty())
    throw InvalidArgument("--predict and --leave-out: expected without a model or job file");
}

/// Options of `tandem plan MODEL|CONFIG|FOLDER`.
void add_search_options(CLI::App& plan, PlanSearchOptions& search) {
  auto* subject = plan.add_option("model", search.subject,
                                  "Published model, job file (TOML) or folder of a model to plan");
  plan.option_defaults()->group("Layout of a model or job");
  const auto add = [&](const char* name, auto& value, const char* help) {
    return plan.add_option(name, value, help)->needs(subject);
  };
  add("--gpus", search.gpus, "Number of GPUs")->check(CLI::Range(1, 1 << 20));
  add("--hardware", search.hardware,
      "GPU (h100, a100, b200, …), or a TOML file: gpu, gpus_per_host, link.host, link.network "
      "(GB/s)")
      ->option_text("GPU|FILE");
  add("--tokens", search.tokens, "Tokens to train on, such as 1e12: days (default: train.tokens)")
      ->check(CLI::Range(1.0, 1e15));
  add("--price", search.price, "Price of a GPU for an hour: cost of the run")
      ->check(CLI::Range(1e-6, 1e6));
  add("--seq", search.seq, "Sequence length (default: the model's, at most 4096)")
      ->check(CLI::Range(1, 1 << 24));
  add("--batch", search.batch, "Sequences of a step (default: 4 Mi tokens, divided by the GPUs)")
      ->check(CLI::Range(1, 1 << 24));
  add_init_option(plan, search.init)->needs(subject);
  add("--out", search.out, "Write the job in its fastest layout to FILE")->option_text("FILE");
  add("--chakra", search.chakra,
      "Write execution traces of a step in the fastest layout to FOLDER, in the format of "
      "MLCommons Chakra");
  add("--page", search.page,
      "Write a page that shows the effect of other GPUs, links, memory and accuracy to FILE "
      "(HTML)");
  add("--accuracy", search.accuracy,
      "Max error of a wire format: lossless, a format whose error it is (int8, int4), or a "
      "percentage of a group's largest value")
      ->capture_default_str();
  add("--max-cp", search.max_cp,
      "Try context parallelism of up to N ranks, too, which trains on CPU ranks only: listed "
      "apart, "
      "or with --dp-formats among the others (default: parallel.cp)")
      ->check(CLI::Range(1, 4096));
  plan.add_flag("--dp-formats", search.dp_formats,
                "Search wire formats of gradients and weights, too; only CPU ranks take these")
      ->needs(subject);
  plan.add_flag("--all", search.all, "Print the layouts that are best in memory or error, too")
      ->needs(subject);
}

}  // namespace

void add_plan_fit(CLI::App& plan) {
  auto options = std::make_shared<FitOptions>();
  plan.option_defaults()->group("Step times of measured runs");
  auto* fit =
      plan.add_option("--fit", options->fit, "Calibrate the step cost on the runs in a CSV file");
  const auto add = [&](const char* name, std::string& value, const char* help) {
    return plan.add_option(name, value, help)->needs(fit);
  };
  add("--predict", options->predict,
      "Predict the step times of the runs in FILE (default: those of --fit)");
  add("--leave-out", options->leave_out,
      "Predict every run of --fit from those that differ in COLUMN, such as model");
  add("--where", options->where,
      "Predict only runs with these values, such as group=mosaic-mpt,gpu=H100,gpus<=512");
  add("--fit-where", options->fit_where, "Calibrate only on runs with these values");
  add_json_option(plan, options->output);
  auto search = std::make_shared<PlanSearchOptions>();
  add_search_options(plan, *search);
  plan.option_defaults()->group("Options");  // of subcommands
  plan.callback([&plan, options, search] {
    if (!plan.get_subcommands().empty()) return;
    if (!search->subject.empty()) {
      search->fit = options->fit;
      search->json = options->output.json;
      require_search(*search, *options);
      plan_layout(*search);
      return;
    }
    if (options->fit.empty()) {
      throw InvalidArgument(
          "tandem plan: expected one of schedule, placements, a model, a job file or --fit after "
          "it (see "
          "tandem plan --help)");
    }
    run_fit(*options);
  });
}

}  // namespace tandem::cli
