#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <string>
#include <system_error>

#include "cli/commands.h"
#include "cli/output.h"
#include "core/files.h"
#include "observe/report.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

void check_folder(const std::filesystem::path& path) {
  std::error_code unknown;  // path_exists says why
  if (std::filesystem::is_directory(path, unknown)) return;
  const std::filesystem::path above = path.has_parent_path() ? path.parent_path() : ".";
  const bool file = path_exists(path), beside = file && path_exists(above / "metrics.jsonl");
  throw InvalidArgument(
      fmt::format("report {}: {}: expected {}", path.string(), file ? "a file" : "no such folder",
                  beside ? fmt::format("a folder: tandem report {}", above.string())
                         : "the folder that tandem train --out wrote"));
}

}  // namespace

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
    check_folder(path);
    now_doing("reading " + *dir);
    fmt::print("{}", write_report(path));
    fmt::print("Wrote {} and {}\n", (path / "report.html").string(),
               (path / "summary.json").string());
  });
}

}  // namespace tandem::cli
