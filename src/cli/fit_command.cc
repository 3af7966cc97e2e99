#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/devices.h"
#include "cli/fit_output.h"
#include "cli/result_output.h"
#include "core/system/console.h"
#include "core/system/files.h"
#include "core/system/output.h"
#include "engine/report/progress.h"
#include "fit/fit.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

constexpr int kNotReached = 1;  // exit code
constexpr int kMaxClients = 4096;
constexpr double kDeadlineS = 3600;  ///< a rank that solves its clients' problems is not lost

struct FitArguments {
  std::string data, loss = "logistic", l2 = "0", codec, link, out, test;
  ResultOutput output;
  std::vector<std::string> methods{"scaffnew"}, failures;
  bool control = false;
  WorldOptions world;
  fit::FitOptions options;
};

/// Refuses NaN, which passes the ranges of options.
void check_finite(const fit::FitOptions& options) {
  const std::pair<const char*, double> values[] = {
      {"--l1", options.l1}, {"--tol", options.tol}, {"--step", options.step.value_or(1)}};
  for (const auto& [name, value] : values) {
    if (!std::isfinite(value))
      throw InvalidArgument(fmt::format("{} {}: expected a finite number", name, value));
  }
}

std::vector<const fit::MethodRow*> read_options(FitArguments& arguments) {
  fit::FitOptions& options = arguments.options;
  check_finite(options);
  options.loss = arguments.loss == "squared" ? fit::Loss::squared : fit::Loss::logistic;
  options.l2 = fit::L2::parse(arguments.l2);
  if (!arguments.codec.empty()) options.codec = Wire::parse(arguments.codec);
  if (!arguments.link.empty()) arguments.world.link = EmulatedLink::parse(arguments.link);
  for (const std::string& failure : arguments.failures)
    options.failures.push_back(fit::Failure::parse(failure));
  std::vector<const fit::MethodRow*> rows;
  for (const std::string& name : arguments.methods) rows.push_back(&fit::find_method(name));
  fit::check_options(rows, options);
  if (!arguments.test.empty() && options.loss != fit::Loss::logistic)
    throw InvalidArgument("--test: accuracy is that of classes: expected --loss logistic");
  const auto has_control = [](const fit::MethodRow* row) { return row->control != nullptr; };
  if (arguments.control && std::ranges::none_of(rows, has_control))
    throw InvalidArgument(fmt::format("--control: {} has none", rows.front()->name));
  if (const int ranks = count_ranks(arguments.world); ranks > options.clients) {
    throw InvalidArgument(
        fmt::format("--clients {}: {} ranks: expected a client for each", options.clients, ranks));
  }
  return rows;
}

/// Held-out rows of --test, with the classes of `data`.
std::optional<fit::Dataset> read_test(const FitArguments& arguments, const fit::Dataset& data) {
  if (arguments.test.empty()) return std::nullopt;
  fit::Dataset test = fit::read_libsvm(arguments.test);
  fit::make_classes(test, fit::find_classes(data, arguments.data), arguments.test);
  return test;
}

/// Digest of the rows, by which processes tell whether they have read the same.
std::string digest(const fit::Dataset& data) {
  return content_hash(std::as_bytes(std::span(data.labels))) + "-" +
         content_hash(std::as_bytes(std::span(data.offsets))) + "-" +
         content_hash(std::as_bytes(std::span(data.columns))) + "-" +
         content_hash(std::as_bytes(std::span(data.values)));
}

/// Options on which messages depend, as they were given; of a graph's file its digest.
std::string describe_options(const FitArguments& arguments) {
  const fit::FitOptions& o = arguments.options;
  std::string text = fmt::format(
      "--method {} --loss {} --l1 {} --l2 {} --clients {} --seed {} --tol {} --max-rounds {}",
      fmt::join(arguments.methods, ","), arguments.loss, o.l1, arguments.l2, o.clients, o.seed,
      o.tol, o.max_rounds);
  const auto add = [&](const char* name, const auto& value) {
    if (value) text += fmt::format(" {} {}", name, *value);
  };
  add("--p", o.p);
  add("--step", o.step);
  add("--sparsity", o.sparsity);
  add("--cohort", o.cohort);
  add("--tokens", o.tokens);
  add("--tau", o.tau);
  add("--graph", o.graph);
  if (o.graph && std::filesystem::exists(*o.graph)) {
    const std::string edges = read_file(*o.graph);
    text += " (" + content_hash(std::as_bytes(std::span(edges))) + ")";
  }
  if (!arguments.codec.empty()) text += " --codec " + arguments.codec;
  for (const std::string& failure : arguments.failures) text += " --fail " + failure;
  if (o.shuffle) text += " --shuffle";
  if (o.async) text += " --async";
  if (arguments.control) text += " --control";
  return text;
}

/// Runs the methods in turn, each from the start; on other processes than rank 0's returns none.
std::vector<FinishedFit> run_methods(const FitArguments& arguments, const fit::Problem& problem,
                                     const std::vector<const fit::MethodRow*>& rows) {
  std::vector<FinishedFit> finished;
  run_world(arguments.world, [&](Communicator& comm) {
    if (!std::getenv("TANDEM_DEADLINE_S")) comm.set_deadline(kDeadlineS);
    comm.require_same("options", describe_options(arguments));
    comm.require_same("digest of the rows", digest(problem.data()));
    std::optional<ProgressLine> progress;
    if (comm.rank() == 0) progress.emplace();
    for (const fit::MethodRow* row : rows) {
      const auto report = [&](const fit::FitPoint& point) {
        progress->meanwhile(fmt::format("{}  round {}/{}  distance {:.2e}  {}", row->name,
                                        point.rounds, arguments.options.max_rounds, point.distance,
                                        format_bytes(double(point.bytes_sent))));
      };
      for (const bool control : {false, true}) {
        if (control && !(arguments.control && row->control)) continue;
        fit::FitOptions options = arguments.options;
        options.control = control;
        fit::FitRun run = run_method(comm, problem, *row, options, report);
        if (comm.rank() == 0) finished.push_back({row, control, std::move(run)});
      }
    }
  });
  return finished;
}

/// Says which methods have missed the tolerance, and returns whether one has. Controls should.
bool print_unreached(const std::vector<FinishedFit>& finished, double tol) {
  bool found = false;
  for (const auto& [method, control, run] : finished) {
    if (run.reached_tol || control) continue;
    found = true;
    complain(
        fmt::format("tandem fit: {} reached distance {:.3g} in {} rounds: expected {:g} (--tol)",
                    method->name, run.last.distance, run.last.rounds, tol));
  }
  return found;
}

void run(FitArguments& arguments) {
  arguments.output.check();
  const std::vector<const fit::MethodRow*> rows = read_options(arguments);
  if (!arguments.out.empty()) make_directories(arguments.out);
  now_doing("solving " + arguments.data);
  fit::Dataset data = fit::read_libsvm(arguments.data);
  const std::optional<fit::Dataset> test = read_test(arguments, data);
  const fit::Problem problem(std::move(data), arguments.data, arguments.options);
  const std::vector<FinishedFit> finished = run_methods(arguments, problem, rows);
  if (finished.empty()) return;
  const FitHeader header{problem, arguments.options, count_ranks(arguments.world), arguments.link,
                         test ? &*test : nullptr};
  arguments.output.write_json(fit_json(header, finished));
  if (!arguments.out.empty()) {
    const std::string path = (std::filesystem::path(arguments.out) / "fit.html").string();
    write_output(path, fit_page(header, finished));
  }
  if (arguments.output.shows_text()) fmt::print("{}", fit_table(header, finished));
  finish_output();
  if (print_unreached(finished, arguments.options.tol)) throw Ended{kNotReached};
}

std::string footer() {
  std::string text = "\nMethods, and the options that only some of them read:\n";
  for (const fit::MethodRow& row : fit::methods()) {
    std::vector<const char*> names;
    for (const fit::OptionRow* option : row.reads) names.push_back(option->name);
    if (row.takes_l1) names.push_back("--l1");
    text +=
        fmt::format("  {:<20} {}\n  {:<20} {}\n", row.name, row.summary, "", fmt::join(names, " "));
    if (row.control) text += fmt::format("  {:<20} --control: {}\n", "", row.control);
  }
  return text +
         "\nThe data's rows are split over the clients in file order. The same program first "
         "computes\nthe exact answer; distance is |x - answer| / |answer|. Floats are those of the "
         "busiest\nclient, 8 bytes each. Results do not depend on the number of ranks, except with "
         "--async.\nExit code 1: --tol was not reached.\n"
         "\nExamples:\n"
         "  tandem fit data.svm --l2 auto:kappa=100 --method gd,scaffnew --clients 8\n"
         "  tandem fit data.svm --l2 0.01 --method tamuna --cohort 4 --tol 1e-6 --ranks 2 --json "
         "-\n"
         "  mpirun -n 2 tandem fit data.svm --l2 0.01 --method scaffnew";
}

void add_problem_options(CLI::App& command, FitArguments& arguments) {
  fit::FitOptions& options = arguments.options;
  command.add_option("DATA", arguments.data, "Rows in LIBSVM format: label index:value ...")
      ->required();
  command.add_option("--loss", arguments.loss, "Loss of a row")
      ->check(CLI::IsMember({"logistic", "squared"}))
      ->capture_default_str();
  command.add_option("--l1", options.l1, "Weight of |x|_1")
      ->check(CLI::Range(0.0, 1e12))
      ->capture_default_str();
  command
      .add_option("--l2", arguments.l2,
                  "Weight of |x|^2 / 2, or the one that gives the clients condition number K")
      ->option_text("X|auto:kappa=K")
      ->capture_default_str();
  command.add_option("--clients", options.clients, "Logical clients, split over the ranks")
      ->check(CLI::Range(1, kMaxClients))
      ->capture_default_str();
  command.add_flag("--shuffle", options.shuffle,
                   "Permute the rows first, so that clients get samples that are alike");
  command.add_option("--seed", options.seed, "Seed of all random choices")->capture_default_str();
}

void add_method_options(CLI::App& command, FitArguments& arguments) {
  fit::FitOptions& options = arguments.options;
  command.add_option("--p", options.p,
                     "Probability that a local step is the last of its round (default: "
                     "sqrt(clients / (sparsity kappa)); scaffnew: 1/sqrt(kappa))");
  command.add_option("--step", options.step, "Step size, times the default")
      ->check(CLI::Range(1e-6, 1e6));
  command.add_option("--sparsity", options.sparsity,
                     "Clients that send a coordinate up in a round (default: a quarter of the "
                     "cohort, at least 2)");
  command.add_option("--cohort", options.cohort, "Clients in a round (default: a quarter)");
  command
      .add_option("--graph", options.graph,
                  "Neighbours of the clients: ring, torus, random4 (random, 4 of each) or a file "
                  "with two client numbers a line (default: ring)")
      ->option_text("NAME|FILE");
  command.add_option(
      "--codec", arguments.codec,
      "Wire format of what neighbours exchange: none or int8 to int2 (default: none)");
  command.add_option("--tokens", options.tokens, "Tokens that walk at a time (default: 1)");
  command.add_option("--tau", options.tau,
                     "Weight that ties clients to the tokens (default: the largest smoothness "
                     "constant of a client)");
  command.add_flag("--async", options.async,
                   "Tokens do not wait for each other: faster on several ranks, with results that "
                   "depend on timing");
  command.add_option("--fail", arguments.failures, "Client that takes no part in some rounds")
      ->option_text("CLIENT@FIRST[-LAST]")
      ->allow_extra_args(false)
      ->take_all();
  command.add_flag("--control", arguments.control,
                   "Also run each method without what makes it exact, which must fail");
}

}  // namespace

void add_fit(CLI::App& app) {
  auto* command =
      app.add_subcommand("fit", "Solve a convex problem on clients, and count what they send");
  auto arguments = std::make_shared<FitArguments>();
  fit::FitOptions& options = arguments->options;
  add_problem_options(*command, *arguments);
  command->add_option("--method", arguments->methods, "Methods to run, from the list below")
      ->option_text("METHOD,...")
      ->delimiter(',')
      ->capture_default_str();
  add_method_options(*command, *arguments);
  command->add_option("--tol", options.tol, "Distance to the exact answer to stop at")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--max-rounds", options.max_rounds, "Rounds to stop after")
      ->check(CLI::Range(int64_t(1), int64_t(1) << 40))
      ->capture_default_str();
  command->add_option("--ranks", arguments->world.ranks, "Ranks, as threads of this process")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  command->add_option("--link", arguments->link, "Emulate this link between ranks (1GB/s,20us)");
  command
      ->add_option("--test", arguments->test,
                   "Add the accuracy on the rows in FILE to the results (logistic loss)")
      ->option_text("FILE");
  add_json_option(*command, arguments->output);
  command->add_option("--out", arguments->out,
                      "Write a page that shows distance against bytes, rounds and seconds to "
                      "FOLDER/fit.html");
  command->footer(footer());
  command->callback([arguments] { run(*arguments); });
}

}  // namespace tandem::cli
