#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <string>

#include "cli/commands.h"
#include "observe/report.h"

namespace tandem::cli {

void add_report(CLI::App& app) {
  auto* command = app.add_subcommand("report", "Charts and tables of a run as one HTML file");
  auto dir = std::make_shared<std::string>();
  command->add_option("DIR", *dir, "Folder that `tandem train --out` wrote")->required();
  command->footer(
      "Reads DIR/metrics.jsonl and what else is there (run.json, sample.txt, trace.json,\n"
      "split/{serial,overlapped}/); writes DIR/report.html, which opens offline, and\n"
      "DIR/summary.json.\n\nExample, after `make run`: tandem report out");
  command->callback([dir] {
    const std::filesystem::path path = *dir;
    fmt::print("{}", write_report(path));
    fmt::print("Wrote {} and {}\n", (path / "report.html").string(),
               (path / "summary.json").string());
  });
}

}  // namespace tandem::cli
