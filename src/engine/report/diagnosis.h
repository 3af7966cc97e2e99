// Causes of a run's lost time, from the records of its ranks.
#pragma once

#include <string>
#include <vector>

namespace tandem::report {

/// Five lines about the run in `dir`, from dir/ranks: its steps, where their time went, slow ranks,
/// drift, and what to try. Further lines name more slow ranks. Throws IoError if there are no
/// records, or damaged ones.
std::vector<std::string> diagnose(const std::string& dir);

}  // namespace tandem::report
