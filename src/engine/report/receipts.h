// Strategies that a run's operators were asked for, and what ran, from its receipts.json.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tandem::report {

/// Rows of dir/receipts.json, of rank 0's operators; empty without the file, which a run writes at
/// its end. Throws IoError, which names the file, if it is damaged.
nlohmann::ordered_json read_receipts(const std::string& dir);

/// Lines that name the operators that did not run as asked, and why; one line if all did, none if
/// none was asked to overlap.
std::vector<std::string> describe_receipts(const nlohmann::ordered_json& rows);

}  // namespace tandem::report
