#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <string>
#include <system_error>

#include "cli/commands.h"
#include "core/system/console.h"
#include "core/system/files.h"
#include "core/system/printable.h"
#include "engine/plan/goal.h"
#include "engine/report/report.h"
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

struct LiveOptions {
  std::string address;
  int parent = 0;
};

}  // namespace

void add_report(CLI::App& app) {
  auto* command = app.add_subcommand("report", "Write charts and tables of a run as one HTML file");
  auto dir = std::make_shared<std::string>();
  command->add_option("DIR", *dir, "Folder that `tandem train --out` wrote")->required();
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
  command->add_option("--prompt", options->prompt, "Prompt of the sample, with --complete");
  command->footer(
      "\nReads DIR/metrics.jsonl and what else is there (run.json, sample.txt, trace.json,\n"
      "split/{serial,overlapped}/); writes DIR/report.html, which opens offline, and\n"
      "DIR/summary.json. With --complete, in the folder in which the training was started: a\n"
      "run of your own gets the report that `make run` makes.\n"
      "\n--live: progress, curves, ranks and their groups, links, faults; Prometheus text at\n"
      "/metrics. It reads the files of the run as they grow, and needs nothing of its processes.\n"
      "\nExamples:\n"
      "  tandem report out                 after `make run`\n"
      "  tandem report out/mine --live 8080\n"
      "  tandem report out/mine --tensorboard\n"
      "  tandem train configs/tiny.toml --tp 2 --out out/mine --set data.val_fraction=0.3\n"
      "  tandem report out/mine --complete --prompt '#include <'");
  command->callback([dir, complete, options, live, is_tensorboard] {
    const std::filesystem::path path = *dir;
    if (!live->address.empty()) {
      now_doing("the live page of " + *dir);
      return serve_live({*dir, parse_listen_address("--live", live->address), live->parent});
    }
    check_folder(path);
    if (*is_tensorboard) {
      now_doing("reading " + *dir);
      const auto [file, steps] = report::write_tensorboard(*dir);
      fmt::print("Wrote {} steps to {}\n", steps, single_line(file));
      return finish_output();
    }
    if (*complete) {
      now_doing("measuring for " + *dir);
      measure_report_sections(path, *options);
    }
    now_doing("reading " + *dir);
    fmt::print("{}", write_report(path, read_run_goal));
    fmt::print("Wrote {} and {}\n", single_line((path / "report.html").string()),
               single_line((path / "summary.json").string()));
  });
}

}  // namespace tandem::cli
