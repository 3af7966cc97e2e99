// Causes of a run's lost time, from the records of its ranks.
#pragma once

#include <string>
#include <vector>

namespace tandem::report {

/// Lines about the run in `dir`, from dir/ranks: its steps, where their time went, slow ranks,
/// drift, operators that did not overlap, and what to try; with a trace of the run also slow links.
/// Throws IoError if there are no records, or damaged ones.
std::vector<std::string> diagnose(const std::string& dir);

}  // namespace tandem::report
