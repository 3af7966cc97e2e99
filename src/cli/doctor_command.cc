#include <fmt/format.h>

#include <memory>
#include <string>

#include "cli/commands.h"
#include "cli/output.h"
#include "core/printable.h"
#include "engine/report/diagnosis.h"

namespace tandem::cli {

void add_doctor(CLI::App& app) {
  auto* command = app.add_subcommand("doctor", "Say in a few lines what held a run back");
  auto out = std::make_shared<std::string>();
  command->add_option("out", *out, "Folder of the run (--out of `tandem train`)")->required();
  command->footer(
      "\nReads OUT/ranks, in which every rank records the phases of its steps (trace.ranks); also\n"
      "while the run goes on. Prints where the time went, ranks whose own work takes longer than\n"
      "on the other ranks of their pipeline stage, how step times drifted, and what to try.\n"
      "\nExample:\n"
      "  tandem doctor out/tiny");
  command->callback([out] {
    now_doing("reading " + *out);
    for (const std::string& line : report::diagnose(*out)) fmt::print("{}\n", single_line(line));
  });
}

}  // namespace tandem::cli
