#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "core/system/console.h"
#include "core/system/files.h"
#include "core/system/printable.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/config/config.h"
#include "engine/data/ledger/ledger_check.h"
#include "engine/data/ledger/ledger_rehash.h"
#include "engine/data/manifest.h"
#include "engine/data/open_data.h"
#include "engine/data/sampler.h"
#include "engine/data/stream/shared_work.h"
#include "engine/train/step_executor.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

constexpr int kNotProven = 1;

/// Samples consumed by the checkpoints and the final model of OUT. One whose state cannot be read
/// is named, and left out.
std::vector<ConsumedSamples> read_consumed(const std::string& out) {
  std::vector<std::string> paths = list_checkpoints(out);
  if (const std::string final = final_path(out); path_exists(final + "/state.json")) {
    paths.push_back(final);
  }
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
  const auto epochs = [](int64_t samples, int64_t windows) {
    return fmt::format("{} epochs of {} windows, and {} windows of the next\n", samples / windows,
                       windows, samples % windows);
  };
  text += fmt::format("\nsamples 0 to {} consumed once each", check.next_sample - 1);
  if (check.windows == 0 && !check.consumed.empty()) {
    for (const StreamCursor& cursor : check.consumed.back().cursors) {
      text += fmt::format("\n  the last step begins after {} epochs and {} shards of a stream",
                          cursor.epoch, cursor.shard);
    }
    return text + "\n";
  }
  if (check.sources.empty()) return text + ": " + epochs(check.next_sample, check.windows);
  text += "\n";
  for (size_t i = 0; i < check.sources.size(); ++i) {
    const SourceSamples& source = check.sources[i];
    text += fmt::format("  {} of source {} of the blend: {}", source.samples, i + 1,
                        epochs(source.samples, source.windows));
  }
  return text;
}

/// Reads the samples of `steps` steps again, of the data that OUT/config.toml names.
void rehash(const std::string& out, int64_t steps, LedgerCheck& check) {
  now_doing("reading the data of " + out);
  const TrainConfig config = parse_config(read_file(out + "/config.toml"), "config.toml");
  const auto source =
      open_data(config.data, config.model.vocab, config.train, nullptr, manifest_path(out));
  if (source->fingerprint() != check.start.data) {
    check.problems.push_back(fmt::format("the hash of the training text is {} now: expected {}",
                                         source->fingerprint(), check.start.data));
    return;
  }
  const Sampler sampler(*source, check.start.seq, uint64_t(check.start.seed),
                        make_sampler_options(config.data));
  SharedWork work(nullptr, "reading the samples again", 0);
  for (const std::string& problem : rehash_steps(check, sampler, steps, [&] { work.advance(0); })) {
    check.problems.push_back(problem);
  }
}

struct DataCheckArguments {
  std::string out;
  std::optional<int64_t> rehash;
};

void check_data(const DataCheckArguments& arguments) {
  const std::string& out = arguments.out;
  now_doing("checking the ledger of " + out);
  const std::string path = out + "/ledger.jsonl";
  LedgerCheck check = check_ledger(path, read_consumed(out));
  const bool rehashes = arguments.rehash && check.ok() && !check.consumed.empty();
  if (rehashes) rehash(out, *arguments.rehash, check);
  if (check.ok()) {
    fmt::print("{}", describe(path, check));
    if (!rehashes) return;
    const auto all = int64_t(check.consumed.size()), given = *arguments.rehash;
    fmt::print("samples of {} of {} steps read again: as recorded\n",
               given > 0 ? std::min(given, all) : all, all);
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
  auto arguments = std::make_shared<DataCheckArguments>();
  check_command->add_option("out", arguments->out, "Folder of the run (--out of tandem train)")
      ->required();
  check_command
      ->add_option("--rehash", arguments->rehash,
                   "Also read the samples of N steps again, evenly spread (0: of all), and compare "
                   "them with their recorded hashes")
      ->check(CLI::NonNegativeNumber);
  check_command->footer(
      "\nReads OUT/ledger.jsonl and the states of the checkpoints. Exit code 1, with a line for "
      "each\n"
      "fault, if samples have no record or two, if lines are missing, doubled or changed, if the\n"
      "text is another one, or if a checkpoint has consumed samples without a record. Steps that "
      "a\n"
      "kill lost and a resumed run made again count once.\n"
      "\nExample:\n"
      "  tandem data check out/tiny --rehash 16");
  check_command->callback([arguments] { check_data(*arguments); });
}

}  // namespace tandem::cli
