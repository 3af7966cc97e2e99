// The numbers of runs' steps as CSV.
#pragma once

#include <filesystem>
#include <span>
#include <string>

namespace tandem::report {

/// One line per step of DIR/metrics.jsonl, of each folder in turn, below a line of names. Columns
/// are the keys with a number or a text in any step, in the order in which they first appear; those
/// of an object are KEY.NAME; lists have no column. Numbers are digit for digit those of the log,
/// null and missing ones are empty. With several folders the first column is `run`. Quoted as RFC
/// 4180, line ends are LF. Throws IoError if there is no step, InvalidArgument as check_runs().
std::string steps_as_csv(std::span<const std::filesystem::path> dirs);

}  // namespace tandem::report
