#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include "cli/commands.h"
#include "core/system/console.h"
#include "core/system/files.h"
#include "core/system/output.h"
#include "core/system/printable.h"
#include "engine/plan/goal.h"
#include "engine/report/csv.h"
#include "engine/report/report.h"
#include "engine/report/runs.h"
#include "engine/report/tensorboard.h"
#include "engine/serve/http/live_server.h"
#include "engine/train/report_sections.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

void check_folder(const std::filesystem::path& path) {
  std::error_code unknown;  // path_exists reports it
  if (std::filesystem::is_directory(path, unknown)) return;
  const std::filesystem::path above = path.has_parent_path() ? path.parent_path() : ".";
  const bool file = path_exists(path), in_run = file && path_exists(above / "metrics.jsonl");
  throw IoError(fmt::format("report {}: {}: expected {}", path.string(),
                            file ? "a file" : "no such folder",
                            in_run ? "a folder: tandem report " + shell_quote(above.string())
                                   : "the folder that tandem train --out wrote"));
}

void write_tensorboards(const std::vector<std::string>& dirs) {
  for (const std::string& dir : dirs) {
    const auto [file, steps] = report::write_tensorboard(dir);
    fmt::print("Wrote {} steps to {}\n", steps, single_line(file));
  }
  finish_output();
}

struct LiveOptions {
  std::string address;
  int parent = 0;
};

}  // namespace

void add_report(CLI::App& app) {
  auto* command = app.add_subcommand("report", "Write charts and tables of a run as one HTML file");
  auto dirs = std::make_shared<std::vector<std::string>>();
  command
      ->add_option("DIR", *dirs,
                   "Folder that `tandem train --out` wrote; others after it are compared with it")
      ->required();
  auto complete = std::make_shared<bool>(false);
  auto options = std::make_shared<ReportSectionsOptions>();
  command->add_flag("--complete", *complete,
                    "First measure what is missing: held-out text against gzip and xz, a sample, "
                    "and the time of a step, serial and overlapped");
  command->add_option("--link", options->link,
                      "Link that step times emulate, with --complete (default: one whose transfers "
                      "take as long as the run's matrix products)");
  auto live = std::make_shared<LiveOptions>();
  command->add_option(
      "--live", live->address,
      "Serve a page of the run while it trains, instead (0: a free port; default host: 127.0.0.1)");
  command->add_option("--live-parent", live->parent)->group("");  // of the process that trains
  auto is_tensorboard = std::make_shared<bool>(false);
  command->add_flag(
      "--tensorboard", *is_tensorboard,
      "Write the steps' numbers to DIR/tensorboard, instead; tensorboard --logdir DIR shows them");
  auto csv = std::make_shared<std::string>();
  command
      ->add_option("--csv", *csv,
                   "Write the steps' numbers as CSV to FILE, instead (-: print them)")
      ->excludes("--live", "--tensorboard", "--complete");
  command->add_option("--prompt", options->prompt, "Prompt of the samples, with --complete");
  command->footer(
      "\nReads DIR/metrics.jsonl and what else is there (run.json, sample.txt, trace.json,\n"
      "split/{serial,overlapped}/); writes DIR/report.html, which opens offline, and\n"
      "DIR/summary.json. With --complete, in the folder in which the training was started: a\n"
      "run of your own gets the report that `make run` makes.\n"
      "\nSeveral folders: curves of all runs in the first one's page, and the settings that "
      "differ.\n"
      "\n--live: progress, curves, ranks and their groups, links, faults; Prometheus text at\n"
      "/metrics. It reads the files of the run as they grow, and needs nothing of its processes.\n"
      "\nExamples:\n"
      "  tandem report out                 after `make run`\n"
      "  tandem report out/mine --live 8080\n"
      "  tandem report out/mine out/other  curves of both, in out/mine/report.html\n"
      "  tandem report out/mine --tensorboard\n"
      "  tandem report out/mine --csv steps.csv\n"
      "  tandem train configs/tiny.toml --tp 2 --out out/mine --set data.val_fraction=0.3\n"
      "  tandem report out/mine --complete --prompt '#include <'");
  command->callback([dirs, complete, options, live, is_tensorboard, csv] {
    const std::string& dir = dirs->front();
    const std::vector<std::filesystem::path> all(dirs->begin(), dirs->end());
    report::check_runs(all);
    if (!live->address.empty()) {
      now_doing("the live page of " + dir);
      return serve_live({.dir = dir,
                         .address = parse_listen_address("--live", live->address),
                         .parent = live->parent,
                         .others = {dirs->begin() + 1, dirs->end()}});
    }
    for (const std::filesystem::path& each : all) check_folder(each);
    now_doing("reading " + dir);
    if (!csv->empty()) {
      const std::string text = report::steps_as_csv(all);
      *csv == "-" ? fmt::print("{}", text) : write_output(*csv, text);
      return finish_output();
    }
    if (*is_tensorboard) return write_tensorboards(*dirs);
    if (*complete) {
      now_doing("measuring for " + dir);
      measure_report_sections(all[0], *options);
    }
    now_doing("reading " + dir);
    fmt::print("{}", write_report(all[0], read_run_goal, std::span(all).subspan(1)));
    fmt::print("Wrote {} and {}\n", single_line((all[0] / "report.html").string()),
               single_line((all[0] / "summary.json").string()));
  });
}

}  // namespace tandem::cli
