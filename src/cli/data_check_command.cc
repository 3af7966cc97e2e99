#include <fmt/format.h>

#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/output.h"
#include "core/files.h"
#include "core/printable.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/data/ledger_check.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

constexpr int kNotProven = 1;

/// Samples consumed by the checkpoints and the final model of OUT. One whose state cannot be read
/// is named, and left out.
std::vector<ConsumedSamples> read_consumed(const std::string& out) {
  std::vector<std::string> paths = list_checkpoints(out);
  if (path_exists(out + "/final/state.json")) paths.push_back(out + "/final");
  std::vector<ConsumedSamples> saved;
  for (const std::string& path : paths) {
    try {
      const TrainState state = read_train_state(path);
      saved.push_back({path, state.step, state.next_sample});
    } catch (const IoError& error) {
      complain(fmt::format("note: not compared with the ledger: {}", single_line(error.what())));
    }
  }
  return saved;
}

std::string describe(const std::string& path, const LedgerCheck& check) {
  std::string text =
      fmt::format("{}: {} lines, {} steps", single_line(path), check.lines, check.steps);
  const auto add = [&](int64_t count, const char* one, const char* many) {
    if (count > 0) text += fmt::format(", {} {}", count, count == 1 ? one : many);
  };
  add(check.starts - 1, "resume", "resumes");
  add(check.dropped_steps, "lost step made again", "lost steps made again");
  add(check.skipped_samples, "sample skipped", "samples skipped");
  const int64_t epochs = check.next_sample / check.windows;
  return text + fmt::format(
                    "\nsamples 0 to {} consumed once each: {} epochs of {} windows, and {} windows "
                    "of the next\n",
                    check.next_sample - 1, epochs, check.windows,
                    check.next_sample % check.windows);
}

void check_data(const std::string& out) {
  now_doing("checking the ledger of " + out);
  const std::string path = out + "/ledger.jsonl";
  const LedgerCheck check = check_ledger(path, read_consumed(out));
  if (check.ok()) {
    fmt::print("{}", describe(path, check));
    return;
  }
  for (const std::string& problem : check.problems) {
    fmt::print("{}: {}\n", single_line(path), single_line(problem));
  }
  finish_output();
  throw Ended{kNotProven};
}

}  // namespace

void add_data_check(CLI::App& data) {
  auto* check_command =
      data.add_subcommand("check", "Prove that each sample was consumed exactly once");
  auto out = std::make_shared<std::string>();
  check_command->add_option("out", *out, "Folder of the run (--out of `tandem train`)")->required();
  check_command->footer(
      "\nReads OUT/ledger.jsonl and the states of the checkpoints. Exit code 1, with a line for "
      "each\n"
      "fault, if samples have no record or two, if lines are missing, doubled or changed, if the\n"
      "text is another one, or if a checkpoint has consumed samples without a record. Steps that "
      "a\n"
      "kill lost and a resumed run made again count once.\n"
      "\nExample:\n"
      "  tandem data check out/tiny");
  check_command->callback([out] { check_data(*out); });
}

}  // namespace tandem::cli
