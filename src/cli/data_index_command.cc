#include <fmt/format.h>

#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "core/system/console.h"
#include "core/system/files.h"
#include "core/system/printable.h"
#include "engine/config/data_format.h"
#include "engine/data/manifest.h"
#include "engine/data/open_data.h"
#include "engine/data/stream/shared_work.h"
#include "engine/data/text/text_file.h"
#include "engine/report/progress.h"
#include "tandem/error.h"

namespace tandem::cli {
namespace {

constexpr int kFilesDiffer = 1;

struct IndexArguments {
  std::vector<std::string> paths;
  std::string format = "auto", out;
};

/// Reads all of the file.
FileRecord read_record(const std::string& path, SharedWork& work) {
  DataFile file(path, false);
  file.sample(nullptr);
  FileRecord record = make_record(file);
  const TextFile content(open_for_reading(path), path);
  record.hash = content.hash_now([&](size_t bytes) { work.advance(int64_t(bytes)); });
  return record;
}

std::string describe(size_t files, uint64_t bytes) {
  return fmt::format("{} file{}, {}", files, files == 1 ? "" : "s", format_bytes(double(bytes)));
}

void index_data(const IndexArguments& arguments) {
  now_doing("indexing data for " + arguments.out);
  check_writable(arguments.out);
  std::vector<FileRecord> records;
  SharedWork work(nullptr, "hashing the data", 0);
  uint64_t bytes = 0;
  for (const std::string& path : find_data_files(arguments.paths, arguments.format)) {
    records.push_back(read_record(path, work));
    bytes += records.back().bytes;
  }
  replace_file(arguments.out, Manifest(records).to_json());
  fmt::print("{}: {}\n", single_line(arguments.out), describe(records.size(), bytes));
}

/// Difference of a file from its record; empty if there is none.
std::string difference(const FileRecord& record, SharedWork& work) {
  try {
    const FileRecord now = read_record(record.path, work);
    if (now.bytes != record.bytes) {
      return fmt::format("{}: holds {} bytes: expected {}", record.path, now.bytes, record.bytes);
    }
    const bool is_same = (!record.samples || now.samples == record.samples) &&
                         (!record.hash || now.hash == record.hash);
    if (!is_same) return record.path + ": holds other bytes: expected those it had";
    if (record.samples || now.modified_ns == record.modified_ns) return "";
    return record.path + ": was written to: its bytes were not recorded";
  } catch (const IoError& error) {
    return error.what();
  }
}

void verify_data(const std::string& path) {
  now_doing("verifying the data of " + path);
  const Manifest manifest = Manifest::read(path);
  SharedWork work(nullptr, "hashing the data", 0);
  uint64_t bytes = 0;
  bool same = true;
  for (const auto& [name, record] : manifest.records()) {
    bytes += record.bytes;
    const std::string found = difference(record, work);
    if (found.empty()) continue;
    same = false;
    fmt::print("{}\n", single_line(found));
  }
  if (!same) {
    finish_output();
    throw Ended{kFilesDiffer};
  }
  fmt::print("{}: {}, as recorded\n", single_line(path),
             describe(manifest.records().size(), bytes));
}

}  // namespace

void add_data_index(CLI::App& data) {
  auto* index = data.add_subcommand("index", "Record what data files hold, for data.manifest");
  auto arguments = std::make_shared<IndexArguments>();
  index->add_option("paths", arguments->paths, "Folders, globs and files")->required();
  index->add_option("--out", arguments->out, "File to write")->option_text("FILE")->required();
  index->add_option("--format", arguments->format, "Format of the files (data.format)")
      ->check(CLI::IsMember(data_format_names()))
      ->capture_default_str();
  index->footer(
      "\nReads all files once and writes their sizes, times and hashes. A run with data.manifest\n"
      "compares samples of the files with it as it begins, and hashes no large file of text "
      "again.\n"
      "\nExample:\n"
      "  tandem data index include --out data.json");
  index->callback([arguments] { index_data(*arguments); });
  auto* verify = data.add_subcommand("verify", "Read data files and compare them with a manifest");
  auto path = std::make_shared<std::string>();
  verify->add_option("manifest", *path, "File that tandem data index wrote, or OUT/data.json")
      ->required();
  verify->footer(
      "\nExit code 1, with a line for each, if files differ or are gone.\n"
      "\nExample:\n"
      "  tandem data verify data.json");
  verify->callback([path] { verify_data(*path); });
}

void add_data(CLI::App& app) {
  auto* command = app.add_subcommand("data", "Work with the data of runs");
  command->require_subcommand(1);
  add_data_check(*command);
  add_data_index(*command);
}

}  // namespace tandem::cli
